"""Anthropic messages: answers, server-sent events and errors.

message_start ─► (content_block_start ─► content_block_delta… ─► content_block_stop)… ─► message_delta ─► message_stop
                  thinking, text, tool_use: in this order, as in a whole answer
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.format import PartStream
from lightningrl_server.gateway.dialects.messages import MessagesRequest, parse_messages_request
from lightningrl_server.gateway.request import CONTEXT_CODE, Answer, AnswerStart, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["MessagesFormat", "MessagesStream"]

_encode = msgspec.json.Encoder().encode

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    is_long = refusal.code == CONTEXT_CODE
    message = f"prompt is too long: {refusal.message}" if is_long else refusal.message  # agents look for these words
    error = {"type": kind, "message": message} | ({"details": refusal.details} if refusal.details else {})
    return {"type": "error", "error": error, "request_id": refusal.request_id}


def _message(request: MessagesRequest, start: AnswerStart) -> dict[str, Any]:
    return {
        "id": f"msg_{start.id}",
        "type": "message",
        "role": "assistant",
        "model": request.call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(start.prompt_tokens, 0),
    }


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The whole prompt is input: the agent asked for no cache."""
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _edits(request: MessagesRequest) -> dict[str, Any]:
    """None was done: a call with one that would change its prompt is refused."""
    return {"context_management": {"applied_edits": []}} if request.manages_context else {}


def _content(request: MessagesRequest, choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning and request.shows_thinking:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.content})
    blocks += [_tool_use(call, msgspec.Raw(call.arguments.encode())) for call in choice.tool_calls]
    return blocks


def _tool_use(call: ToolRequest, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _stop(request: MessagesRequest, choice: Choice) -> tuple[str, str | None]:
    if choice.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if choice.tool_calls:
        return "tool_use", None
    if choice.stopped_by in request.call.stop:
        return "stop_sequence", choice.stopped_by
    return "end_turn", None


class MessagesStream(PartStream[MessagesRequest]):
    """Server-sent events of one streamed message."""

    REASONING = "thinking"
    TEXT = "text"
    _index = -1

    def delta(self, delta: TextDelta) -> bytes:
        is_hidden = delta.reasoning and not self._request.shows_thinking
        return super().delta(replace(delta, reasoning="") if is_hidden else delta)

    def error(self, refusal: Refusal) -> bytes:
        return _event(_error(refusal))

    def _start(self, kind: str) -> list[bytes]:
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return self._block(empty if kind == self.REASONING else {"type": "text", "text": ""})

    def _block(self, block: dict[str, Any]) -> list[bytes]:
        out: list[bytes] = []
        if not self._has_started:
            self._has_started = True
            out.append(_event({"type": "message_start", "message": _message(self._request, self._answer_start)}))
        self._index += 1
        return [*out, _event({"type": "content_block_start", "index": self._index, "content_block": block})]

    def _text(self, kind: str, text: str) -> bytes:
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        if self._open is None:
            return []
        signature = [self._delta({"type": "signature_delta", "signature": ""})] if self._open == self.REASONING else []
        self._open = None
        return [*signature, _event({"type": "content_block_stop", "index": self._index})]

    def _tool_call(self, index: int, call: ToolRequest) -> list[bytes]:
        return [
            *self._block(_tool_use(call, {})),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            _event({"type": "content_block_stop", "index": self._index}),
        ]

    def _end(self, answer: Answer) -> list[bytes]:
        choice = answer.choices[0]
        reason, stopped_by = _stop(self._request, choice)
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stopped_by}}
        last["usage"] = _usage(answer.prompt_tokens, len(choice.token_ids))
        return [_event(last | _edits(self._request)), _event({"type": "message_stop"})]


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), _encode(data))


class MessagesFormat:
    """`POST /messages`."""

    open_stream = MessagesStream

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> MessagesRequest:
        return parse_messages_request(body, drops_hosted=settings.drops_hosted)

    def write_error(self, refusal: Refusal) -> bytes:
        return _encode(_error(refusal))

    def write_answer(self, request: MessagesRequest, answer: Answer, renderer: PolicyRenderer) -> bytes:
        """A whole `message`."""
        choice = answer.choices[0]
        reason, stopped_by = _stop(request, choice)
        message = _message(request, answer.start)
        message |= {"content": _content(request, choice), "stop_reason": reason, "stop_sequence": stopped_by}
        message["usage"] = _usage(answer.prompt_tokens, len(choice.token_ids))
        return _encode(message | _edits(request))

    def write_count(self, tokens: int) -> bytes:
        """The answer of `count_tokens`."""
        return _encode({"input_tokens": tokens})
