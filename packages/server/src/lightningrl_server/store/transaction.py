"""`Transaction`: what an operation that writes works on: statements, events for waiters, the running attempts.

Attempts in memory are a copy of what is committed or about to be: a rollback empties it, and it fills again from the
database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, func, or_, select, update

from lightningrl.types import Outcome, RolloutState, ToolStatus
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.columns import as_number, count_tokens
from lightningrl_server.store.databases import Database, EndEvent, QueueEvent, StartEvent
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.participants import Participants
from lightningrl_server.store.reader import Reader, chunks
from lightningrl_server.store.statements import PreparedStatement, WriteConnection
from lightningrl_server.store.tables import attempts, calls, is_shown, rollouts, tool_calls

__all__ = ["ATTEMPT_COLUMNS", "LiveAttempt", "Transaction", "over"]


@dataclass(slots=True)
class LiveAttempt:
    """A running attempt as the writer has it in memory."""

    pk: int
    rollout_pk: int
    ids: dict[str, int] = field(default_factory=dict[str, int])
    """Transition id → index."""
    keys: dict[str, int] = field(default_factory=dict[str, int])
    """Call key → index."""
    ends: list[int] = field(default_factory=list[int])
    """Length of prompt and completion in tokens, by index."""
    tool_calls: int = 0
    """Number of recorded tool calls."""
    tool_spans: set[str] = field(default_factory=set[str])
    """Spans of tool calls, where they have one."""
    reported_tools: set[str] = field(default_factory=set[str])
    """Ids of tool calls that were reported; the dialogue alone shows the others."""
    gaps: set[str] = field(default_factory=set[str])
    """Ids of reported tool calls that lack arguments, result or status: the dialogue may show them."""
    participants: Participants = field(default_factory=Participants)

    @property
    def standing(self) -> tuple[int, int, int]:
        """Numbers of calls, tool calls, and tool calls that the dialogue alone shows: no two states have the same."""
        return len(self.ids), self.tool_calls, len(self.participants.shown)

    def note_reported(self, call_id: str, *, has_gaps: bool) -> None:
        """Note that a tool call was reported."""
        self.reported_tools.add(call_id)
        if has_gaps:
            self.gaps.add(call_id)

    def drop_shown(self, span: str) -> None:
        """Drop a tool call that the dialogue had shown: it was reported."""
        self.tool_spans.discard(span)
        self.tool_calls -= 1
        del self.participants.shown[span]


class Transaction(WriteConnection):
    """The writer's view of the database. One at a time, in one thread."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._live: dict[tuple[str, int], LiveAttempt] = {}
        self._current: dict[int, int] = {}
        """Number of the transaction in which an attempt was seen to be in the database as it is in memory."""
        self._fresh: set[tuple[str, int]] = set()
        """Attempts leased here that have no records yet; empty where other servers may write."""
        self.reader = Reader()
        """Its cache may hold what is not committed yet: it goes with a rollback, like the rest."""

    def forget_all(self) -> None:
        super().forget_all()
        self._live.clear()
        self._current.clear()
        self._fresh.clear()
        self.reader = Reader()

    def attempt(self, rollout_id: str, attempt: int) -> Any:
        """Read the attempt's row and its rollout's. Raises UnknownRecord."""
        rows = self.rows(_ATTEMPT, of_id=rollout_id, of_number=as_number(attempt))
        if not rows:
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {attempt}; attempts start with a lease")
        return rows[0]

    def attempts(self, rollout_ids: Sequence[str]) -> dict[tuple[str, int], Any]:
        """Read the rows of all attempts of rollouts, by rollout and number; those that there are."""
        parts = chunks(tuple(dict.fromkeys(rollout_ids)))
        rows = (row for ids in parts for row in self.db.execute(_ATTEMPTS, {"ids": ids}))
        return {(row.rollout_id, row.number): row for row in rows}

    def live(self, rollout_id: str, attempt: int, what: str) -> LiveAttempt:
        """Return the running attempt. Raises UnknownRecord, or AttemptOver naming `what` comes too late."""
        live = self._live.get((rollout_id, attempt))
        if live is not None and (not self.is_shared or self._is_current(live)):
            return live
        row = self.attempt(rollout_id, attempt)
        if row.outcome is not None:
            raise over(rollout_id, attempt, row.outcome, what)
        is_fresh = (rollout_id, attempt) in self._fresh
        self._fresh.discard((rollout_id, attempt))
        live = LiveAttempt(row.pk, row.rollout_pk) if is_fresh else self._read_live(row)
        self._live[rollout_id, attempt] = live
        self._current[live.pk] = self.number
        return live

    def _read_live(self, row: Any) -> LiveAttempt:
        live = LiveAttempt(row.pk, row.rollout_pk, participants=Participants.read(self.db, row.pk))
        for call in self.rows(_CALLS, of_pk=row.pk):
            live.ids[call.id] = live.keys[call.call_key] = call.idx
            shared = 0 if call.parent is None else live.ends[call.parent]
            live.ends.append(shared + count_tokens(call.suffix) + count_tokens(call.completion))
        for tool_call in self.rows(_TOOLS, of_pk=row.pk):
            live.tool_calls += 1
            if tool_call.span is not None:
                live.tool_spans.add(tool_call.span)
            if tool_call.span not in live.participants.shown:
                live.note_reported(tool_call.id, has_gaps=bool(tool_call.has_gaps))
        return live

    def _is_current(self, live: LiveAttempt) -> bool:
        """True if no other server has ended the attempt, or recorded calls or tool calls of it."""
        if self._current.get(live.pk) != self.number:
            standing = [(row.calls, row.tool_calls, row.shown) for row in self.rows(_STANDING, of_pk=live.pk)]
            if standing != [live.standing]:
                return False
            self._current[live.pk] = self.number
        return True

    def end(self, row: Any, outcome: Outcome, *, again: bool, forgive: bool = False, **values: Any) -> RolloutState:
        """End the running attempt of `row`; its rollout succeeds, fails, or is queued `again`. `forgive`: the try is
        not charged."""
        no_result = {"output": None, "error": None, "duration_s": 0.0, "left_threads": ()}
        end = {"outcome": outcome, "ended_at": self.now, **no_result, **values}
        self.run(_END_ATTEMPT, of_pk=row.pk, **end)
        live = self._live.pop((row.rollout_id, row.number), None)
        self._current.pop(row.pk, None)
        self._fresh.discard((row.rollout_id, row.number))
        # Other servers of a shared store record parts of it, too.
        is_whole = live is not None and not self.is_shared
        participants = live.participants if live is not None and is_whole else Participants.read(self.db, row.pk)
        is_done = outcome is Outcome.SUCCEEDED
        state = RolloutState.QUEUED if again else RolloutState.SUCCEEDED if is_done else RolloutState.FAILED
        after = {
            "state": state,
            "outcome": None if again else outcome,
            "deciding": row.number,
            "more": int(forgive),
        }
        self.run(_END_ROLLOUT, of_pk=row.rollout_pk, **after, **participants.columns())
        self.add_event(EndEvent(row.rollout_id, row.number, state))
        if again:
            self.add_event(QueueEvent())
        return state

    def begun(self, key_digest: bytes, info: AttemptInfo) -> None:
        """Note that an attempt was leased."""
        if not self.is_shared:
            self._fresh.add((info.rollout_id, info.attempt))
        self.add_event(StartEvent(key_digest, info))

    def forget(self, rollout_id: str, attempt: int) -> None:
        self._fresh.discard((rollout_id, attempt))
        self._live.pop((rollout_id, attempt), None)


