"""OpenAI chat completions: the request, checked and put into our own terms; answers, server-sent events and errors.

Fields that SDKs send and that change nothing here (`user`, `store`, `metadata`, …) are ignored. Fields that would
change what is sampled are the run's to decide (`temperature`, `top_p`, penalties, …), honoured (`max_tokens`, `stop`,
`seed`, `n`), shown to the policy (`response_format`), or refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.checks import read_format, with_instruction
from lightningrl_server.gateway.dialects.synonyms import ROLES, THOUGHT_KEYS, THOUGHT_PARTS, text_of
from lightningrl_server.gateway.dialects.tools import function_tool, hosted_hint, read_offer
from lightningrl_server.gateway.request import Answer, AnswerFormat, AnswerStart, CallRequest, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = [
    "DONE",
    "ChatFormat",
    "ChatRequest",
    "ChatStream",
    "parse_chat_request",
    "token_logprobs",
    "write_error",
    "write_model",
    "write_models",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A chat completion request."""

    call: CallRequest
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    """With `stream`: end with a chunk that counts tokens."""


class _StreamOptions(msgspec.Struct):
    include_usage: checks.Flag = None


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any] | str] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_text: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: Any = None
    partial: Any = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: checks.Flag = None
    n: checks.Number = None
    stream: checks.Flag = None
    stream_options: _StreamOptions | None = None
    max_tokens: checks.Number = None
    max_completion_tokens: checks.Number = None
    stop: str | list[str | None] | None = None
    seed: checks.Number = None
    temperature: Any = None
    top_p: Any = None
    logprobs: checks.Flag = None
    top_logprobs: checks.Number = None
    response_format: str | dict[str, Any] | None = None
    logit_bias: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    previous_response_id: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_OWN = {
    "instructions": "a system message",
    "format": "response_format",
    "bound": "max_tokens",
    "stop": "stop",
    "tools": "tools",
}


