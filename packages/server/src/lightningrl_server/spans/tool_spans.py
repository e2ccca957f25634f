"""One record per tool call, though several instrumentations may tell of it, and with the id that the model gave it.

spans of an export ─► tools ─► those that tell the same call: one ─► joined to the answers that asked ─► ToolCallRecord
                                                                  └─► asked, never run, never offered: unknown_tool
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from lightningrl.conventions import AskedCall, Kind, SpanReading, parse_attribute
from lightningrl.sanitize import as_text
from lightningrl.types import ToolCall, ToolStatus
from lightningrl_server.records import ToolCallRecord

__all__ = ["ReadTools", "SeenSpan", "comparable", "read_tools"]

FLAT_ANSWERS: Final = {
    "llm.output_messages.": ("tool_call.id", "tool_call.function.name", "tool_call.function.arguments"),
    "gen_ai.completion.": ("id", "name", "arguments"),
}
"""Answers as numbered attributes: `llm.output_messages.0.message.tool_calls.0.tool_call.id`,
`gen_ai.completion.0.tool_calls.0.id`."""


def _read_execution(attributes: Mapping[str, Any]) -> ToolStatus | None:
    """Outcome of the tool of the span around: Claude Code says it in a span of its own. None = this is no such span."""
    if attributes.get("span.type") != "tool.execution" or "success" not in attributes:
        return None
    return ToolStatus.OK if str(attributes["success"]).lower() == "true" else ToolStatus.ERROR


def _asked_calls(attributes: Mapping[str, Any]) -> list[AskedCall]:
    """The tool calls that the answer in a model's span asks for."""
    messages = parse_attribute(attributes.get("gen_ai.output.messages"))
    if isinstance(messages, list):
        parts = [part for message in messages if isinstance(message, dict) for part in message.get("parts") or ()]
        calls = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_call"]
        return [_asked_call(call.get("id"), call.get("name"), call.get("arguments", "")) for call in calls]
    asked: list[AskedCall] = []
    for prefix, (call_id, name, arguments) in FLAT_ANSWERS.items():
        for key in attributes:
            if key.startswith(prefix) and key.endswith(f".{name}"):
                stem = key.removesuffix(name)
                call = attributes.get(stem + call_id), attributes[key], attributes.get(stem + arguments, "")
                asked.append(_asked_call(*call))
    return asked


