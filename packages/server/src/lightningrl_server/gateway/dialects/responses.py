"""OpenAI responses: the request, checked and put into our own terms; answers, server-sent events and errors.

    instructions                        ─► system message, for this call alone
    message                             ─► message
    reasoning, message, function_call…  ─► one assistant message (what one answer said)
    custom_tool_call                    ─► the same
    function_call_output, custom_…      ─► tool message
    additional_tools                    ─► tools
    configuration_update                ─► the format of the answer
    item_reference                      ─► that item of an earlier answer of the attempt
    previous_response_id                ─► the conversation goes on after that answer's own tokens

Fields that change nothing here (`metadata`, `store`, `reasoning`, `service_tier`, …) are ignored; `temperature` and
`top_p` are the run's to decide; what cannot be honoured is refused with a sentence.

response.created ─► response.in_progress
  ─► output_item.added ─► content_part.added ─► reasoning_text.delta… ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► content_part.added ─► output_text.delta…    ─► .done ─► content_part.done ─► output_item.done
  ─► output_item.added ─► function_call_arguments.delta               ─► .done                      ─► output_item.done
       (custom_tool_call_input of a custom tool)
─► response.completed | response.incomplete
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lightningrl.types import FinishReason
from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.chat import token_logprobs, write_error
from lightningrl_server.gateway.dialects.checks import read_format, with_instruction
from lightningrl_server.gateway.dialects.context_edits import read_compaction
from lightningrl_server.gateway.dialects.format import PartStream
from lightningrl_server.gateway.dialects.tools import OfferedTools, read_choice, read_input, read_offered
from lightningrl_server.gateway.request import (
    Answer,
    AnswerFormat,
    AnswerStart,
    CallRequest,
    FindAnswer,
    HoldsAnswer,
    Referring,
    Refusal,
)
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import Choice, TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["ResponsesFormat", "ResponsesRequest", "ResponsesStream", "parse_responses_request"]


class _TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]] = ""
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    max_output_tokens: checks.Number = None
    temperature: Any = None
    top_p: Any = None
    text: _TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: checks.Number = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None
    context_management: Any = None
    max_tool_calls: checks.Number = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesRequest:
    """A responses request."""

    call: CallRequest
    body: _Body
    """Much of it stands in the answer again."""
    tools: OfferedTools

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.body.include or ())


_decode = msgspec.json.Decoder(_Body).decode
_REFUSED = {
    "background": "background responses are not supported; leave background out and wait, or stream",
    "conversation": "conversation is not supported; use previous_response_id, or send the whole input",
    "prompt": "prompt templates are not kept here; send their text as instructions and input",
}
_OWN = {"instructions": "instructions", "format": "text.format", "bound": "max_output_tokens", "tools": "tools"}
_CALLS = ("fc", "ctc")
"""Prefixes of the ids of tool calls."""
_ITEM = re.compile(r"[a-z]+_(lr-[^_]+)(?:_\d+)?")
"""The id of an item of ours, with its answer's."""
_SETTINGS = ("additional_tools", "configuration_update")
"""Items that say how the conversation goes on, and are no part of it."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def parse_responses_request(data: bytes, *, drops_hosted: bool = False) -> ResponsesRequest:
    """Raises Refusal with what is wrong, which, and what next."""
    body = checks.decode_body(_decode, data, "responses request")
    _refuse_unsupported(body)
    body.max_output_tokens = limit = checks.read_whole("max_output_tokens", body.max_output_tokens, 1)
    body.top_logprobs = checks.read_top_logprobs(body.top_logprobs)
    items = body.input or []
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    checks.check_count("input", items)
    if not items:
        raise Refusal("the request has no input; send a text or at least one item", param="input")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wanted = _format(body.text, items)
    head = tuple(instructions) if wanted is None else with_instruction(instructions, wanted)
    offered = read_offered(body.tools, items, drops_hosted=drops_hosted)
    previous = body.previous_response_id

    def read(find: FindAnswer, holds: HoldsAnswer) -> tuple[Mapping[str, Any], ...]:
        return (*head, *_read_items(items, find, holds, offered, goes_on=previous is not None))

    is_referring = any(_is_reference(item) or (previous and _answer_of(item)) for item in items)
    forced, allow_tools = read_choice(_plain_choice(body.tool_choice, offered), offered.functions)
    call = CallRequest(
        model=body.model,
        messages=() if is_referring else read(lambda _: None, lambda _: False),
        referring=Referring(size=len(data), read=read) if is_referring else None,
        tools=offered.functions,
        left_out=offered.left_out,
        forced=forced,
        format=wanted,
        allow_tools=allow_tools,
        parallel_tools=body.parallel_tool_calls is not False,
        stream=bool(body.stream),
        max_tokens=limit,
        asked=checks.read_asked(temperature=body.temperature, top_p=body.top_p),
        extras=checks.read_extras(data, _Body, own=_OWN),
        edits=read_compaction(body.context_management),
        previous=previous.removeprefix("resp_") if previous else None,
        head=len(head),
    )
    return ResponsesRequest(call=call, body=body, tools=offered)


def _refuse_unsupported(body: _Body) -> None:
    checks.refuse_fields(body, _REFUSED)
    # "auto" truncates what is beyond the context, and that is refused by its length
    if body.truncation not in (None, "disabled", "auto"):
        raise Refusal.at("truncation", f"is {body.truncation!r}; it may be 'auto' or 'disabled'")


def _read_items(
    items: Sequence[dict[str, Any]], find: FindAnswer, holds: HoldsAnswer, tools: OfferedTools, *, goes_on: bool
) -> list[dict[str, Any]]:
    """The messages that the items are put together into, without references to what is there already."""
    conversation = _Conversation(tools)
    for index, item in enumerate(items):
        where = f"input[{index}]"
        answer = _answer_of(item)
        if answer is not None and holds(answer):
            if _is_reference(item):
                continue
            problem = f"is the item {item['id']!r}, which the conversation of previous_response_id holds already"
            raise Refusal.at(where, f"{problem}; leave it out")
        conversation.take(_referred(item, find, where) if _is_reference(item) else item, where)
    if not conversation.messages:
        raise Refusal("the request has no input; send a text or at least one item", param="input")
    checks.check_tool_call_ids(conversation.messages, goes_on=goes_on, once=True)
    return conversation.messages


def _is_reference(item: Mapping[str, Any]) -> bool:
    """The API lets its type out."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _referred(item: Mapping[str, Any], find: FindAnswer, where: str) -> dict[str, Any]:
    """The earlier answer's item that a reference names: `msg_ID`, `rs_ID`, `fc_ID_0` or `ctc_ID_0`."""
    item_id = item.get("id")
    kind, _, rest = item_id.partition("_") if isinstance(item_id, str) else ("", "", "")
    number = rest.rpartition("_")[2]
    answer = find(_answer_of(item) or "") or {}
    calls = answer.get("tool_calls") or ()
    if kind == "msg" and answer:
        return {"type": "message", "role": "assistant", "id": item_id, "content": answer["content"]}
    if kind == "rs" and "reasoning_content" in answer:
        return {"type": "reasoning", "id": item_id, "content": [{"text": answer["reasoning_content"]}]}
    if kind in _CALLS and number.isdecimal() and int(number) < len(calls):
        call = calls[int(number)]
        function = call["function"]
        asked = {**function, "arguments": json.dumps(function["arguments"])}
        return {"type": "function_call", "id": item_id, "call_id": call["id"], **asked}
    problem = f"refers to the item {item_id!r}, which no answer of this attempt has"
    raise Refusal.at(where, f"{problem}; send the item itself", code="item_not_found")


