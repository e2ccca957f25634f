"""Anthropic messages: answers, server-sent events and errors.

message_start ─► (content_block_start ─► content_block_delta… ─► content_block_stop)… ─► message_delta ─► message_stop
                  thinking, text, tool_use: in this order, as in a whole answer
"""

from __future__ import annotations

from typing import Any

import msgspec

from lightningrl.types import FinishReason
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


class MessagesFormat:
    """`POST /messages`."""

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> MessagesRequest:
        return parse_messages_request(body, drops_hosted=settings.drops_hosted)

    def write_error(self, refusal: Refusal) -> bytes:
        return _encode(_error(refusal))

    def open_stream(self, request: MessagesRequest, renderer: PolicyRenderer, start: AnswerStart) -> MessagesStream:
        return MessagesStream(request, start)

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


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    is_long = refusal.code == CONTEXT_CODE
    message = f"prompt is too long: {refusal.message}" if is_long else refusal.message  # agents look for these words
    error = {"type": kind, "message": message} | ({"details": refusal.details} if refusal.details else {})
    return {"type": "error", "error": error, "request_id": None}


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


class MessagesStream:
    """Server-sent events of one streamed message. Tool calls come last, so that blocks stand as in a whole answer."""

    sends_tool_calls = False

    def __init__(self, request: MessagesRequest, start: AnswerStart) -> None:
        self._request = request
        self._answer_start = start
        self._has_started = False
        self._index = -1
        self._open: str | None = None
        self._has_text = False
        self._late_thinking = ""

    def delta(self, delta: TextDelta) -> bytes:
        out: list[bytes] = []
        if delta.reasoning and self._request.shows_thinking:
            if self._has_text:
                self._late_thinking += delta.reasoning
            else:
                out += self._part("thinking", delta.reasoning)
        if delta.content:
            self._has_text = True
            out += self._part("text", delta.content)
        return b"".join(out)

    def finish(self, answer: Answer) -> bytes:
        choice = answer.choices[0]
        out: list[bytes] = []
        if not self._has_started:
            out.append(self.delta(TextDelta(index=0, content=choice.content, reasoning=choice.reasoning)))
        if not self._has_text and not choice.tool_calls:
            out += self._part("text", "")
        if self._late_thinking:
            out += self._part("thinking", self._late_thinking)
        for call in choice.tool_calls:
            out += self._start("tool_use", _tool_use(call, {}))
            out.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        out += self._stop()
        reason, stopped_by = _stop(self._request, choice)
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stopped_by}}
        out.append(
            _event(last | {"usage": _usage(answer.prompt_tokens, len(choice.token_ids))} | _edits(self._request))
        )
        out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def error(self, refusal: Refusal) -> bytes:
        return _event(_error(refusal))

    def _part(self, kind: str, text: str) -> list[bytes]:
        out: list[bytes] = []
        if self._open != kind:
            empty = (
                {"type": "text", "text": ""}
                if kind == "text"
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
            out += self._start(kind, empty)
        if text:
            out.append(self._delta({"type": f"{kind}_delta", kind: text}))
        return out

    def _start(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        out = self._stop()
        if not self._has_started:
            self._has_started = True
            out.append(_event({"type": "message_start", "message": _message(self._request, self._answer_start)}))
        self._index += 1
        self._open = kind
        out.append(_event({"type": "content_block_start", "index": self._index, "content_block": block}))
        return out

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> list[bytes]:
        if self._open is None:
            return []
        out: list[bytes] = []
        if self._open == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._open = None
        out.append(_event({"type": "content_block_stop", "index": self._index}))
        return out


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), _encode(data))
