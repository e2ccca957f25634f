"""Calls joined into rollouts: records of one trace, and traces of which one goes on where another ended.

trace a   [system, user]                        ─► answer 1 ┐  an SDK without an agent around it makes a trace
trace b   [system, user, answer 1, result]      ─► answer 2 ┘  of each call: b goes on from a, one rollout
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus
from lightningrl_runs.foreign.messages import digest_text
from lightningrl_traces.records import Call, Ending, LogRecord, Message, Span, ToolRun, TraceRecord
from lightningrl_traces.spans import fill, read_spans

__all__ = ["ForeignRollout", "history_before", "history_of", "join_records"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRollout:
    """A rollout of somebody else's agent."""

    id: str
    calls: tuple[Call, ...]
    tools: tuple[ToolRun, ...] = ()
    ending: Ending
    duplicates: int = 0
    """Records of calls that others tell as well."""
    circles: int = 0
    """Spans whose parents form a circle."""
    skewed: int = 0
    """Calls whose clock is later than that of a call which goes on from them."""


def history_of(call: Call) -> bytes:
    """Digest of a call's messages with its answer: what a later call's history begins with."""
    return _digest([*(call.messages or ()), *([call.answer] if call.answer else ())])


def history_before(call: Call) -> bytes | None:
    """Digest of a prompt up to its last answer; None where it has none."""
    messages = call.messages or []
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "assistant"), None)
    return None if last is None else _digest(messages[: last + 1])


def _digest(messages: Iterable[Message]) -> bytes:
    return hashlib.blake2b(digest_text(messages).encode("utf-8", "replace"), digest_size=16).digest()


def join_records(rollout_id: str, records: Iterable[TraceRecord]) -> ForeignRollout:
    """Join the records of one rollout; what is told twice is there once, in the order of the dialogue."""
    spans: dict[str, dict[str, Span]] = {}
    logs: dict[str, list[LogRecord]] = {}
    read: list[Call | ToolRun | Ending] = []
    repeated = 0
    for record in records:
        if isinstance(record, Span):
            of_trace = spans.setdefault(record.trace_id, {})
            key = record.span_id or f"span-{len(of_trace)}"
            repeated += key in of_trace
            of_trace[key] = record if record.span_id else replace(record, span_id=key)
        elif isinstance(record, LogRecord):
            logs.setdefault(record.trace_id, []).append(record)
        else:
            read.append(record)
    for trace_id in dict.fromkeys((*spans, *logs)):
        read += read_spans(spans.get(trace_id, {}), logs.get(trace_id, ()))
    calls, merged = _merge([item for item in read if isinstance(item, Call)], spans)
    ordered, skewed = _by_clock(_in_order(calls))
    tools = [item for item in read if isinstance(item, ToolRun)]
    ending = _ending(rollout_id, [item for item in read if isinstance(item, Ending)], ordered)
    return ForeignRollout(
        id=rollout_id,
        calls=tuple(ordered),
        tools=tuple(_with_dialogue(tools, ordered)),
        ending=ending,
        duplicates=merged + repeated,
        skewed=skewed,
        circles=sum(map(_in_circles, spans.values())),
    )


def _merge(calls: Sequence[Call], spans: Mapping[str, Mapping[str, Span]]) -> tuple[list[Call], int]:
    """Merge records of one call by several instrumentations: one around the other, or at the same time."""
    merged_calls: list[Call] = []
    digests: list[bytes | None] = []
    merged = 0
    above = {(call.trace_id, call.id): _ancestors(call, spans) for call in calls}
    places: dict[Hashable, list[int]] = defaultdict(list)
    """Places in `merged_calls` by what a record of the same call may have in common with theirs: the id, a span of one
    around the other, the dialogue."""
    for call in calls:
        key, outer, digest = (call.trace_id, call.id), above[call.trace_id, call.id], _whole_history(call)
        signs = ("id", *key), ("below", *key), *(("above", key[0], span) for span in outer), ("said", key[0], digest)
        likes = sorted({place for sign in signs for place in places[sign][-_LIKES:]})
        same = (place for place in likes if _is_same(call, merged_calls[place], above, digest, digests[place]))
        place = next(same, len(merged_calls))
        if place == len(merged_calls):
            merged_calls.append(call)
            digests.append(digest)
        else:
            pair = sorted(
                (merged_calls[place], call), key=lambda record: len(above[record.trace_id, record.id])
            )  # the inner last
            second, first = sorted(pair, key=_knowledge)
            merged_calls[place] = fill(first, second)
            digests[place] = _whole_history(merged_calls[place])
            merged += 1
        names = ("id", *key), ("above", *key), *(("below", key[0], span) for span in outer)
        for sign in (*names, ("said", key[0], digests[place])):
            places[sign].append(place)
    return merged_calls, merged


_LEVELS: Final = 64
"""Spans above a call among which another record of it is looked for."""
_LIKES: Final = 64
"""Records before it, the latest, with which one that has something in common is compared."""


def _whole_history(call: Call) -> bytes | None:
    return None if call.messages is None or call.answer is None else history_of(call)