class _Conversation:
    """Puts items together into messages: what one answer said becomes one assistant message."""

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The assistant message that further items may belong to."""
        self._answer: str | None = None
        """Which of our answers it is, where its items still have our ids."""
        self._reasoning = ""

    def take(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._tool_call(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        elif kind == "reasoning":
            self._reasoning += _reasoning(item, where)
        elif kind not in _SETTINGS:
            kinds = "message, reasoning, function_call and function_call_output"
            raise Refusal.at(where, f"is an item of type {kind!r}; the policy reads {kinds}")

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = _ROLES.get(str(item.get("role"))), item.get("content")
        if role is None:
            raise Refusal.at(
                where, f"has the role {item.get('role')!r}; known are system, developer, user, assistant", field=".role"
            )
        text = _text(content, where)
        if role != "assistant":
            self._close()
            self.messages.append({"role": role, "content": text})
            return
        message = self._assistant(item, starts=True)
        message["content"] += text

    def _tool_call(self, item: dict[str, Any], where: str) -> None:
        name, call_id = _string(item, "name", where), _call_id(item, where)
        is_custom = item["type"] == "custom_tool_call"
        asked = item.get("input") if is_custom else item.get("arguments", ...)
        if not isinstance(asked, str if is_custom else str | Mapping | None):
            ways = "no arguments; a function_call has them as JSON text", "no input; a custom_tool_call has it as text"
            raise Refusal.at(where, f"has {ways[is_custom]}")
        message = self._assistant(item, starts=False)
        arguments = {"input": asked} if is_custom else checks.read_arguments(asked, where)
        function = {"name": self._tools.name_of(name, item.get("namespace")), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: dict[str, Any], where: str) -> None:
        output = item.get("output")
        if "output" not in item or not isinstance(output, str | list | None):
            raise Refusal.at(where, "has no output; a function_call_output has it as text or text parts")
        message = {"role": "tool", "content": _text(output, where)}
        if (call_id := _call_id(item, where)) is not None:
            message["tool_call_id"] = call_id
        self.messages.append(message)

    def _assistant(self, item: dict[str, Any], *, starts: bool) -> dict[str, Any]:
        """The assistant message an item belongs to. Items of one answer stay together, also with results in between."""
        answer = _answer_of(item)
        is_last = self._open is not None and self.messages[-1] is self._open
        is_same = answer is not None and answer == self._answer
        has_said = self._open is not None and bool(self._open["content"] or self._open.get("tool_calls"))
        goes_on = is_same or (is_last and not (starts and has_said) and None in (answer, self._answer))
        if self._open is None or not goes_on:
            self._close()
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        self._answer = answer or self._answer
        if self._reasoning:
            self._open["reasoning_content"] = self._open.get("reasoning_content", "") + self._reasoning
            self._reasoning = ""
        return self._open

    def _close(self) -> None:
        self._open = self._answer = None


def _answer_of(item: Mapping[str, Any]) -> str | None:
    """`msg_lr-ab3` and `fc_lr-ab3_0` are of one answer; ids of other makers say nothing."""
    match = _ITEM.fullmatch(str(item.get("id")))
    return match and match[1]


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Its text; the summary where there is no text; nothing where it is encrypted."""
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            if not all(isinstance(text, str) for text in texts):
                raise Refusal.at(where, f"has a {key} that is no list of texts")
            return "\n".join(str(text) for text in texts)
    return ""


