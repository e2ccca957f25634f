"""The shape in which a chat template takes tool calls and their results, found by trying it once.

messages, tools ─► ToolTurns.shape ─► messages, tools      as this template writes all of them

Templates differ: ids of nine letters, arguments as JSON text, one call a turn, tools as text in the system message, or
no calls at all, so that they are written into the content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightningrl_server.rendering.markups import Markup

__all__ = ["ToolTurns", "find_tool_turns"]

Render = Callable[..., str]
"""`render(messages, tools=…)` gives a template's text, or raises."""
Messages = Sequence[Mapping[str, Any]]

_TOOL: Final = "lookup_x7"
_SAID: Final = ("valuex7a", "resultx7b")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolTurns:
    """A template's shape of tool calls."""

    markup: Markup | None = None
    tools_in_system: bool = False
    """Tools are JSON text of the system message (Phi-4)."""
    text_arguments: bool = False
    """A call's arguments are JSON text (DeepSeek)."""
    in_content: bool = False
    """Calls are not written at all: they go into the content, in the family's markup (Granite, Phi-4)."""
    one_each: bool = False
    """A turn has one call; others are turns of their own, each before its result (Llama)."""

    @property
    def changes(self) -> bool:
        """True where messages or tools may have to be written otherwise than they are."""
        return (
            self.tools_in_system
            or self.text_arguments
            or self.in_content
            or self.one_each
            or (self.markup is not None and self.markup.call_id is not None)
        )

    def shape(self, messages: Messages, tools: Messages | None) -> tuple[list[Mapping[str, Any]], Messages | None]:
        """Messages and tools as the template takes them."""
        shaped = list(self._with_ids(messages))
        if self.one_each:
            shaped = _one_each(shaped)
        shaped = [self._calls(message) if message.get("tool_calls") else message for message in shaped]
        if self.tools_in_system and tools:
            head = shaped.pop(0) if shaped[:1] and shaped[0]["role"] == "system" else {"role": "system", "content": ""}
            listed = [tool.get("function", tool) for tool in tools]
            return [{**head, "tools": json.dumps(listed, ensure_ascii=False)}, *shaped], None
        return shaped, tools

    def _calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        functions = [call["function"] for call in message["tool_calls"]]
        if self.in_content and self.markup is not None and self.markup.write is not None:
            content = (message.get("content") or "") + self.markup.write(functions)
            return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
        if not self.text_arguments:
            return message
        texts = [
            function
            if isinstance(function["arguments"], str)
            else {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            for function in functions
        ]
        calls = [{**call, "function": function} for call, function in zip(message["tool_calls"], texts, strict=True)]
        return {**message, "tool_calls": calls}

    def _with_ids(self, messages: Messages) -> Iterator[Mapping[str, Any]]:
        """Messages with the ids that the template wants."""
        rule = None if self.markup is None else self.markup.call_id
        names: dict[str, str] = {}
        place = 0
        for message in messages:
            if rule is not None and message.get("tool_calls"):
                calls: list[Mapping[str, Any]] = []
                for call in message["tool_calls"]:
                    own = str(call.get("id") or "")
                    names[own] = rule(call["function"]["name"], place, own)
                    calls.append({**call, "id": names[own]})
                    place += 1
                message = {**message, "tool_calls": calls}
            elif rule is not None and message["role"] == "tool":
                own = str(message.get("tool_call_id") or "")
                message = {**message, "tool_call_id": names.get(own) or rule(str(message.get("name")), place, own)}
            yield message


def find_tool_turns(render: Render, markup: Markup | None) -> ToolTurns | None:
    """Try a template: the shape in which it writes tools, calls and results; None = there is none."""
    plain = ToolTurns(markup=markup)
    listed = next((form for form in (plain, replace(plain, tools_in_system=True)) if _writes_tools(render, form)), None)
    if listed is None:
        return None
    shapes = [listed, replace(listed, text_arguments=True)]
    if markup is not None and markup.write is not None:
        shapes.append(replace(listed, in_content=True))
    shape = next((shape for shape in shapes if _writes_calls(render, shape, 1)), None)
    if shape is None or _writes_calls(render, shape, 2):
        return shape
    return replace(shape, one_each=True)


def _writes_tools(render: Render, shape: ToolTurns) -> bool:
    parameters = {"type": "object", "properties": {"key": {"type": "string", "description": "d"}}}
    tool = {"type": "function", "function": {"name": _TOOL, "description": "d", "parameters": parameters}}
    messages, tools = shape.shape([{"role": "user", "content": "a"}], [tool])
    return _TOOL in _text(render, messages, tools)


def _writes_calls(render: Render, shape: ToolTurns, count: int) -> bool:
    """True where calls, their arguments and their results all come out."""
    calls = [
        {"id": f"call{place}", "type": "function", "function": {"name": _TOOL, "arguments": {"key": _SAID[0]}}}
        for place in range(count)
    ]
    results = [{"role": "tool", "name": _TOOL, "tool_call_id": f"call{n}", "content": _SAID[1]} for n in range(count)]
    messages, _ = shape.shape(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results], None
    )
    text = _text(render, messages, None)
    return all(text.count(word) >= count for word in (_TOOL, *_SAID))


def _text(render: Render, messages: Messages, tools: Messages | None) -> str:
    try:
        return str(render(messages, tools=None if tools is None else list(tools)))
    except Exception:  # noqa: BLE001  (whatever a template raises: it does not take this shape)
        return ""


def _one_each(messages: Messages) -> list[Mapping[str, Any]]:
    """Turns of several calls as turns of one call, each before its result."""
    split: list[Mapping[str, Any]] = []
    waiting: list[Mapping[str, Any]] = []  # calls of the last turn that had several
    for message in messages:
        calls = message.get("tool_calls") or ()
        if message["role"] != "tool":
            split += waiting
            waiting = []
        if len(calls) > 1:
            parts: list[Mapping[str, Any]] = [{**message, "content": "", "tool_calls": [call]} for call in calls]
            parts[0] = {**parts[0], "content": message.get("content", "")}
            waiting = parts
            continue
        if message["role"] == "tool" and waiting:
            own = message.get("tool_call_id")
            place = next((n for n, turn in enumerate(waiting) if turn["tool_calls"][0].get("id") == own), 0)
            split.append(waiting.pop(place))
        split.append(message)
    return [*split, *waiting]
