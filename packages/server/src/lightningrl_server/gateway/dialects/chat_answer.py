"""OpenAI chat completions: answers, server-sent events and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.chat import ChatRequest, parse_chat_request
from lightningrl_server.gateway.request import Answer, AnswerStart, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["DONE", "ChatFormat", "ChatStream", "token_logprobs", "write_error", "write_model", "write_models"]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


def write_error(refusal: Refusal) -> bytes:
    """The error object that OpenAI's SDKs turn into their exceptions."""
    kind = _ERROR_TYPES.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return _encode({"error": error, "request_id": refusal.request_id})


def write_models(policies: tuple[str, ...], *, for_anthropic: bool = False) -> bytes:
    """The `/models` list."""
    data = [_model(name, for_anthropic) for name in policies]
    ends = {"has_more": False, "first_id": policies[0], "last_id": policies[-1]} if policies else {"has_more": False}
    return _encode({"data": data, **(ends if for_anthropic else {"object": "list"})})


def write_model(name: str, *, for_anthropic: bool = False) -> bytes:
    """One of `/models`."""
    return _encode(_model(name, for_anthropic))


def _model(name: str, for_anthropic: bool) -> dict[str, Any]:
    if for_anthropic:
        facts = {"display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        return {"id": name, "type": "model", **facts}
    return {"id": name, "object": "model", "created": 0, "owned_by": "lightningrl"}


def usage(answer: Answer) -> dict[str, Any]:
    completion = sum(len(choice.token_ids) for choice in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": answer.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def fingerprint(policy: str, version: int) -> str:
    return f"{policy}@{version}"


def _choice(request: ChatRequest, choice: Choice, renderer: PolicyRenderer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content or (None if choice.tool_calls else ""),
        "refusal": None,
    }
    if choice.reasoning:
        message |= _reasoning(choice.reasoning)
    if choice.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(request, choice.token_ids, choice.logprobs, renderer),
        "finish_reason": _finish(choice),
    }


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _finish(choice: Choice) -> str:
    if choice.tool_calls and choice.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return choice.finish_reason.value


def _tool_call(call: ToolRequest) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(
    request: ChatRequest, token_ids: tuple[int, ...], logprobs: tuple[float, ...], renderer: PolicyRenderer
) -> dict[str, Any] | None:
    """In the answer's shape; None where not asked for."""
    if not request.logprobs:
        return None
    return {"content": token_logprobs(token_ids, logprobs, renderer, top=bool(request.top_logprobs)), "refusal": None}


def token_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], renderer: PolicyRenderer, *, top: bool
) -> list[dict[str, Any]]:
    """The sampled tokens with their logprobs; `top_logprobs` has each alone, as the engine reports no others."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        own = renderer.tokenizer.bytes_of(token_id)
        entry: dict[str, Any] = {
            "token": renderer.decode([token_id]),
            "logprob": logprob,
            "bytes": None if own is None else list(own),
        }
        content.append({**entry, "top_logprobs": [entry] if top else []})
    return content


@dataclass(slots=True, eq=False)
class ChatStream:
    """An `EventStream` of server-sent events of one completion."""

    _request: ChatRequest
    _renderer: PolicyRenderer
    _start: AnswerStart
    _begun: set[int] = field(default_factory=set[int])
    _fingerprint: str | None = None

    sends_tool_calls: ClassVar[bool] = True

    def delta(self, delta: TextDelta) -> bytes:
        message: dict[str, Any] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            message = {"role": "assistant", "content": ""}
        if delta.content:
            message["content"] = delta.content
        if delta.reasoning:
            message |= _reasoning(delta.reasoning)
        logprobs = _logprobs(self._request, delta.token_ids, delta.logprobs, self._renderer)
        parts: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        if message or logprobs:
            parts.append((message, logprobs))
        # clients read the first of each
        parts += [({"tool_calls": [{"index": i, **_tool_call(call)}]}, None) for i, call in delta.tool_calls]
        of_choice = {"index": delta.index, "finish_reason": None}
        return b"".join(self._event([{**of_choice, "delta": part, "logprobs": of_part}]) for part, of_part in parts)

    def finish(self, answer: Answer) -> bytes:
        """A recorded answer as if it streamed now; then finish reasons, the usage where asked for, and the end."""
        whole = [self.delta(choice.as_delta()) for choice in answer.choices if choice.index not in self._begun]
        return b"".join((*whole, *self._end(answer)))

    def _end(self, answer: Answer) -> Iterator[bytes]:
        self._fingerprint = fingerprint(answer.policy, answer.policy_version)
        for choice in answer.choices:
            end = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": _finish(choice)}
            yield self._event([end])
        if self._request.include_usage:
            yield self._event([], usage=usage(answer))
        yield DONE

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + write_error(refusal) + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {
            "id": f"chatcmpl-{self._start.id}",
            "object": "chat.completion.chunk",
            "created": self._start.created,
            "model": self._request.call.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            **more,
        }
        return b"data: " + _encode(chunk) + b"\n\n"


class ChatFormat:
    """`POST /chat/completions`."""

    open_stream = ChatStream
    write_error = staticmethod(write_error)

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> ChatRequest:
        return parse_chat_request(body, max_choices=settings.max_choices, drops_hosted=settings.drops_hosted)

    def write_answer(self, request: ChatRequest, answer: Answer, renderer: PolicyRenderer) -> bytes:
        """A whole `chat.completion`."""
        return _encode(
            {
                "id": f"chatcmpl-{answer.id}",
                "object": "chat.completion",
                "created": answer.created,
                "model": answer.model,
                "system_fingerprint": fingerprint(answer.policy, answer.policy_version),
                "choices": [_choice(request, choice, renderer) for choice in answer.choices],
                "usage": usage(answer),
            }
        )
