"""OpenAI responses: answers, server-sent events and errors.

response.created ─► response.in_progress
  ─► output_item.added ─► content_part.added ─► reasoning_text.delta… ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► content_part.added ─► output_text.delta…    ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► function_call_arguments.delta               ─► .done                      ─► output_item.done
       (custom_tool_call_input of a custom tool)
─► response.completed | response.incomplete
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.chat_answer import token_logprobs, write_error
from lightningrl_server.gateway.dialects.format import PartStream
from lightningrl_server.gateway.dialects.responses import ResponsesRequest, parse_responses_request
from lightningrl_server.gateway.dialects.responses_tools import OfferedTools, read_input
from lightningrl_server.gateway.request import Answer, AnswerStart, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["ResponsesFormat", "ResponsesStream"]

_encode = msgspec.json.Encoder().encode

_UNSAID = {
    "function": {"description": None, "parameters": None, "strict": False},
    "json_schema": {"description": None, "strict": False},
}
"""Fields of a function, or of a format, that a request may leave out and a response may not."""
_KINDS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesStream(PartStream[ResponsesRequest]):
    """Events of one streamed response."""

    REASONING = "reasoning"
    TEXT = "message"

    def __init__(self, request: ResponsesRequest, renderer: PolicyRenderer, start: AnswerStart) -> None:
        super().__init__(request, renderer, start)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """Items that are done."""
        self._whole_text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._new_logprobs: list[dict[str, Any]] = []
        """Log-probabilities of the latest delta."""

    def delta(self, delta: TextDelta) -> bytes:
        self._new_logprobs = _logprobs(self._request, delta, self._renderer)
        self._logprobs += self._new_logprobs
        return super().delta(delta)

    def finish(self, answer: Answer) -> bytes:
        if not self._has_started:
            self._logprobs = []
        return super().finish(answer)

    def error(self, refusal: Refusal) -> bytes:
        error = {"type": "server_error", "code": refusal.code, "message": refusal.message, "param": refusal.param}
        return self._event("error", code=refusal.code, message=refusal.message, param=refusal.param, error=error)

    def _start(self, kind: str) -> list[bytes]:
        self._whole_text = ""
        item, part = self._item("in_progress", []), self._content("", [])
        return [
            *self._opening(),
            self._event("response.output_item.added", output_index=len(self._items), item=item),
            self._event("response.content_part.added", **self._place(), content_index=0, part=part),
        ]

    def _text(self, kind: str, text: str) -> bytes:
        self._whole_text += text
        more = {"logprobs": self._new_logprobs} if kind == self.TEXT else {}
        return self._event(f"response.{_KINDS[kind]}.delta", **self._place(), content_index=0, delta=text, **more)

    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        if self._open is None:
            return []
        kind, place = self._open, self._place()
        part = self._content(self._whole_text, self._logprobs)
        more = {"logprobs": self._logprobs} if kind == self.TEXT else {}
        item = self._item("incomplete" if is_cut and kind == self.TEXT else "completed", [part])
        out = [
            self._event(f"response.{_KINDS[kind]}.done", **place, content_index=0, text=self._whole_text, **more),
            self._event("response.content_part.done", **place, content_index=0, part=part),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._open = None
        return out

    def _tool_call(self, index: int, call: ToolRequest) -> list[bytes]:
        out = self._opening()
        asked = self._answer_start.id, index, call, self._request.tools
        started, item = _tool_call(*asked, status="in_progress"), _tool_call(*asked, status="completed")
        place = {"item_id": item["id"], "output_index": len(self._items)}
        key, named = ("input", {}) if "input" in item else ("arguments", {"name": item["name"]})
        kind = "custom_tool_call_input" if "input" in item else "function_call_arguments"
        out += [
            self._event("response.output_item.added", output_index=len(self._items), item=started),
            self._event(f"response.{kind}.delta", **place, delta=item[key]),
            self._event(f"response.{kind}.done", **place, **named, **{key: item[key]}),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        return out

    def _end(self, answer: Answer) -> list[bytes]:
        ended = _ended(self._request, answer, self._items)
        return [self._event(f"response.{ended['status']}", response=ended)]

    def _opening(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        started = _response(self._request, self._answer_start, "in_progress")
        return [self._event(f"response.{state}", response=started) for state in ("created", "in_progress")]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item("in_progress", [])["id"], "output_index": len(self._items)}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        make = _reasoning if self._open == self.REASONING else _message
        return make(self._answer_start.id, content, status=status)

    def _content(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._open == self.REASONING:
            return {"type": "reasoning_text", "text": text}
        return _output_text(text, logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + _write(data) + b"\n\n"


def _write(value: dict[str, Any]) -> bytes:
    """A response says again what was asked: also numbers that are beyond 64 bits."""
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value).encode()


def _output(call_id: str, choice: Choice, tools: OfferedTools, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"
    if choice.reasoning:
        items.append(_reasoning(call_id, [{"type": "reasoning_text", "text": choice.reasoning}], status="completed"))
    if choice.content or not choice.tool_calls:
        items.append(_message(call_id, [_output_text(choice.content, logprobs)], status=status))
    calls = enumerate(choice.tool_calls)
    return items + [_tool_call(call_id, index, call, tools, status="completed") for index, call in calls]


def _response(request: ResponsesRequest, start: AnswerStart, status: str) -> dict[str, Any]:
    """A response without output yet; it says what was asked."""
    body = request.body
    return {
        "id": f"resp_{start.id}",
        "object": "response",
        "created_at": start.created,
        "completed_at": int(time.time()) if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": request.call.parallel_tools,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": start.sampling.temperature,
        "text": {"format": _whole((body.text.format if body.text else None) or {"type": "text"})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_whole(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": start.sampling.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tool_calls": body.max_tool_calls,
        "service_tier": "default",
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }


def _whole(asked: dict[str, Any]) -> dict[str, Any]:
    """A tool or a format as a response says it again."""
    return _UNSAID.get(str(asked.get("type")), {}) | {key: value for key, value in asked.items() if value is not None}


def _ended(request: ResponsesRequest, answer: Answer, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response with its output, its end and what it took."""
    choice = answer.choices[0]
    is_cut = choice.finish_reason is FinishReason.LENGTH
    whole = _response(request, answer.start, "incomplete" if is_cut else "completed")
    whole["output"] = list(output)
    whole["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
    whole["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(choice.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + len(choice.token_ids),
    }
    return whole


def _logprobs(request: ResponsesRequest, text: TextDelta | Choice, renderer: PolicyRenderer) -> list[dict[str, Any]]:
    """Logprobs of a text's tokens; empty where the request asks for none."""
    if not request.logprobs:
        return []
    return token_logprobs(text.token_ids, text.logprobs, renderer, top=bool(request.body.top_logprobs))


def _reasoning(call_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": f"rs_{call_id}", "type": "reasoning", "status": status, "summary": [], "content": content}


def _message(call_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "status": status, "role": "assistant", "content": content}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _tool_call(call_id: str, index: int, call: ToolRequest, tools: OfferedTools, *, status: str) -> dict[str, Any]:
    """The call as the agent knows the tool; without what it is called with while that is in progress."""
    tool = tools.known_as(call.name)
    item: dict[str, Any] = {
        "id": f"{'ctc' if tool.is_custom else 'fc'}_{call_id}_{index}",
        "type": "custom_tool_call" if tool.is_custom else "function_call",
        "status": status,
        "call_id": call.id,
        "name": tool.name,
    }
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    key, text = ("input", read_input(call.arguments)) if tool.is_custom else ("arguments", call.arguments)
    return item | {key: "" if status == "in_progress" else text}


class ResponsesFormat:
    """`POST /responses`."""

    open_stream = ResponsesStream
    write_error = staticmethod(write_error)

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> ResponsesRequest:
        return parse_responses_request(body, drops_hosted=settings.drops_hosted)

    def write_answer(self, request: ResponsesRequest, answer: Answer, renderer: PolicyRenderer) -> bytes:
        """A whole `response`."""
        choice = answer.choices[0]
        logprobs = _logprobs(request, choice, renderer)
        return _write(_ended(request, answer, _output(answer.id, choice, request.tools, logprobs)))
