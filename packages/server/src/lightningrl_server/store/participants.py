"""A running attempt in memory. Roles and tools that take part in it are stored with its rollout when it ends.

calls, tool calls, spans ─► LiveAttempt ─► rollouts.roles = ",3,17,"  tools  failed_tools    numbers of words, sorted
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from sqlalchemy import Connection, or_, select

from lightningrl.types import ToolStatus
from lightningrl_server.store.columns import count_tokens
from lightningrl_server.store.tables import calls, is_shown, spans, tool_calls

__all__ = ["NOBODY", "LiveAttempt", "SpanNode", "named_agent", "words_in"]

NOBODY: Final = 0
"""Number of a role that nobody said; words are counted from 1."""
_LONGEST_PATH: Final = 64
"""Spans walked up at most in search of an agent's name."""


class SpanNode(NamedTuple):
    """A span of the agent's, as far as it says who called."""

    parent: str | None
    agent: int | None
    """The number of its word."""


def named_agent(tree: Mapping[str, SpanNode], span: str | None) -> int | None:
    """Find the nearest agent named on the way up from `span`."""
    for _ in range(_LONGEST_PATH):
        node = tree.get(span) if span is not None else None
        if node is None:
            return None
        if node.agent is not None:
            return node.agent
        span = node.parent
    return None


@dataclass(slots=True)
class LiveAttempt:
    """A running attempt in the writer's memory. Roles are complete at its end: a span may name one after the call."""

    pk: int
    seen_in: int = 0
    """Number of the transaction in which it was last seen to be in the database as it is in memory."""
    ids: dict[str, int] = field(default_factory=dict[str, int])
    """Transition id → index."""
    keys: dict[str, int] = field(default_factory=dict[str, int])
    """Call key → index."""
    ends: list[int] = field(default_factory=list[int])
    """Length of prompt and completion in tokens, by index."""
    callers: set[tuple[int | None, str | None]] = field(default_factory=set[tuple[int | None, str | None]])
    """The role's word of each call, and its span; without one, the call's id stands for it."""
    tool_calls: int = 0
    """Number of recorded tool calls."""
    tool_spans: set[str] = field(default_factory=set[str])
    """Spans of tool calls, where they have one."""
    reported_tools: set[str] = field(default_factory=set[str])
    """Ids of tool calls that were reported; the dialogue alone shows the others."""
    gaps: set[str] = field(default_factory=set[str])
    """Ids of reported tool calls that lack arguments, result or status: the dialogue may show them."""
    tools: set[int] = field(default_factory=set[int])
    """Names of reported tool calls, as words."""
    failed: set[int] = field(default_factory=set[int])
    """Tools that failed at least once."""
    shown: dict[str, tuple[int, ToolStatus]] = field(default_factory=dict[str, tuple[int, ToolStatus]])
    """Name and status of each tool call that the dialogue alone shows, by its span."""
    tree: dict[str, SpanNode] = field(default_factory=dict[str, SpanNode])

    @classmethod
    def read(cls, db: Connection, pk: int) -> Self:
        """Read it from the database."""
        live = cls(pk)
        for call in db.execute(_CALLS.where(calls.c.attempt_pk == pk)):
            live.ids[call.id] = live.keys[call.call_key] = call.idx
            shared = 0 if call.parent is None else live.ends[call.parent]
            live.ends.append(shared + count_tokens(call.suffix) + count_tokens(call.completion))
            live.callers.add((call.agent, call.span_id or call.id))
        for tool_call in db.execute(_TOOLS.where(tool_calls.c.attempt_pk == pk)):
            live.tool_calls += 1
            if tool_call.span is not None:
                live.tool_spans.add(tool_call.span)
            if not tool_call.is_shown:
                live.note_reported(tool_call.id, has_gaps=bool(tool_call.has_gaps))
            live.add_tool(tool_call.name, tool_call.status, shown=tool_call.span if tool_call.is_shown else None)
        for row in db.execute(select(spans).where(spans.c.attempt_pk == pk)):
            live.tree[row.span] = SpanNode(row.parent, row.agent)
        return live

    @property
    def standing(self) -> tuple[int, int, int]:
        """Numbers of calls, tool calls, and tool calls that the dialogue alone shows: no two states have the same."""
        return len(self.ids), self.tool_calls, len(self.shown)

    def note_reported(self, call_id: str, *, has_gaps: bool) -> None:
        """Note that a tool call was reported."""
        self.reported_tools.add(call_id)
        if has_gaps:
            self.gaps.add(call_id)

    def add_tool(self, name: int, status: ToolStatus, *, shown: str | None = None) -> None:
        """Add a tool call. `shown`: its span where the dialogue alone shows it; a report may take its place."""
        if shown is not None:
            self.shown[shown] = name, status
            return
        self.tools.add(name)
        if status.is_failure:
            self.failed.add(name)

    def drop_shown(self, span: str) -> None:
        """Drop a tool call that the dialogue had shown: it was reported."""
        self.tool_spans.discard(span)
        self.tool_calls -= 1
        del self.shown[span]

    def columns(self) -> dict[str, str]:
        """Values for the rollout that this attempt decides."""
        roles = {agent if agent is not None else named_agent(self.tree, span) or NOBODY for agent, span in self.callers}
        tools = self.tools.union(name for name, _ in self.shown.values())
        failed = self.failed.union(name for name, status in self.shown.values() if status.is_failure)
        return {"roles": _listed(roles), "tools": _listed(tools), "failed_tools": _listed(failed)}


def words_in(listed: str) -> list[int]:
    """`,3,17,` → 3, 17."""
    return [int(word) for word in listed.split(",") if word]


def _listed(words: Iterable[int]) -> str:
    """`,3,17,`: `LIKE '%,3,%'` finds a word. Empty where there is none."""
    numbers = ",".join(str(word) for word in sorted(words))
    return f",{numbers}," if numbers else ""


_CALLS = select(
    *(calls.c[name] for name in ("id", "call_key", "idx", "parent", "suffix", "completion", "agent", "span_id"))
).order_by(calls.c.idx)
_gaps = or_(tool_calls.c.arguments.is_(None), tool_calls.c.result.is_(None), tool_calls.c.status == ToolStatus.UNKNOWN)
_TOOLS = select(
    *(tool_calls.c[name] for name in ("id", "name", "status", "span")),
    is_shown.label("is_shown"),
    _gaps.label("has_gaps"),
)
