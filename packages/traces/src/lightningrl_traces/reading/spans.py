"""Spans and log records of one trace, read as calls, invocations of tools and an ending."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from lightningrl.conventions import (
    EVALUATION_NAME,
    EVALUATION_RESULT,
    EVALUATION_SCORE_VALUE,
    Kind,
    SpanState,
    parse_attribute,
    read_agent,
    read_kind,
    read_span,
    with_events,
)
from lightningrl_traces.reading.conventions import Fields, read_genai, read_openinference, read_traceloop
from lightningrl_traces.records import Call, Ending, LogRecord, Span, ToolRun, named_scores

__all__ = ["fill", "find_agent", "read_spans"]

READERS: Final = (read_openinference, read_genai, read_traceloop)
"""The first that knows a field counts."""
_ROOT_INPUTS: Final = ("input.value", "traceloop.entity.input", "gen_ai.task.input")
_ROOT_OUTPUTS: Final = ("output.value", "traceloop.entity.output", "gen_ai.task.output")
_VERSION: Final = "lightningrl.policy_version"


def read_spans(spans: Mapping[str, Span], logs: Sequence[LogRecord]) -> Iterator[Call | ToolRun | Ending]:
    """Read a trace. `spans` by id, in the order of their export; calls that several spans tell are all there."""
    logs_of: dict[str, list[LogRecord]] = defaultdict(list)
    for log in logs:
        logs_of[log.span_id].append(log)
    rewards: dict[str, float] = {}
    agents: dict[str, str | None] = {}
    for span in spans.values():
        mine = logs_of.pop(span.span_id, [])
        scores = _evaluations([*span.events, *((log.event, log.attributes) for log in mine)])
        kind = read_kind(span.attributes)
        is_root = span.parent_id is None or span.parent_id not in spans
        rewards |= scores if is_root else {}
        if kind is Kind.MODEL:
            yield replace(_read_call(span, mine), agent=find_agent(span, spans, agents), rewards=scores)
            continue
        if not is_root:  # of a part of the rollout
            rewards |= {f"{span.name}/{name}": value for name, value in scores.items()}
        if kind is Kind.TOOL and (tool := _read_tool(span, find_agent(span, spans, agents))) is not None:
            yield tool
    for span_id, orphans in logs_of.items():  # of a span that was never exported
        rewards |= _evaluations([(log.event, log.attributes) for log in orphans])
        alone = Span(trace_id=orphans[0].trace_id, span_id=span_id)
        call = _read_call(alone, orphans)
        if call.messages or call.answer:
            yield call
    yield from _ending(spans, rewards)


def _read_call(span: Span, logs: Sequence[LogRecord]) -> Call:
    notes: set[str] = set()
    fields: Fields = {}
    for reader in READERS:
        seen: set[str] = set()
        more = {name: value for name, value in reader(span, logs, seen).items() if value not in (None, {}, "")}
        if {"messages", "answer"} & more.keys() - fields.keys():
            notes |= seen
        fields = {**more, **fields}
    version = span.attributes.get(_VERSION)
    if isinstance(version, int) and not isinstance(version, bool):
        fields["version"] = version
    fields.setdefault("model", "")
    return Call(
        id=span.span_id,
        trace_id=span.trace_id,
        parent_id=span.parent_id,
        started_at=span.started_at,
        duration_s=max(0.0, span.ended_at - span.started_at),
        error=span.error,
        notes=tuple(sorted(notes)),
        **{**fields, "model": str(fields["model"])},
    )


def _read_tool(span: Span, agent: str | None) -> ToolRun | None:
    state = SpanState.UNSET if span.error is None else SpanState.ERROR
    exceptions = [str(values.get("exception.type", "")) for name, values in span.events if name == "exception"]
    reading = read_span(span.name, with_events(span.attributes, span.events), state, exceptions)
    if reading.kind is not Kind.TOOL:
        return None
    return ToolRun(
        id=reading.tool_call_id or span.span_id,
        trace_id=span.trace_id,
        parent_id=span.parent_id,
        span_id=span.span_id,
        name=reading.tool,
        arguments=reading.arguments,
        result=reading.result,
        status=reading.status,
        started_at=span.started_at,
        duration_s=max(0.0, span.ended_at - span.started_at),
        agent=agent,
        error_type=reading.error_type or None,
    )


def find_agent(span: Span, spans: Mapping[str, Span], agents: dict[str, str | None]) -> str | None:
    """Find the nearest agent around a span. Parents that form a circle lead nowhere. `agents`: those of other spans,
    which are added to."""
    path: dict[str, None] = {}
    agent: str | None = None
    here: Span | None = span
    while here is not None and here.span_id not in path:
        if here.span_id in agents:
            agent = agents[here.span_id]
            break
        path[here.span_id] = None
        if (agent := read_agent(here.name, here.attributes)) is not None:
            break
        here = spans.get(here.parent_id or "")
    agents |= dict.fromkeys(path, agent)
    return agent


def _evaluations(events: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    scored = [values for name, values in events if name == EVALUATION_RESULT]
    return named_scores((values.get(EVALUATION_NAME), values.get(EVALUATION_SCORE_VALUE)) for values in scored)


def _ending(spans: Mapping[str, Span], rewards: Mapping[str, float]) -> Iterator[Ending]:
    roots = [span for span in spans.values() if span.parent_id is None or span.parent_id not in spans]
    if not roots:
        return
    root = min(roots, key=lambda span: span.started_at or float("inf"))
    is_call = read_kind(root.attributes) is Kind.MODEL
    values = [
        None if is_call else next((root.attributes[key] for key in keys if key in root.attributes), None)
        for keys in (_ROOT_INPUTS, _ROOT_OUTPUTS)
    ]
    parsed = [value if (plain := parse_attribute(value)) is None else plain for value in values]
    yield Ending(trace_id=root.trace_id, input=parsed[0], output=parsed[1], error=root.error, rewards=dict(rewards))


def fill(call: Call, other: Call) -> Call:
    """Fill what a call lacks from another record of it."""
    lacking = {
        field.name: getattr(other, field.name)
        for field in fields(Call)
        if getattr(call, field.name) in (None, "", {}, ()) and field.name not in ("id", "notes", "error", "parent_id")
    }
    return replace(call, **lacking)
