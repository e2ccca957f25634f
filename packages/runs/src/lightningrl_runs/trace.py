"""A rollout as a person reads it: who said what in which tokens, what each call earned, what happened in between.

A call shows what it adds to the call whose tokens begin its prompt, so that a conversation of twenty turns is read
once:

    call 0   system, user │ assistant
    call 1        (as call 0) tool result │ assistant        seen = tokens of call 0
    call 2   system (as call 0), another user │ assistant    seen = tokens of the system message

Its calls are a tree, too: which went on from which, where history was rendered anew, what was refused on the way.

    call 0 planner                     starts
      call 1 checker                   begins like call 0 (the system message), goes on from nobody
      call 2 planner  ── BREAK ──      continues the messages of call 0, not its tokens
        call 3 planner                 goes on from call 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import numpy as np

from lightningrl.records import AttemptRecord, RolloutRecord, Score
from lightningrl.types import Array, OtherCall, OtherCallKind, ToolCall, Trajectory, Transition, common_tokens
from lightningrl_credit.trained_calls import side_calls
from lightningrl_runs.segments import Segment, SegmentKind, SegmentReader

__all__ = [
    "CallTrace",
    "LineageNode",
    "Link",
    "Trace",
    "Window",
    "build_trace",
    "read_lineage",
    "read_messages",
    "whole_row",
]

_EARLIER: Final = 64
"""Calls that a new history is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Part of a rollout that is read as text.

    Other calls have no segments; of one that is too long, the middle is a segment of kind `unknown` without text.
    """

    first: int = 0
    """Index of the first call."""
    calls: int
    tokens: int
    """Largest number of tokens, shared by the calls."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallTrace:
    """One call of a policy, read."""

    call: Transition
    """Its `prompt_ids` are those that its parent's row lacks."""
    prompt_tokens: int
    """Length of the whole prompt; the completion's first token has this position in the row."""
    segments: tuple[Segment, ...]
    """Segments of its row from the end of the parent's on. `whole_row` has all."""
    seen: int = 0
    """The first so many tokens of the row stand in the row of `seen_in`, too."""
    seen_in: str | None = None
    """An earlier call: the parent, else the one whose row begins most alike; where history was rendered anew, they part
    here."""
    is_side: bool = False
    """A side call, as a title is (`lightningrl_credit.trained_calls`)."""
    advantages: Array | None = None
    """One per completion token; None = nobody scored it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls that it asked for."""
    other_calls: tuple[OtherCall, ...] = ()
    """Calls that began after it and before the next one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """The deciding attempt of a rollout, or the one that runs now."""

    rollout: RolloutRecord
    """Task, group, outcome, reward, and every attempt with its error."""
    attempt: int | None
    """The attempt that is shown; None = none has begun."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Rewards that the run computed, by name; those of single calls are in their `call.rewards`."""
    reported: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    """Rewards that the agent reported, by name; those of single calls are in their `call.reported`."""
    unrewarded: str | None = None
    """Reason why it has no reward although it succeeded: a reward or the judge failed."""
    calls: tuple[CallTrace, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls that no call is known to have asked for."""
    other_calls: tuple[OtherCall, ...] = ()
    """Calls before the first one, and those of which the time is not known."""

    @property
    def shown_attempt(self) -> AttemptRecord | None:
        return next((attempt for attempt in self.rollout.attempts if attempt.attempt == self.attempt), None)


def build_trace(
    rollout: RolloutRecord,
    trajectory: Trajectory,
    score: Score | None,
    reader_of: Callable[[str], SegmentReader],
    window: Window | None = None,
) -> Trace:
    """Build the trace. `reader_of(policy)` reads a policy's tokens; `window` None = all of it."""
    traces = _read_calls(trajectory, score, reader_of, window)
    return Trace(
        rollout=rollout,
        attempt=trajectory.attempt,
        rewards=trajectory.rewards,
        reported=trajectory.reported,
        unrewarded=trajectory.unrewarded,
        calls=tuple(traces.values()),
        tool_calls=tuple(tool for tool in trajectory.tool_calls if tool.transition_id not in traces),
        other_calls=_between(trajectory.transitions, trajectory.other_calls).get("", ()),
    )


def read_messages(trajectory: Trajectory, reader_of: Callable[[str], SegmentReader]) -> list[list[tuple[str, str]]]:
    """Return for each call what it adds to those before it, as (who, text): `system`, `user`, `tool_result` …, then the
    policy's own words: `policy`, `policy reasoning`, `policy tool_call`.

    Markup and what is only white space are left out.
    """
    calls: list[list[tuple[str, str]]] = []
    for call in _read_calls(trajectory, None, reader_of).values():
        messages: list[tuple[str, str]] = []
        for segment in call.segments:
            if segment.start >= call.seen and segment.kind is not SegmentKind.MARKUP and segment.text.strip():
                who = segment.kind.value
                if segment.is_sampled:
                    is_part = segment.kind in (SegmentKind.REASONING, SegmentKind.TOOL_CALL)
                    who = f"policy {who}" if is_part else "policy"
                messages.append((who, segment.text.strip()))
        calls.append(messages)
    return calls


def _read_calls(
    trajectory: Trajectory, score: Score | None, reader_of: Callable[[str], SegmentReader], window: Window | None = None
) -> dict[str, CallTrace]:
    """Read the calls, by id."""
    budget = _Budget(window)
    calls = trajectory.transitions
    side = side_calls(calls)
    others = _between(calls, trajectory.other_calls)
    traces: dict[str, CallTrace] = {}
    kinds: dict[str, SegmentKind] = {}
    rows: list[tuple[Transition, np.ndarray]] = []
    for call in calls:
        row = np.concatenate((call.prompt_ids, call.completion_ids))
        parent = traces.get(call.parent_id or "")
        start = 0 if parent is None else parent.prompt_tokens + len(parent.call.completion_ids)
        segments, kinds[call.id] = reader_of(call.policy).read(
            call.prompt_ids[start:].tolist(),
            call.completion_ids.tolist(),
            start=start,
            before=row[max(0, start - 8) : start].tolist(),
            kind=SegmentKind.MARKUP if parent is None else kinds[parent.call.id],
            most=budget.take(call.index, len(row) - start),
        )
        seen, seen_in = (start, parent.call.id) if parent is not None else _most_alike(call, segments, rows)
        rows.append((call, row))
        traces[call.id] = CallTrace(
            call=replace(call, prompt_ids=call.prompt_ids[start:]),
            prompt_tokens=len(call.prompt_ids),
            segments=segments,
            seen=seen,
            seen_in=seen_in,
            is_side=call.id in side,
            advantages=None if score is None else score.advantages.get(call.id),
            tool_calls=tuple(tool for tool in trajectory.tool_calls if tool.transition_id == call.id),
            other_calls=others.get(call.id, ()),
        )
    return traces


class _Budget:
    """Shares a window's tokens among its calls: each has an equal part of what those before it left."""

    def __init__(self, window: Window | None) -> None:
        self._window = window
        self._tokens = 0 if window is None else window.tokens

    def take(self, index: int, tokens: int) -> int | None:
        """Return how many of a call's tokens are read; None = all."""
        window = self._window
        if window is None:
            return None
        if not window.first <= index < window.first + window.calls:
            return 0
        taken = min(tokens, self._tokens // (window.first + window.calls - index))
        self._tokens -= taken
        return taken


def whole_row(trace: Trace, call: CallTrace) -> tuple[Segment, ...]:
    """Return all segments of a call's row, its parents' included."""
    calls = {earlier.call.id: earlier for earlier in trace.calls}
    chain = [call]
    while (parent := calls.get(chain[-1].call.parent_id or "")) is not None:
        chain.append(parent)
    return tuple(segment for link in reversed(chain) for segment in link.segments)


def _between(calls: Sequence[Transition], others: Sequence[OtherCall]) -> dict[str, tuple[OtherCall, ...]]:
    """Group other calls by the call that began last before them."""
    others_by_call: dict[str, tuple[OtherCall, ...]] = {}
    for other in others:
        before = [call.id for call in calls if call.started_at <= other.started_at]
        place = before[-1] if before else ""
        others_by_call[place] = (*others_by_call.get(place, ()), other)
    return others_by_call


def _most_alike(
    call: Transition, segments: Sequence[Segment], rows: Sequence[tuple[Transition, np.ndarray]]
) -> tuple[int, str | None]:
    """Return how many tokens of a new history stand in an earlier call's row, in whole segments, and in which."""
    best: tuple[int, str | None] = (0, None)
    for earlier, row in rows[-_EARLIER:]:
        if earlier.policy != call.policy:
            continue
        alike = common_tokens(row, call.prompt_ids)
        seen = max((segment.end for segment in segments if segment.end <= alike), default=0)
        if seen > best[0]:
            best = seen, earlier.id
    return best


class Link(StrEnum):
    """Relation of a call to the one above it."""

    STARTS = "starts"
    """A history that no earlier call shares."""
    CONTINUES = "continues"
    """Its prompt begins with all tokens of that call."""
    BREAK = "break"
    """The call goes on in that call's messages, but its tokens were rendered anew."""
    ALIKE = "alike"
    """A history of its own that begins like that call's: the same system message, for instance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageNode:
    """A call's place in the tree."""

    index: int
    depth: int
    parent: int | None
    """Index of the call above it."""
    link: Link
    agent: str | None
    replayed_from: str | None
    refused: int
    """Calls that were refused between it and the next one."""
    judged: int
    """Calls of judges there."""
    failed_tools: int
    """Failed tool calls among those that it asked for."""

    @property
    def has_failed(self) -> bool:
        """True where a call was refused after it, or a tool that it asked for failed."""
        return bool(self.refused or self.failed_tools)


def read_lineage(trace: Trace) -> tuple[LineageNode, ...]:
    """List the calls depth first, those of one parent in the order in which they were made."""
    by_id = {call.call.id: call for call in trace.calls}
    below: dict[str | None, list[CallTrace]] = {}
    for call in trace.calls:
        below.setdefault(_above(call, by_id), []).append(call)
    nodes: list[LineageNode] = []
    waiting = [(call, 0) for call in reversed(below.get(None, []))]
    while waiting:
        call, depth = waiting.pop()
        nodes.append(_node(call, depth, by_id))
        waiting += [(child, depth + 1) for child in reversed(below.get(call.call.id, []))]
    return tuple(nodes)


def _above(call: CallTrace, by_id: dict[str, CallTrace]) -> str | None:
    """Return the id of the call above it, an earlier one of the attempt."""
    above = call.call.parent_id or call.seen_in
    return above if above in by_id and by_id[above].call.index < call.call.index else None


def _node(call: CallTrace, depth: int, by_id: dict[str, CallTrace]) -> LineageNode:
    made, above = call.call, _above(call, by_id)
    if made.is_break:
        link = Link.BREAK
    elif above is None:
        link = Link.STARTS
    else:
        link = Link.CONTINUES if made.parent_id is not None else Link.ALIKE
    return LineageNode(
        index=made.index,
        depth=depth,
        parent=None if above is None else by_id[above].call.index,
        link=link,
        agent=made.agent,
        replayed_from=made.replayed_from,
        refused=_count(call.other_calls, OtherCallKind.REFUSED),
        judged=_count(call.other_calls, OtherCallKind.JUDGE),
        failed_tools=sum(tool.status.is_failure for tool in call.tool_calls),
    )


def _count(calls: Sequence[OtherCall], kind: OtherCallKind) -> int:
    return sum(call.kind is kind for call in calls)