def _text(content: Any, where: str) -> str:
    if not checks.is_parts(content):
        raise Refusal.at(where, "has a content that is neither text nor parts", field=".content")
    return checks.join_text(content, where)


def _string(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise Refusal.at(where, f"has no {key}; an item of type {item.get('type')!r} needs one")
    return value


def _call_id(item: dict[str, Any], where: str) -> str | None:
    """None for an empty one: calls without an id are answered in their order."""
    return None if item.get("call_id") == "" else _string(item, "call_id", where)


def _plain_choice(choice: Any, tools: OfferedTools) -> Any:
    """A choice of a custom tool or of one in a namespace, or among some, by the names that the policy knows."""
    if isinstance(choice, dict) and isinstance(listed := choice.get("tools"), list):
        return {**choice, "tools": [_plain_choice(tool, tools) for tool in listed]}
    kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, dict) else (None, None)
    if kind not in ("function", "custom") or not isinstance(name, str):
        return choice
    return {"type": "function", "name": tools.name_of(name, choice.get("namespace"))}


def _format(text: _TextConfig | None, items: Sequence[Mapping[str, Any]]) -> AnswerFormat | None:
    """The latest format that the request or an item of it sets."""
    wanted = text.format if text is not None else None
    for item in items:
        update = item.get("text") if item.get("type") == "configuration_update" else None
        if isinstance(update, dict) and isinstance(update.get("format"), dict):
            wanted = update["format"]
    return None if wanted is None else read_format(wanted, "text.format")


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
        make = _reasoning_item if self._open == self.REASONING else _message
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
        items.append(
            _reasoning_item(call_id, [{"type": "reasoning_text", "text": choice.reasoning}], status="completed")
        )
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


def _reasoning_item(call_id: str, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
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
