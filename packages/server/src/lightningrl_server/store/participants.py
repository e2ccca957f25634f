"""Roles and tools that take part in an attempt, stored with its rollout when it ends: nobody need count its calls.

calls, tool calls, spans ─► Participants ─► rollouts.roles = ",3,17,"  tools  failed_tools    numbers of words, sorted
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from sqlalchemy import Connection, select

from lightningrl.types import ToolStatus
from lightningrl_server.store.tables import calls, is_shown, spans, tool_calls

__all__ = ["NOBODY", "Participants", "SpanNode", "named_agent", "words_in"]

NOBODY: Final = 0
"""Number of a role that nobody said; words are counted from 1."""
_FAILED: Final = frozenset(
    {ToolStatus.ERROR, ToolStatus.UNKNOWN_TOOL, ToolStatus.INVALID_ARGUMENTS, ToolStatus.TIMEOUT}
)
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
class Participants:
    """Participants of one attempt, so far. Its roles are complete when it has ended: a span may name a role after the
    call."""

    callers: set[tuple[int | None, str | None]] = field(default_factory=set[tuple[int | None, str | None]])
    """The role's word of each call, and its span; without one, the call's id stands for it."""
    tools: set[int] = field(default_factory=set[int])
    failed: set[int] = field(default_factory=set[int])
    """Tools that failed at least once."""
    shown: dict[str, tuple[int, ToolStatus]] = field(default_factory=dict[str, tuple[int, ToolStatus]])
    """Name and status of each tool call that the dialogue alone shows, by its span."""
    tree: dict[str, SpanNode] = field(default_factory=dict[str, SpanNode])

    @classmethod
    def read(cls, db: Connection, attempt_pk: int) -> Self:
        """Read those of an attempt from the database."""
        participants = cls()
        of_call = select(calls.c.agent, calls.c.span_id, calls.c.id).where(calls.c.attempt_pk == attempt_pk)
        participants.callers.update((row.agent, row.span_id or row.id) for row in db.execute(of_call))
        of_tool = select(tool_calls.c.name, tool_calls.c.status, tool_calls.c.span, is_shown.label("is_shown"))
        for row in db.execute(of_tool.where(tool_calls.c.attempt_pk == attempt_pk)):
            participants.add_tool(row.name, row.status, shown=row.span if row.is_shown else None)
        for row in db.execute(select(spans).where(spans.c.attempt_pk == attempt_pk)):
            participants.tree[row.span] = SpanNode(row.parent, row.agent)
        return participants

    def add_tool(self, name: int, status: ToolStatus, *, shown: str | None = None) -> None:
        """Add a tool call. `shown`: its span where the dialogue alone shows it; a report may take its place."""
        if shown is not None:
            self.shown[shown] = name, status
            return
        self.tools.add(name)
        if status in _FAILED:
            self.failed.add(name)

    def columns(self) -> dict[str, str]:
        """Values for the rollout that this attempt decides."""
        roles = {agent if agent is not None else named_agent(self.tree, span) or NOBODY for agent, span in self.callers}
        tools = self.tools.union(name for name, _ in self.shown.values())
        failed = self.failed.union(name for name, status in self.shown.values() if status in _FAILED)
        return {"roles": _listed(roles), "tools": _listed(tools), "failed_tools": _listed(failed)}


def words_in(listed: str) -> list[int]:
    """`,3,17,` → 3, 17."""
    return [int(word) for word in listed.split(",") if word]


def _listed(words: Iterable[int]) -> str:
    """`,3,17,`: `LIKE '%,3,%'` finds a word. Empty where there is none."""
    numbers = ",".join(str(word) for word in sorted(words))
    return f",{numbers}," if numbers else ""