def over(rollout_id: str, attempt: int, outcome: str, what: str) -> AttemptOver:
    return AttemptOver(
        f"attempt {attempt} of rollout {rollout_id!r} is over ({outcome}); {what} came too late and is not kept"
    )


_CALLS = PreparedStatement(
    select(calls.c.id, calls.c.call_key, calls.c.idx, calls.c.parent, calls.c.suffix, calls.c.completion)
    .where(calls.c.attempt_pk == bindparam("of_pk"))
    .order_by(calls.c.idx)
)
_count_calls = select(func.count()).where(calls.c.attempt_pk == attempts.c.pk)
_count_tools = select(func.count()).where(tool_calls.c.attempt_pk == attempts.c.pk)
_STANDING = PreparedStatement(
    select(
        _count_calls.scalar_subquery().label("calls"),
        _count_tools.scalar_subquery().label("tool_calls"),
        _count_tools.where(is_shown).scalar_subquery().label("shown"),
    ).where(attempts.c.pk == bindparam("of_pk"), attempts.c.outcome.is_(None))
)
"""Numbers of calls and tool calls of a running attempt."""
_has_gaps = or_(
    tool_calls.c.arguments.is_(None), tool_calls.c.result.is_(None), tool_calls.c.status == ToolStatus.UNKNOWN
)
_TOOLS = PreparedStatement(
    select(tool_calls.c.span, tool_calls.c.id, _has_gaps.label("has_gaps")).where(
        tool_calls.c.attempt_pk == bindparam("of_pk")
    )
)
ATTEMPT_COLUMNS = (
    *(attempts.c[name] for name in ("pk", "rollout_pk", "number", "worker_id", "outcome", "expires_at")),
    rollouts.c.id.label("rollout_id"),
    *(rollouts.c[name] for name in ("state", "started", "forgiven", "max_attempts", "branch")),
)
_WITH_ROLLOUT = select(*ATTEMPT_COLUMNS).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
_ATTEMPT = PreparedStatement(
    _WITH_ROLLOUT.where(rollouts.c.id == bindparam("of_id"), attempts.c.number == bindparam("of_number"))
)
_ATTEMPTS = _WITH_ROLLOUT.where(rollouts.c.id.in_(bindparam("ids", expanding=True)))
_END_ATTEMPT = PreparedStatement(
    update(attempts).where(attempts.c.pk == bindparam("of_pk")),
    columns=("outcome", "ended_at", "output", "error", "duration_s", "left_threads"),
)
_END_ROLLOUT = PreparedStatement(
    update(rollouts)
    .where(rollouts.c.pk == bindparam("of_pk"))
    .values(forgiven=rollouts.c.forgiven + bindparam("more")),
    columns=("state", "outcome", "deciding", "roles", "tools", "failed_tools"),
)