def _is_same(
    call: Call,
    other: Call,
    above: Mapping[tuple[str, str], Sequence[str]],
    digest: bytes | None,
    other_digest: bytes | None,
) -> bool:
    if call.trace_id != other.trace_id:
        return False
    if call.id == other.id:
        return True
    is_nested = other.id in above[call.trace_id, call.id] or call.id in above[other.trace_id, other.id]
    if is_nested and (call.answer is None or other.answer is None):
        return True
    if digest is None or digest != other_digest:
        return False
    ends = call.started_at + call.duration_s, other.started_at + other.duration_s
    overlap = min(ends) - max(call.started_at, other.started_at)
    is_at_once = (
        bool(call.started_at and other.started_at)
        and overlap > 0
        and overlap >= 0.5 * min(call.duration_s, other.duration_s)
    )
    return is_nested or (is_at_once and call.parent_id == other.parent_id)


def _knowledge(call: Call) -> tuple[int, int]:
    """Count what a record knows."""
    facts = (call.tools, call.finish_reason, call.messages, call.answer, call.completion_ids, call.logprobs)
    return sum(fact is not None for fact in facts), -len(call.notes)


def _ancestors(call: Call, spans: Mapping[str, Mapping[str, Span]]) -> tuple[str, ...]:
    of_trace = spans.get(call.trace_id, {})
    seen: dict[str, None] = {}
    here = call.parent_id
    while here is not None and here not in seen and len(seen) < _LEVELS:
        seen[here] = None
        here = of_trace[here].parent_id if here in of_trace else None
    return tuple(seen)


def _in_circles(spans: Mapping[str, Span]) -> int:
    """Count the spans whose parents lead back to them, each span looked at once."""
    done: set[str] = set()
    count = 0
    for span_id in spans:
        path: dict[str, int] = {}
        here: str | None = span_id
        while here is not None and here in spans and here not in done and here not in path:
            path[here] = len(path)
            here = spans[here].parent_id
        count += len(path) - path[here] if here is not None and here in path else 0
        done |= path.keys()
    return count


def _in_order(calls: Sequence[Call]) -> list[Call]:
    """Order calls by their clock, but an answer before the call whose history holds it: clocks differ."""
    waiting = sorted(calls, key=lambda call: call.started_at)
    first_with: dict[bytes, Call] = {}
    for call in waiting:
        first_with.setdefault(history_of(call), call)
    ordered: list[Call] = []
    placed: set[int] = set()

    def place(call: Call) -> None:
        chain: list[Call] = []
        while call is not None and id(call) not in placed:  # those that go before it, last first
            placed.add(id(call))
            chain.append(call)
            before = history_before(call)
            earlier = None if before is None else first_with.get(before)
            if earlier is None or earlier is call:
                break
            call = earlier
        ordered.extend(reversed(chain))

    for call in waiting:
        place(call)
    return ordered


def _by_clock(calls: Sequence[Call]) -> tuple[list[Call], int]:
    """Set a clock that is late to when the dialogue went on: a store keeps calls by their times."""
    latest, skewed = float("inf"), 0
    timed: list[Call] = []
    for call in reversed(calls):
        is_late = call.started_at > latest
        skewed += is_late
        timed.append(replace(call, started_at=latest) if is_late else call)
        latest = min(latest, call.started_at or latest)
    return timed[::-1], skewed


def _with_dialogue(tools: Sequence[ToolRun], calls: Sequence[Call]) -> list[ToolRun]:
    """Add invocations that the dialogue alone shows: asked for by an answer, with a result in a later prompt."""
    ids = {tool.id for tool in tools}
    asked: dict[str, tuple[Call, Any]] = {}
    results: dict[str, str] = {}
    for call in calls:
        for message in call.messages or ():
            if message["role"] == "tool":
                results.setdefault(message["tool_call_id"], as_text(message.get("content") or ""))
        for request in (call.answer or {}).get("tool_calls") or ():
            asked.setdefault(request["id"], (call, request["function"]))
    added: list[ToolRun] = []
    for call_id, (call, function) in asked.items():
        if call_id in ids or call_id not in results:
            continue
        run = ToolRun(
            id=call_id,
            trace_id=call.trace_id,
            parent_id=call.id,
            name=function["name"],
            arguments=function["arguments"],
            result=results[call_id],
            status=ToolStatus.UNKNOWN,
            started_at=call.started_at + call.duration_s,
            agent=call.agent,
        )
        added.append(run)
    return [*tools, *added]


def _ending(rollout_id: str, endings: Sequence[Ending], calls: Sequence[Call]) -> Ending:
    """Return what is fields of the end; without a word of it, the last answer is the output, its failure the error."""
    last = calls[-1] if calls else None
    rewards = {name: value for ending in endings for name, value in ending.rewards.items()}
    fields = {
        name: next((value for ending in endings if (value := getattr(ending, name)) is not None), None)
        for name in ("input", "output", "error", "reward")
    }
    if fields["output"] is None and last is not None and last.answer is not None:
        fields["output"] = last.answer.get("content")
    if fields["error"] is None and last is not None:
        fields["error"] = last.error
    return Ending(trace_id=rollout_id, rewards=rewards, **fields)
