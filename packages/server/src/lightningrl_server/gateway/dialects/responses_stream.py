"""OpenAI responses: server-sent events.

response.created ─► response.in_progress
  ─► output_item.added ─► content_part.added ─► reasoning_text.delta… ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► content_part.added ─► output_text.delta…    ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► function_call_arguments.delta               ─► .done                      ─► output_item.done
       (custom_tool_call_input of a custom tool)
─► response.completed | response.incomplete
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects.chat_answer import token_logprobs
from lightningrl_server.gateway.dialects.responses import ResponsesRequest
from lightningrl_server.gateway.dialects.responses_items import (
    ended,
    message,
    output_text,
    reasoning,
    response,
    tool_call,
)
from lightningrl_server.gateway.request import Answer, AnswerStart, Refusal
from lightningrl_server.rendering.completion import TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["ResponsesStream", "write_json"]

_encode = msgspec.json.Encoder().encode

_KINDS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesStream:
    """Events of one streamed response. Function calls come last, so that items stand as in a whole answer."""

    sends_tool_calls = False

    def __init__(self, request: ResponsesRequest, renderer: PolicyRenderer, start: AnswerStart) -> None:
        self._request = request
        self._renderer = renderer
        self._answer_start = start
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """Items that are done."""
        self._open: str | None = None
        self._text = ""
        self._has_message = False
        self._late_reasoning = ""
        self._logprobs: list[dict[str, Any]] = []

    def delta(self, delta: TextDelta) -> bytes:
        out: list[bytes] = []
        logprobs = self._logprobs_of(delta)
        self._logprobs += logprobs
        if delta.reasoning:
            if self._has_message:
                self._late_reasoning += delta.reasoning
            else:
                out += self._part("reasoning", delta.reasoning)
        if delta.content:
            out += self._part("message", delta.content, logprobs)
        return b"".join(out)

    def finish(self, answer: Answer) -> bytes:
        choice = answer.choices[0]
        out: list[bytes] = []
        if self._number == 0:
            whole = TextDelta(
                index=0,
                content=choice.content,
                reasoning=choice.reasoning,
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
            )
            self._logprobs = []
            out.append(self.delta(whole))
        if not self._has_message and not choice.tool_calls:
            out += self._part("message", "")
        is_cut = choice.finish_reason is FinishReason.LENGTH
        out += self._close(is_cut=is_cut)
        if self._late_reasoning:
            out += self._part("reasoning", self._late_reasoning)
            out += self._close(is_cut=False)
        for index, call in enumerate(choice.tool_calls):
            out += self._tool_call(index, call)
        last = "response.incomplete" if is_cut else "response.completed"
        out.append(self._event(last, response=ended(self._request, answer, self._items)))
        return b"".join(out)

    def error(self, refusal: Refusal) -> bytes:
        error = {"type": "server_error", "code": refusal.code, "message": refusal.message, "param": refusal.param}
        return self._event("error", code=refusal.code, message=refusal.message, param=refusal.param, error=error)

    def _logprobs_of(self, delta: TextDelta) -> list[dict[str, Any]]:
        if not self._request.logprobs:
            return []
        return token_logprobs(
            delta.token_ids, delta.logprobs, self._renderer, top=bool(self._request.body.top_logprobs)
        )

    def _part(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[bytes]:
        out = self._start(kind) if self._open != kind else []
        if text:
            self._text += text
            more = {"logprobs": logprobs or []} if kind == "message" else {}
            out.append(
                self._event(f"response.{_KINDS[kind]}.delta", **self._place(), content_index=0, delta=text, **more)
            )
        return out

    def _start(self, kind: str) -> list[bytes]:
        out = self._close(is_cut=False)
        out += self._opening()
        self._open, self._text = kind, ""
        self._has_message = self._has_message or kind == "message"
        out.append(
            self._event("response.output_item.added", output_index=len(self._items), item=self._item("in_progress", []))
        )
        out.append(
            self._event("response.content_part.added", **self._place(), content_index=0, part=self._content("", []))
        )
        return out

    def _close(self, *, is_cut: bool) -> list[bytes]:
        if self._open is None:
            return []
        kind, place = self._open, self._place()
        part = self._content(self._text, self._logprobs)
        more = {"logprobs": self._logprobs} if kind == "message" else {}
        item = self._item("incomplete" if is_cut and kind == "message" else "completed", [part])
        out = [
            self._event(f"response.{_KINDS[kind]}.done", **place, content_index=0, text=self._text, **more),
            self._event("response.content_part.done", **place, content_index=0, part=part),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._open = None
        return out

    def _tool_call(self, index: int, call: ToolRequest) -> list[bytes]:
        out = self._opening()
        started, item = (
            tool_call(self._answer_start.id, index, call, self._request.tools, status=status)
            for status in ("in_progress", "completed")
        )
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

    def _opening(self) -> list[bytes]:
        if self._number:
            return []
        started = response(self._request, self._answer_start, "in_progress")
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item("in_progress", [])["id"], "output_index": len(self._items)}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        make = reasoning if self._open == "reasoning" else message
        return make(self._answer_start.id, content, status=status)

    def _content(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else output_text(text, logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + write_json(data) + b"\n\n"


def write_json(value: dict[str, Any]) -> bytes:
    """A response says again what was asked: also numbers that are beyond 64 bits."""
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value).encode()
