"""One record per tool call, though several instrumentations may tell of it, and with the id that the model gave it.

spans of an export ─► tools ─► those that tell the same call: one ─► joined to the answers that asked ─► ToolCallRecord
                                                                  └─► asked, never run, never offered: unknown_tool
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightningrl.store.protocol import ToolCallRecord
from lightningrl.tracing.conventions import AskedCall, Kind, SpanReading, asked_calls, offered_tools
from lightningrl.types import ToolCall, ToolStatus

__all__ = ["SeenSpan", "tool_call_records"]

_FAILURES = frozenset(ToolStatus) - {ToolStatus.OK, ToolStatus.UNKNOWN}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenSpan:
    """A span of an export, as far as tools are concerned."""

    span_id: str
    parent_span_id: str | None
    started_ns: int
    ended_ns: int
    scope: str
    """The instrumentation that tells it."""
    attributes: Mapping[str, Any]
    reading: SpanReading

    @property
    def is_ours(self) -> bool:
        """Of an adapter of ours: it knows its framework."""
        return self.scope.startswith("lightningrl")

    def overlaps(self, other: SeenSpan) -> bool:
        return self.started_ns <= other.ended_ns and other.started_ns <= self.ended_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A tool call that a model's answer asked for."""

    call: AskedCall
    span: SeenSpan
    is_offered: bool


def tool_call_records(spans: Sequence[SeenSpan]) -> list[ToolCallRecord]:
    """In the order of the spans; calls of tools that nobody offered come last."""
    tools = distinct_tools([span for span in spans if span.reading.kind is Kind.TOOL])
    asked = [one for span in spans if span.reading.kind is Kind.MODEL and not span.is_ours for one in _asked(span)]
    by_id = {one.call.id: one for one in asked}
    taken = {tool.reading.tool_call_id for tool in tools}
    waiting = [one for one in asked if one.call.id not in taken]
    joined = [tool if tool.is_ours else _join(tool, by_id.get(tool.reading.tool_call_id) or _find(tool, waiting)) for tool in tools]
    ids = {tool.reading.tool_call_id for tool in joined}
    unrun = [one for one in waiting if not one.is_offered and one.call.id not in ids]
    return [_record(tool) for tool in joined] + [_unrun(one, number) for number, one in enumerate(unrun)]


def distinct_tools(tools: Sequence[SeenSpan]) -> list[SeenSpan]:
    """Each tool call once: told by our adapter, else by the span that knows of a failure, else of the id, else the first.

    Two spans tell the same call if they are of different instrumentations or one lies inside the other, and have the same id, or the
    same name while both run. Of each instrumentation, one span at most is taken for the same call.
    """
    parents = {tool.span_id: tool.parent_span_id for tool in tools}
    if len({tool.scope for tool in tools}) < 2 and not any(parent in parents for parent in parents.values()):
        return list(tools)
    ranked = sorted(tools, key=lambda tool: (not tool.is_ours, tool.reading.status not in _FAILURES, not tool.reading.tool_call_id))
    kept: dict[str, SeenSpan] = {}
    told: set[tuple[str, str]] = set()
    for tool in ranked:
        same = next((one for one in kept.values() if (one.span_id, tool.scope) not in told and _is_same(one, tool)), None)
        if same is None:
            kept[tool.span_id] = tool
            continue
        told.add((same.span_id, tool.scope))
        if not same.reading.tool_call_id:
            kept[same.span_id] = replace(same, reading=replace(same.reading, tool_call_id=tool.reading.tool_call_id))
    return [kept[tool.span_id] for tool in tools if tool.span_id in kept]


def _is_same(one: SeenSpan, other: SeenSpan) -> bool:
    is_nested = one.parent_span_id == other.span_id or other.parent_span_id == one.span_id
    if one.scope == other.scope and not is_nested:
        return False
    ids = one.reading.tool_call_id, other.reading.tool_call_id
    if all(ids):
        return ids[0] == ids[1]
    return one.reading.tool == other.reading.tool and one.overlaps(other)


def _asked(span: SeenSpan) -> list[_Asked]:
    offered = offered_tools(span.attributes)
    return [
        _Asked(call=call, span=span, is_offered=offered is None or call.name in offered) for call in asked_calls(span.attributes) if call.id
    ]


def _find(tool: SeenSpan, waiting: list[_Asked]) -> _Asked | None:
    """What asked for a tool without an id: same name, same arguments, asked before; or the only one of that name."""
    if tool.reading.tool_call_id:
        return None
    named = [one for one in waiting if one.call.name == tool.reading.tool and one.span.ended_ns <= tool.started_ns]
    arguments = _parse(tool.reading.arguments)
    exact = [one for one in named if _parse(one.call.arguments) == arguments]
    found = exact[0] if exact else named[0] if len(named) == 1 else None
    if found is not None:
        waiting.remove(found)
    return found


def _join(tool: SeenSpan, asked: _Asked | None) -> SeenSpan:
    """The tool with the id of the call that asked, and the agent who did."""
    if asked is None:
        return tool
    reading = replace(
        tool.reading,
        tool_call_id=asked.call.id,
        arguments=tool.reading.arguments or asked.call.arguments,
        agent=asked.span.reading.agent or tool.reading.agent,
    )
    return replace(tool, reading=reading)


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _record(tool: SeenSpan) -> ToolCallRecord:
    reading = tool.reading
    call = ToolCall(
        id=reading.tool_call_id or tool.span_id,
        name=reading.tool,
        arguments=reading.arguments,
        result=reading.result,
        status=reading.status,
        duration_s=(tool.ended_ns - tool.started_ns) / 1e9,
        agent=reading.agent,
        error_type=reading.error_type or None,
    )
    return ToolCallRecord(tool_call=call, span_id=tool.span_id, parent_span_id=tool.parent_span_id, started_at=tool.started_ns / 1e9)


def _unrun(asked: _Asked, number: int) -> ToolCallRecord:
    """No span is about it: the framework told the model that there is no such tool."""
    call = ToolCall(
        id=asked.call.id,
        name=asked.call.name,
        arguments=asked.call.arguments,
        status=ToolStatus.UNKNOWN_TOOL,
        agent=asked.span.reading.agent,
        error_type=ToolStatus.UNKNOWN_TOOL.value,
    )
    return ToolCallRecord(
        tool_call=call, span_id=f"asked:{asked.call.id}", parent_span_id=asked.span.span_id, started_at=asked.span.ended_ns / 1e9
    )