def _offered_tools(attributes: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of the tools that a model was offered; None = the span does not say."""
    definitions = parse_attribute(attributes.get("gen_ai.tool.definitions"))
    if not isinstance(definitions, list):
        keys = [key for key in attributes if key.startswith("llm.tools.") and key.endswith(".tool.json_schema")]
        definitions = [parse_attribute(attributes[key]) for key in keys]
    functions = [tool.get("function", tool) for tool in definitions if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(map(str, names)) if names else None


def _output_tools(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Names of those tools that are the type of an agent's answer (Pydantic AI)."""
    parameters = parse_attribute(attributes.get("model_request_parameters"))
    tools = parameters.get("output_tools") if isinstance(parameters, dict) else None
    listed = tools if isinstance(tools, list) else ()
    return frozenset(str(tool.get("name")) for tool in listed if isinstance(tool, dict))


def _asked_call(call_id: Any, name: Any, arguments: Any) -> AskedCall:
    return AskedCall(id=str(call_id or ""), name=str(name or ""), arguments=as_text(arguments))


_NEAREST: Final = 32
"""Spans of one name that are compared with another on each side: more of them do not run at once."""


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
    is_failed: bool = False
    """The span's own status is an error."""
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Names and attributes."""

    @property
    def is_ours(self) -> bool:
        """True for spans of an adapter of ours, which knows its framework."""
        return self.scope.startswith("lightningrl")

    def overlaps(self, other: SeenSpan) -> bool:
        return self.started_ns <= other.ended_ns and other.started_ns <= self.ended_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTools:
    """The tool calls of an export."""

    records: list[ToolCallRecord]
    """In the order of the spans; calls of tools that nobody offered come last."""
    loose: frozenset[str]
    """Ids of spans that no model's span asked for: the gateway's own answers may (`lightningrl_server.asked_calls`)."""
    unoffered: frozenset[str]
    """Ids of those that hold a model's call, have no id of their own, are no adapter's of ours and name what no model's
    span offers: Semantic Kernel's prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ToolRequest:
    """A tool call that a model's answer asked for."""

    call: AskedCall
    span: SeenSpan
    is_offered: bool


def read_tools(spans: Sequence[SeenSpan]) -> ReadTools:
    """Each tool call once, with the id of the call that asked where a model's span says it."""
    # An export of a LangGraph agent under its own instrumentation and OpenInference's:
    #     model  asks for call_1 search {"q": "x"}, call_2 fly {}        offered: search
    #     tool   search {"q": "x"}   id ""                               OpenInference
    #     tool   search {"q": "x"}   id ""   inside of it                LangChain's: the same call, told twice
    # One tool is left; name and arguments join it to call_1. Nobody ran call_2, and it was not offered: unknown_tool.
    models = [span for span in spans if span.reading.kind is Kind.MODEL and not span.is_ours]
    asked = [request for span in models for request in _asked(span)]
    by_id = {request.call.id: request for request in asked}
    tools = distinct_tools(_tools(spans))
    taken = {tool.reading.tool_call_id for tool in tools}
    waiting = _Waiting([request for request in asked if request.call.id not in taken])
    joined: list[SeenSpan] = []
    loose: set[str] = set()
    unoffered: set[str] = set()
    offered = {name for span in models for name in _offered_tools(span.attributes) or ()}
    holding = {span.parent_span_id for span in models}
    for tool in tools:
        if tool.is_ours and tool.reading.tool_call_id:  # an agent's own code may call a tool past its framework
            joined.append(tool)
            continue
        asker = by_id.get(tool.reading.tool_call_id) or waiting.take(tool)
        joined.append(_join(tool, asker))
        if asker is None:
            loose.add(tool.span_id)
            is_known = tool.is_ours or tool.reading.tool_call_id or tool.reading.tool in offered
            if tool.span_id in holding and not is_known:
                unoffered.add(tool.span_id)
    ids = taken | {tool.reading.tool_call_id for tool in joined}
    left = [request for request in asked if request.call.id not in ids]
    records = [*map(_record, joined), *_unknown_tools(left, spans), *_typed_answers(left, spans)]
    return ReadTools(records=records, loose=frozenset(loose), unoffered=frozenset(unoffered))


def _tools(spans: Sequence[SeenSpan]) -> list[SeenSpan]:
    """The tools' spans, each once, with the outcome that a span inside of one tells where its own tells none."""
    statuses = ((span.parent_span_id, _read_execution(span.attributes)) for span in spans)
    executed = {parent: status for parent, status in statuses if status is not None}
    by_span: dict[str, SeenSpan] = {}
    for span in spans:
        if span.reading.kind is not Kind.TOOL:
            continue
        status = executed.get(span.span_id)
        if status is not None and span.reading.status is ToolStatus.UNKNOWN:
            span = replace(span, reading=replace(span.reading, status=status))
        by_span.setdefault(span.span_id, span)
    return list(by_span.values())


def _unknown_tools(left: Sequence[_ToolRequest], spans: Sequence[SeenSpan]) -> list[ToolCallRecord]:
    """Calls of tools that were not offered, of which no span is made."""
    agents = {span.reading.agent for span in spans if span.reading.kind is Kind.AGENT}  # smolagents asks them as tools
    unoffered = [request for request in left if not request.is_offered and request.call.name not in agents]
    unknown = {request.call.id: request for request in unoffered}
    return [_unrun(request, ToolStatus.UNKNOWN_TOOL) for request in unknown.values()]


def distinct_tools(tools: Sequence[SeenSpan]) -> list[SeenSpan]:
    """Each tool call once: by our adapter, else by the span that knows of a failure, else of the id, else the first.

    Two spans tell the same call if they are of different instrumentations or one lies inside the other, and have the
    same id, or the same name while both run. Of each instrumentation, one span at most is taken for the same call.
    """
    parents = {tool.span_id: tool.parent_span_id for tool in tools}
    if len({tool.scope for tool in tools}) < 2 and not any(parent in parents for parent in parents.values()):
        return list(tools)
    distinct = _DistinctTools()
    told_by: set[tuple[str, str]] = set()  # spans, each with an instrumentation that tells of the same call
    for tool in sorted(tools, key=_rank):
        near = [other for other in distinct.near(tool) if (other.span_id, tool.scope) not in told_by]
        same = next((other for other in near if _is_same(other, tool)), None)
        if same is None:
            distinct.add(tool)
            continue
        told_by.add((same.span_id, tool.scope))
        if not same.reading.tool_call_id:
            distinct.add(replace(same, reading=replace(same.reading, tool_call_id=tool.reading.tool_call_id)))
    return [distinct.by_span[tool.span_id] for tool in tools if tool.span_id in distinct.by_span]


def _rank(tool: SeenSpan) -> tuple[bool, bool, bool]:
    """False before True: ours, failures, those with an id."""
    return not tool.is_ours, not tool.reading.status.is_failure, not tool.reading.tool_call_id


class _DistinctTools:
    """Spans by what makes two of them the same call, so that each is compared with a few others and not with all."""

    def __init__(self) -> None:
        self.by_span: dict[str, SeenSpan] = {}
        self._numbers: dict[str, int] = {}
        """Order of adding, by span id."""
        self._children: dict[str, list[str]] = defaultdict(list)
        self._by_id: dict[str, list[str]] = defaultdict(list)
        self._starts: dict[str, list[tuple[int, str]]] = defaultdict(list)
        """Sorted, by name."""

    def add(self, tool: SeenSpan) -> None:
        """Add a span, or the same one with an id."""
        if tool.span_id not in self.by_span:
            self._numbers[tool.span_id] = len(self._numbers)
            insort(self._starts[tool.reading.tool], (tool.started_ns, tool.span_id))
            if tool.parent_span_id is not None:
                self._children[tool.parent_span_id].append(tool.span_id)
        if tool.reading.tool_call_id:
            self._by_id[tool.reading.tool_call_id].append(tool.span_id)
        self.by_span[tool.span_id] = tool

    def near(self, tool: SeenSpan) -> list[SeenSpan]:
        """Spans that may tell the same call, in order of adding: around and in it, of its id, nearest of its name."""
        starts = self._starts[tool.reading.tool]
        place = bisect_left(starts, (tool.started_ns, tool.span_id))
        near = {span_id for _, span_id in starts[max(0, place - _NEAREST) : place + _NEAREST]}
        near.update(self._children[tool.span_id][:_NEAREST])
        if tool.reading.tool_call_id:
            near.update(self._by_id[tool.reading.tool_call_id][:_NEAREST])
        if tool.parent_span_id in self.by_span:
            near.add(tool.parent_span_id)
        return [self.by_span[span_id] for span_id in sorted(near, key=self._numbers.__getitem__)]


def _is_same(tool: SeenSpan, other: SeenSpan) -> bool:
    is_nested = tool.parent_span_id == other.span_id or other.parent_span_id == tool.span_id
    if tool.scope == other.scope and not is_nested:
        return False
    ids = tool.reading.tool_call_id, other.reading.tool_call_id
    if all(ids):
        return ids[0] == ids[1]
    return tool.reading.tool == other.reading.tool and tool.overlaps(other)


def _asked(span: SeenSpan) -> list[_ToolRequest]:
    offered = _offered_tools(span.attributes)
    return [
        _ToolRequest(call=call, span=span, is_offered=offered is None or call.name in offered)
        for call in _asked_calls(span.attributes)
        if call.id
    ]


class _Waiting:
    """Requests that no span's id names, by name and arguments, in the order of asking."""

    def __init__(self, asked: Sequence[_ToolRequest]) -> None:
        self._alike: dict[tuple[str, str], deque[_ToolRequest]] = defaultdict(deque)
        self._named: dict[str, dict[str, _ToolRequest]] = defaultdict(dict)
        """Requests by id, by name."""
        distinct = {request.call.id: request for request in asked}
        for request in sorted(distinct.values(), key=lambda request: request.span.ended_ns):
            self._alike[request.call.name, comparable(request.call.arguments)].append(request)
            self._named[request.call.name][request.call.id] = request

    def take(self, tool: SeenSpan) -> _ToolRequest | None:
        """The request for a tool without an id: same name and arguments, asked before; or the only one of the name."""
        if tool.reading.tool_call_id:
            return None
        named = self._named[tool.reading.tool]
        alike = self._alike[tool.reading.tool, comparable(tool.reading.arguments)]
        while alike and alike[0].call.id not in named:  # taken as the only one of its name
            alike.popleft()
        asker = alike[0] if alike and alike[0].span.ended_ns <= tool.started_ns else None
        if asker is None:
            before = [request for request in islice(named.values(), 2) if request.span.ended_ns <= tool.started_ns]
            asker = before[0] if len(before) == 1 else None
        if asker is not None:
            del named[asker.call.id]
        return asker


def comparable(arguments: str) -> str:
    """The same text for the same arguments."""
    value = parse_attribute(arguments or "{}")
    try:
        return arguments if value is None else json.dumps(value, sort_keys=True)
    except RecursionError:
        return arguments


def _join(tool: SeenSpan, asked: _ToolRequest | None) -> SeenSpan:
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
    return ToolCallRecord(
        tool_call=call, span_id=tool.span_id, parent_span_id=tool.parent_span_id, started_at=tool.started_ns / 1e9
    )


def _typed_answers(asked: Sequence[_ToolRequest], spans: Sequence[SeenSpan]) -> list[ToolCallRecord]:
    """Answers with a type that are asked for as tools, of which no span is made (Pydantic AI's `final_result`): an
    agent goes on only after one that does not fit, and ends with one that does."""
    ended = {span.span_id: span for span in spans if span.reading.kind is Kind.AGENT}
    last: dict[str | None, int] = defaultdict(int)
    for span in spans:
        if span.reading.kind is Kind.MODEL:
            last[span.parent_span_id] = max(last[span.parent_span_id], span.started_ns)
    records: list[ToolCallRecord] = []
    for request in asked:
        around = request.span.parent_span_id
        if request.call.name not in _output_tools(request.span.attributes):
            continue
        if request.span.started_ns < last[around]:
            records.append(_unrun(request, ToolStatus.INVALID_ARGUMENTS))
        elif around in ended:
            records.append(_unrun(request, ToolStatus.INVALID_ARGUMENTS if ended[around].is_failed else ToolStatus.OK))
    return records


def _unrun(asked: _ToolRequest, status: ToolStatus) -> ToolCallRecord:
    """The record of a call that no span is about: there is no such tool, or it was an answer and no tool."""
    call = ToolCall(
        id=asked.call.id,
        name=asked.call.name,
        arguments=asked.call.arguments,
        status=status,
        agent=asked.span.reading.agent,
        error_type=None if status is ToolStatus.OK else status.value,
    )
    return ToolCallRecord(
        tool_call=call,
        span_id=f"asked:{asked.call.id}",
        parent_span_id=asked.span.span_id,
        started_at=asked.span.ended_ns / 1e9,
    )
