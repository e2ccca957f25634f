"""OpenAI responses: the request, checked and put into our own terms.

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
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lightningrl_server.gateway.dialects import checks
from lightningrl_server.gateway.dialects.context_edits import read_compaction
from lightningrl_server.gateway.dialects.responses_tools import OfferedTools, read_offered
from lightningrl_server.gateway.dialects.schemas import read_format, with_instruction
from lightningrl_server.gateway.dialects.tools import read_choice
from lightningrl_server.gateway.request import AnswerFormat, CallRequest, FindAnswer, HoldsAnswer, Referring, Refusal

__all__ = ["ResponsesRequest", "parse_responses_request"]


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
