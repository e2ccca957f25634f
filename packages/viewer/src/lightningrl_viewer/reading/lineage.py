"""A rollout's calls as a tree: which went on from which, where history was rendered anew, what was refused on the way.

call 0 planner                     starts
  call 1 checker                   begins like call 0 (the system message), goes on from nobody
  call 2 planner  ── BREAK ──      continues the messages of call 0, not its tokens
    call 3 planner                 goes on from call 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightningrl.types import OtherCall, OtherCallKind
from lightningrl_viewer.reading.trace import CallTrace, Trace

__all__ = ["LineageNode", "Link", "read_lineage"]


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