def parse_chat_request(data: bytes, *, max_choices: int, drops_hosted: bool = False) -> ChatRequest:
    """Raises Refusal with what is wrong, which, and what next."""
    body = checks.decode_body(_decode, data, "chat completion")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    choices = checks.read_whole("n", body.n, 1, max_choices) or 1
    top_logprobs = checks.read_top_logprobs(body.top_logprobs)
    if not body.messages:
        raise Refusal("the request has no messages; send at least one", param="messages")
    checks.check_count("messages", body.messages)
    _refuse_unsupported(body)
    messages = [_message(message, i) for i, message in enumerate(body.messages)]
    checks.check_tool_call_ids(messages)
    is_offering = body.tools or body.tool_choice or body.tool_choice == {}
    offer = read_offer(body.tools, _tool, body.tool_choice, drops_hosted=drops_hosted) if is_offering else {}
    wanted = _format(body.response_format) if body.response_format else None
    call = CallRequest(
        model=body.model or "",
        messages=tuple(messages) if wanted is None else with_instruction(messages, wanted),
        format=wanted,
        parallel_tools=body.parallel_tool_calls is None or bool(body.parallel_tool_calls),
        n=choices,
        stream=bool(body.stream),
        max_tokens=checks.read_whole("max_tokens", limit, 1),
        stop=checks.read_stop("stop", body.stop),
        # each choice is sampled with a seed of its own
        seed=checks.read_whole("seed", body.seed, -(2**63), 2**63 - choices),
        asked=checks.read_asked(temperature=body.temperature, top_p=body.top_p),
        extras=checks.read_extras(data, _Body, own=_OWN),
        **offer,
    )
    return ChatRequest(
        call=call,
        logprobs=bool(body.logprobs),
        top_logprobs=top_logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse_unsupported(body: _Body) -> None:
    if body.logit_bias and not checks.is_nothing(body.logit_bias):
        raise Refusal.at(
            "logit_bias", "is not supported: the recorded logprobs would not be the ones sampled from; leave it out"
        )
    chosen = None if body.function_call in ("none", "auto") else body.function_call
    if (body.functions and not checks.is_nothing(body.functions)) or (chosen and not checks.is_nothing(chosen)):
        raise Refusal("functions and function_call are not supported; use tools", param="functions")
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise Refusal.at("stream_options", "is for streams alone; set stream to true, or leave it out")
    if "audio" in (body.modalities or ()):
        raise Refusal("the policy answers in text only; leave audio out of modalities", param="modalities")
    if body.previous_response_id:
        raise Refusal(
            "chat completions go on from no previous_response_id; send the whole history in messages, or use "
            "/responses",
            param="previous_response_id",
        )
    if body.web_search_options is not None:  # an empty one asks for a search as well
        raise Refusal.at("web_search_options", "is not supported; give the agent a search tool")


def _message(message: _Message, index: int) -> dict[str, Any]:
    where, role = f"messages[{index}]", ROLES.get(message.role, message.role)
    if role not in ("system", "user", "assistant", "tool"):
        raise Refusal.at(
            where, f"has the role {message.role!r}; known are system, developer, user, assistant, tool", field=".role"
        )
    content = message.content
    if role == "assistant" and isinstance(content, list):
        content = [part for part in content if not _is_thought(part)]
    text = content if isinstance(content, str) else checks.join_text(content, where)
    plain: dict[str, Any] = {"role": role, "content": text}
    if message.audio:
        raise Refusal.at(where, "speaks in audio; the policy reads text only: send its text", field=".audio")
    _refuse_prefill(message, where)
    if role == "assistant":
        if message.refusal and not plain["content"]:
            plain["content"] = message.refusal
        if thoughts := _reasoning(message):
            plain["reasoning_content"] = thoughts
        if message.tool_calls:
            plain["tool_calls"] = [_tool_call(call, where) for call in message.tool_calls]
        if message.function_call and not checks.is_nothing(message.function_call):
            raise Refusal(f"{where}.function_call is not supported; use tool_calls", param=f"{where}.function_call")
    elif role == "tool" and (call_id := _call_id(message.tool_call_id)):
        plain["tool_call_id"] = call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _refuse_prefill(message: _Message, where: str) -> None:
    for name in ("prefix", "partial"):  # as Mistral and DeepSeek, and Moonshot and Qwen have it
        if getattr(message, name):
            problem = f"has {name}: a policy does not go on with an answer that was written for it"
            raise Refusal.at(where, f"{problem}; end with the user's message", field=f".{name}")


def _reasoning(message: _Message) -> str:
    """Text of the message's reasoning, under the name that its client gives it, or among the content's parts."""
    parts = [part for part in message.content if _is_thought(part)] if isinstance(message.content, list) else []
    thoughts = filter(None, (*(getattr(message, key) for key in THOUGHT_KEYS), parts))
    return next(filter(None, map(text_of, thoughts)), "")


def _is_thought(part: dict[str, Any] | str) -> bool:
    return isinstance(part, dict) and part.get("type") in THOUGHT_PARTS


def _tool_call(call: _ToolCall, where: str) -> dict[str, Any]:
    if call.function is None:
        raise Refusal.at(
            where, f"has a tool call of type {call.type!r}; only functions are supported", field=".tool_calls"
        )
    value = checks.read_arguments(call.function.arguments, where)
    return {"id": _call_id(call.id), "type": "function", "function": {"name": call.function.name, "arguments": value}}


def _call_id(call_id: str | None) -> str | None:
    """None for an id that is none, in any spelling; Mistral's SDK writes "null"."""
    return None if call_id is None or call_id.strip() in ("", "null") else call_id


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    function = tool.get("function")
    if (tool.get("type") or "function") != "function" or not isinstance(function, dict):
        hint = hosted_hint(tool.get("type"))
        raise Refusal.at(
            where, f"is no function with a name; only functions are supported{hint and ': give the agent one'}{hint}"
        )
    return function_tool(
        where, function.get("name"), function.get("description"), function.get("parameters"), function.get("strict")
    )


def _format(wanted: str | dict[str, Any]) -> AnswerFormat | None:
    return read_format(wanted if isinstance(wanted, dict) else {"type": wanted}, "response_format")


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
        message |= _written_reasoning(choice.reasoning)
    if choice.tool_calls:
        message["tool_calls"] = [_written_tool_call(call) for call in choice.tool_calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(request, choice.token_ids, choice.logprobs, renderer),
        "finish_reason": _finish(choice),
    }


def _written_reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _finish(choice: Choice) -> str:
    if choice.tool_calls and choice.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return choice.finish_reason.value


def _written_tool_call(call: ToolRequest) -> dict[str, Any]:
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
            message |= _written_reasoning(delta.reasoning)
        logprobs = _logprobs(self._request, delta.token_ids, delta.logprobs, self._renderer)
        parts: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
        if message or logprobs:
            parts.append((message, logprobs))
        # clients read the first of each
        parts += [({"tool_calls": [{"index": i, **_written_tool_call(call)}]}, None) for i, call in delta.tool_calls]
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
