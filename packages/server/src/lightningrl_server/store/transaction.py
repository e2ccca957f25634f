"""The tools of an operation that writes: the connection, calls collected for one insert, interned words, the running attempts in memory.

The memory is only ever a copy of what is committed or about to be: a rollback empties it, and it fills again from the database.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, bindparam, func, insert, or_, select, update

from lightningrl.records import AttemptInfo
from lightningrl.sanitize import clean_text
from lightningrl.types import Outcome, RolloutState, ToolStatus
from lightningrl_server.lru import LruCache
from lightningrl_server.store.codec import as_number, column_text, count_tokens
from lightningrl_server.store.dialects import Database
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.events import EndEvent, Event, QueueEvent, StartEvent
from lightningrl_server.store.participants import Participants
from lightningrl_server.store.prepared import PreparedStatement
from lightningrl_server.store.reads import Reader, chunks
from lightningrl_server.store.schema import attempts, calls, is_shown, rollouts, tool_calls, toolsets, words

__all__ = ["ATTEMPT_COLUMNS", "LiveAttempt", "Transaction", "over"]


@dataclass(slots=True)
class LiveAttempt:
    """A running attempt as the writer knows it."""

    pk: int
    rollout_pk: int
    ids: dict[str, int] = field(default_factory=dict[str, int])
    """Transition id → index."""
    keys: dict[str, int] = field(default_factory=dict[str, int])
    """Call key → index."""
    ends: list[int] = field(default_factory=list[int])
    """By index, how many tokens prompt and completion are."""
    tool_calls: int = 0
    """How many are kept."""
    tool_spans: set[str] = field(default_factory=set[str])
    """Theirs, where they have one."""
    told_tools: set[str] = field(default_factory=set[str])
    """Ids of those that somebody told of; the others are shown by the dialogue alone."""
    gaps: set[str] = field(default_factory=set[str])
    """Ids of those of which nobody told arguments, result or status: the dialogue may."""
    participants: Participants = field(default_factory=Participants)

    @property
    def standing(self) -> tuple[int, int, int]:
        """How many calls, tool calls, and tool calls that the dialogue alone shows: no two states of an attempt have the same."""
        return len(self.ids), self.tool_calls, len(self.participants.shown)

    def note_told(self, call_id: str, *, has_gaps: bool) -> None:
        """Somebody told of a tool call."""
        self.told_tools.add(call_id)
        if has_gaps:
            self.gaps.add(call_id)

    def drop_shown(self, span: str) -> None:
        """Somebody told of a tool call that the dialogue had shown."""
        self.tool_spans.discard(span)
        self.tool_calls -= 1
        del self.participants.shown[span]


class Transaction:
    """The writer's view of the database. One at a time, in one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._dialect = database.writing.dialect
        self._cursor: Any = None
        """The driver's, in the transaction."""
        self._calls: list[dict[str, Any]] = []
        self._events: list[Event] = []
        self._live: dict[tuple[str, int], LiveAttempt] = {}
        self._current: set[int] = set()
        """Attempts that are known to be in the database as they are in memory, for as long as nobody else can write."""
        self._fresh: set[tuple[str, int]] = set()
        """Attempts that were leased here, of which nothing is kept yet; not where other servers may write."""
        self._words = LruCache[str, int]()
        self._toolsets = LruCache[bytes, int]()
        self._upserts: dict[tuple[str, ...], PreparedStatement] = {}
        self.now = 0.0
        """Unix seconds at the beginning of the transaction."""
        self.reader = Reader()
        """What it has read may not be committed yet: forgotten with a rollback, like the rest."""

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Commit what is done inside, or undo all of it."""
        self.now = time.time()
        self._current.clear()
        try:
            if self._connection is None:
                self._connection = self._database.writing.connect()
            with self._connection.begin():
                self._cursor = self._connection.connection.cursor()
                yield
                self.flush()
                if self._database.peers is not None:
                    self._database.peers.tell(self._connection, self._events)
        except BaseException:
            self._calls.clear()
            self._events.clear()
            self._live.clear()
            self._fresh.clear()
            self._words.clear()
            self._toolsets.clear()
            self.reader = Reader()
            self.close()
            raise

    def close(self) -> None:
        """Give the connection up; the next `begin` makes a new one."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    @property
    def db(self) -> Connection:
        """The connection, with everything done so far visible in it."""
        self.flush()
        assert self._connection is not None
        return self._connection

    def flush(self) -> None:
        if self._calls and self._connection is not None:
            rows, self._calls = self._calls, []
            self.run_many(_INSERT_CALLS, rows)

    def run(self, statement: PreparedStatement, **values: Any) -> int:
        """How many rows it changed."""
        self._flush_for(statement)
        return int(statement.on(self._dialect).run(self._cursor, values).rowcount)

    def run_many(self, statement: PreparedStatement, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            statement.on(self._dialect).run_many(self._cursor, rows)

    def rows(self, statement: PreparedStatement, **values: Any) -> list[Any]:
        self._flush_for(statement)
        return statement.on(self._dialect).rows(self._cursor, values)

    def _flush_for(self, statement: PreparedStatement) -> None:
        if self._calls and calls in statement.tables:
            self.flush()

    def take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def add_call(self, row: dict[str, Any]) -> None:
        self._calls.append(row)

    def replace(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows; where the primary key is taken, the new values stand."""
        if not rows:
            return
        place = table.name, *rows[0]
        prepared = self._upserts.get(place)
        if prepared is None:
            statement = self._database.insert(table)
            keys = [column.name for column in table.primary_key]
            others = {name: statement.excluded[name] for name in rows[0] if name not in keys}
            statement = statement.on_conflict_do_update(index_elements=keys, set_=others)
            prepared = self._upserts[place] = PreparedStatement(statement, columns=tuple(rows[0]))
        self.run_many(prepared, rows)

    def word(self, text: str) -> int:
        """The number a text is interned under."""
        text = column_text(text)
        known = self._words.get(text)
        if known is None:
            known = self.db.execute(_WORD, {"text": text}).scalar()
            if known is None:
                known = self.db.execute(insert(words).values(text=text).returning(words.c.pk)).scalar_one()
            self._words.put(text, known, len(text))
        return known

    def word_or_none(self, text: str | None) -> int | None:
        return None if text is None else self.word(text)

    def toolset_or_none(self, offered: str) -> int | None:
        """The number that the tools a call was offered are kept under, once; None where there are none."""
        if not offered:
            return None
        digest = hashlib.blake2b(clean_text(offered).encode(), digest_size=16).digest()
        known = self._toolsets.get(digest)
        if known is None:
            known = self.db.execute(_TOOLSET, {"digest": digest}).scalar()
            if known is None:
                made = insert(toolsets).values(digest=digest, body=offered).returning(toolsets.c.pk)
                known = self.db.execute(made).scalar_one()
            self._toolsets.put(digest, known, len(digest))
        return known

    def attempt(self, rollout_id: str, attempt: int) -> Any:
        """The attempt's row and its rollout's. Raises UnknownRecord."""
        found = self.rows(_ATTEMPT, of_id=rollout_id, of_number=as_number(attempt))
        if not found:
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {attempt}; attempts start with a lease")
        return found[0]

    def attempts(self, rollout_ids: Sequence[str]) -> dict[tuple[str, int], Any]:
        """The rows of all attempts of rollouts, by rollout and number; those that there are."""
        found = (row for ids in chunks(tuple(dict.fromkeys(rollout_ids))) for row in self.db.execute(_ATTEMPTS, {"ids": ids}))
        return {(row.rollout_id, row.number): row for row in found}

    def live(self, rollout_id: str, attempt: int, what: str) -> LiveAttempt:
        """The running attempt. Raises UnknownRecord, or AttemptOver naming `what` comes too late."""
        known = self._live.get((rollout_id, attempt))
        if known is not None and (not self._database.is_shared or self._is_current(known)):
            return known
        row = self.attempt(rollout_id, attempt)
        if row.outcome is not None:
            raise over(rollout_id, attempt, row.outcome, what)
        is_fresh = (rollout_id, attempt) in self._fresh
        self._fresh.discard((rollout_id, attempt))
        known = LiveAttempt(row.pk, row.rollout_pk, participants=Participants() if is_fresh else Participants.read(self.db, row.pk))
        for call in [] if is_fresh else self.rows(_KEPT, of_pk=row.pk):
            known.ids[call.id] = known.keys[call.call_key] = call.idx
            shared = 0 if call.parent is None else known.ends[call.parent]
            known.ends.append(shared + count_tokens(call.suffix) + count_tokens(call.completion))
        kept = [] if is_fresh else self.rows(_TOOLS, of_pk=row.pk)
        known.tool_calls = len(kept)
        known.tool_spans.update(tool_call.span for tool_call in kept if tool_call.span is not None)
        for tool_call in kept:
            if tool_call.span not in known.participants.shown:
                known.note_told(tool_call.id, has_gaps=bool(tool_call.has_gaps))
        self._live[rollout_id, attempt] = known
        self._current.add(known.pk)
        return known

    def _is_current(self, known: LiveAttempt) -> bool:
        """Whether no other server has ended the attempt, or kept calls or tool calls of it."""
        if known.pk not in self._current:
            standing = [(row.calls, row.tool_calls, row.shown) for row in self.rows(_STANDING, of_pk=known.pk)]
            if standing == [known.standing]:
                self._current.add(known.pk)
        return known.pk in self._current

    def end(
        self,
        row: Any,
        outcome: Outcome,
        *,
        again: bool,
        forgive: bool = False,
        **values: Any,
    ) -> RolloutState:
        """End the running attempt of `row`; its rollout succeeds, fails, or is queued `again`. `forgive`: the try is not charged."""
        end = {"outcome": outcome, "ended_at": self.now, "output": None, "error": None, "duration_s": 0.0, "left_threads": (), **values}
        self.run(_END_ATTEMPT, of_pk=row.pk, **end)
        live = self._live.pop((row.rollout_id, row.number), None)
        self._fresh.discard((row.rollout_id, row.number))
        is_known = live is not None and not self._database.is_shared  # other servers of the store keep parts of it, too
        participants = live.participants if live is not None and is_known else Participants.read(self.db, row.pk)
        state = RolloutState.QUEUED if again else RolloutState.SUCCEEDED if outcome is Outcome.SUCCEEDED else RolloutState.FAILED
        after = {"state": state, "outcome": None if again else outcome, "deciding": row.number, "more": int(forgive)}
        self.run(_END_ROLLOUT, of_pk=row.rollout_pk, **after, **participants.columns())
        self.add_event(EndEvent(row.rollout_id, row.number, state))
        if again:
            self.add_event(QueueEvent())
        return state

    def begun(self, key_digest: bytes, info: AttemptInfo) -> None:
        """An attempt was leased."""
        if not self._database.is_shared:
            self._fresh.add((info.rollout_id, info.attempt))
        self.add_event(StartEvent(key_digest, info))

    def forget(self, rollout_id: str, attempt: int) -> None:
        self._fresh.discard((rollout_id, attempt))
        self._live.pop((rollout_id, attempt), None)


def over(rollout_id: str, attempt: int, outcome: str, what: str) -> AttemptOver:
    return AttemptOver(f"attempt {attempt} of rollout {rollout_id!r} is over ({outcome}); {what} came too late and is not kept")


_INSERT_CALLS = PreparedStatement(insert(calls), columns=[column.name for column in calls.c if column.name != "pk"])
_KEPT = PreparedStatement(
    select(calls.c.id, calls.c.call_key, calls.c.idx, calls.c.parent, calls.c.suffix, calls.c.completion)
    .where(calls.c.attempt_pk == bindparam("of_pk"))
    .order_by(calls.c.idx)
)
_STANDING = PreparedStatement(
    select(
        select(func.count()).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("calls"),
        select(func.count()).where(tool_calls.c.attempt_pk == attempts.c.pk).scalar_subquery().label("tool_calls"),
        select(func.count()).where(tool_calls.c.attempt_pk == attempts.c.pk, is_shown).scalar_subquery().label("shown"),
    ).where(attempts.c.pk == bindparam("of_pk"), attempts.c.outcome.is_(None))
)
"""How many calls and tool calls a running attempt has."""
_HAS_GAPS = or_(tool_calls.c.arguments.is_(None), tool_calls.c.result.is_(None), tool_calls.c.status == ToolStatus.UNKNOWN)
_TOOLS = PreparedStatement(
    select(tool_calls.c.span, tool_calls.c.id, _HAS_GAPS.label("has_gaps")).where(tool_calls.c.attempt_pk == bindparam("of_pk"))
)
_WORD = select(words.c.pk).where(words.c.text == bindparam("text"))
_TOOLSET = select(toolsets.c.pk).where(toolsets.c.digest == bindparam("digest"))
ATTEMPT_COLUMNS = (
    attempts.c.pk,
    attempts.c.rollout_pk,
    attempts.c.number,
    attempts.c.worker_id,
    attempts.c.outcome,
    attempts.c.expires_at,
    rollouts.c.id.label("rollout_id"),
    rollouts.c.state,
    rollouts.c.started,
    rollouts.c.forgiven,
    rollouts.c.max_attempts,
    rollouts.c.branch,
)

_WITH_ROLLOUT = select(*ATTEMPT_COLUMNS).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
_ATTEMPT = PreparedStatement(_WITH_ROLLOUT.where(rollouts.c.id == bindparam("of_id"), attempts.c.number == bindparam("of_number")))
_ATTEMPTS = _WITH_ROLLOUT.where(rollouts.c.id.in_(bindparam("ids", expanding=True)))
_END_ATTEMPT = PreparedStatement(
    update(attempts).where(attempts.c.pk == bindparam("of_pk")),
    columns=("outcome", "ended_at", "output", "error", "duration_s", "left_threads"),
)
_END_ROLLOUT = PreparedStatement(
    update(rollouts).where(rollouts.c.pk == bindparam("of_pk")).values(forgiven=rollouts.c.forgiven + bindparam("more")),
    columns=("state", "outcome", "deciding", "roles", "tools", "failed_tools"),
)
