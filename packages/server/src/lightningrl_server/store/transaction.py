"""`Transaction`: what an operation that writes works on, and the statements that it is asked.

Statements are compiled once and handed to the driver: SQLAlchemy's own way takes ten times as long as SQLite itself.

INSERT = PreparedStatement(insert(rewards))
transaction.run(INSERT, attempt_pk=…, idx=…)
FOUND = PreparedStatement(select(calls).where(calls.c.attempt_pk.in_(bindparam("pks", expanding=True))))
FOUND.read(connection, pks=[3, 17])

What a transaction remembers, running attempts, calls that wait for their insert and numbers of words, is a copy of what
is committed or about to be: a rollback empties it, and it fills again from the database.
"""

from __future__ import annotations

import hashlib
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Dialect, Insert, Table, bindparam, func, insert, select
from sqlalchemy.sql import visitors

from lightningrl.sanitize import clean_text
from lightningrl_server.lru import LruCache
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.columns import as_number, column_text
from lightningrl_server.store.databases import Database, Event, StartEvent
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.participants import LiveAttempt
from lightningrl_server.store.tables import attempts, calls, is_shown, rollouts, tool_calls, toolsets, words

__all__ = ["WITH_ROLLOUT", "CompiledStatement", "PreparedStatement", "Transaction", "over"]


class CompiledStatement:
    """A statement in one database's words. Values and rows are of Python's types, as the columns' types make them."""

    def __init__(self, statement: Any, columns: Sequence[str] | None, dialect: Dialect) -> None:
        if isinstance(statement, Insert):
            statement = statement.inline()  # the driver is not asked for the key
        compiled = statement.compile(dialect=dialect, column_keys=columns)
        self._text = str(compiled)
        binds = compiled.binds
        self._is_positional = bool(compiled.positional)
        self._names: list[str] = list(compiled.positiontup if self._is_positional else binds)
        self._list: str | None = next((name for name in self._names if binds[name].expanding), None)
        """The one value that is a list, for `IN (…)`; such a statement has no other."""
        if self._list is not None and len(self._names) > 1:
            raise TypeError(
                f"a statement with the list {self._list!r} has other values, too: {self._names}; "
                "ask SQLAlchemy's own way"
            )
        self._mark = "?" if self._is_positional else "%s"
        self._binds = [
            (name if bind.required else None, _process(bind.type, dialect, "bind_processor"), bind.value)
            for name, bind in ((name, binds[name]) for name in self._names)
        ]
        self._dialect = dialect
        self._selected = tuple(getattr(statement, "selected_columns", None) or ())
        row: Any = namedtuple("Row", [column.key for column in self._selected])  # type: ignore[misc]
        self._make_row = row._make
        self._readers: list[tuple[int, Any]] | None = None
        """Readers of columns; None = not asked yet: only the first answer says what the driver's types are."""

    def run(self, cursor: Any, values: Mapping[str, Any]) -> Any:
        """Run it and return the cursor, for its `rowcount`."""
        return cursor.execute(self._text, self._bound(values))

    def run_many(self, cursor: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        cursor.executemany(self._text, [self._bound(row) for row in rows])

    def rows(self, cursor: Any, values: Mapping[str, Any]) -> list[Any]:
        """Read the rows, with an attribute for each column."""
        if self._list is None:
            self.run(cursor, values)
        elif not (wanted := values[self._list]):
            return []
        else:
            marks = ", ".join([self._mark] * len(wanted))
            cursor.execute(self._text.replace(f"__[POSTCOMPILE_{self._list}]", marks), wanted)
        readers = self._readers
        if readers is None:
            kinds = zip(self._selected, cursor.description, strict=True)
            processes = [_process(column.type, self._dialect, "result_processor", kind[1]) for column, kind in kinds]
            readers = self._readers = [(i, process) for i, process in enumerate(processes) if process is not None]
        rows = []
        for row in cursor.fetchall():
            cells = list(row)
            for place, process in readers:
                cells[place] = process(cells[place])
            rows.append(self._make_row(cells))
        return rows

    def _bound(self, values: Mapping[str, Any]) -> Any:
        bound: list[Any] = []
        for name, process, constant in self._binds:
            value = constant if name is None else values[name]
            bound.append(value if process is None else process(value))
        return bound if self._is_positional else dict(zip(self._names, bound, strict=True))


class PreparedStatement:
    """A statement of SQLAlchemy's, whatever the database."""

    def __init__(self, statement: Any, columns: Sequence[str] | None = None) -> None:
        """`columns` of an insert or update; an insert's are the table's, less its number, unless it says others."""
        if isinstance(statement, Insert) and columns is None:
            columns = [column.name for column in statement.table.c if column.name != "pk"]
        self._statement = statement
        self._columns = columns
        parts = visitors.iterate(statement)
        tables = (table for part in parts for table in (part, getattr(part, "table", None)))
        self.tables = frozenset(table for table in tables if isinstance(table, Table))
        """Tables that it reads or writes."""
        self._by_dialect: dict[str, CompiledStatement] = {}

    def read(self, db: Connection, **values: Any) -> list[Any]:
        """Read the rows, in the connection's transaction."""
        return self.on(db.dialect).rows(db.connection.cursor(), values)

    def on(self, dialect: Dialect) -> CompiledStatement:
        compiled = self._by_dialect.get(dialect.name)
        if compiled is None:
            compiled = self._by_dialect[dialect.name] = CompiledStatement(self._statement, self._columns, dialect)
        return compiled


def _process(kind: Any, dialect: Dialect, which: str, *more: Any) -> Any:
    """Find what makes a value of a column's type one of the driver's, or the other way; None = nothing does."""
    return getattr(kind.dialect_impl(dialect), which)(dialect, *more)


class Transaction:
    """The writer's view of the database. One at a time, in one thread."""

    def __init__(self, database: Database) -> None:
        self.now = 0.0
        """Unix seconds at the beginning of the transaction."""
        self._database = database
        self._number = 0
        """Number of the transaction, from 1."""
        self._events: list[Event] = []
        self._connection: Connection | None = None
        self._dialect = database.writing.dialect
        self._cursor: Any = None
        """The driver's, in the transaction."""
        self._calls: list[dict[str, Any]] = []
        """Calls that wait for their insert."""
        self._words = LruCache[str, int]()
        self._toolsets = LruCache[bytes, int]()
        self._live: dict[tuple[str, int], LiveAttempt] = {}
        self._fresh: set[tuple[str, int]] = set()
        """Attempts leased here that have no records yet; empty where other servers may write."""
        self._upserts: dict[tuple[str, ...], PreparedStatement] = {}

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Commit what is done inside, or undo all of it."""
        self.now = time.time()
        self._number += 1
        try:
            if self._connection is None:
                self._connection = self._database.writing.connect()
            with self._connection.begin():
                self._cursor = self._connection.connection.cursor()
                yield
                self._flush()
                if self._database.is_shared:
                    self._database.tell(self._connection, self._events)
        except BaseException:
            for memory in (self._calls, self._events, self._words, self._toolsets, self._live, self._fresh):
                memory.clear()
            self.close()
            raise

    def close(self) -> None:
        """Give the connection up; the next `begin` makes a new one."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    def add_event(self, event: Event) -> None:
        self._events.append(event)

    def take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    # ------------------------------------------------------------------ statements

    @property
    def db(self) -> Connection:
        """The connection, with everything done so far visible in it."""
        self._flush()
        assert self._connection is not None
        return self._connection

    def run(self, statement: PreparedStatement, **values: Any) -> int:
        """Run a statement; returns how many rows it changed."""
        self._flush_for(statement)
        return int(statement.on(self._dialect).run(self._cursor, values).rowcount)

    def run_many(self, statement: PreparedStatement, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            statement.on(self._dialect).run_many(self._cursor, rows)

    def rows(self, statement: PreparedStatement, **values: Any) -> list[Any]:
        self._flush_for(statement)
        return statement.on(self._dialect).rows(self._cursor, values)

    def add_call(self, row: dict[str, Any]) -> None:
        """Add a row of `calls`: all of a transaction are one insert."""
        self._calls.append(row)

    def _flush_for(self, statement: PreparedStatement) -> None:
        if self._calls and calls in statement.tables:
            self._flush()

    def _flush(self) -> None:
        if self._calls and self._connection is not None:
            rows, self._calls = self._calls, []
            self.run_many(_INSERT_CALLS, rows)

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

    # ------------------------------------------------------------------ interned texts

    def word(self, text: str) -> int:
        """Intern a text; returns its number."""
        number = self._words.get(text)
        if number is None:
            number = self._interned(words, "text", column_text(text))
            self._words.put(text, number, len(text))
        return number

    def word_or_none(self, text: str | None) -> int | None:
        return None if text is None else self.word(text)

    def toolset_or_none(self, offered: str) -> int | None:
        """Intern the tools that a call was offered; returns their number, None where there are none."""
        if not offered:
            return None
        digest = hashlib.blake2b(clean_text(offered).encode(), digest_size=16).digest()
        number = self._toolsets.get(digest)
        if number is None:
            number = self._toolsets.put(digest, self._interned(toolsets, "digest", digest, body=offered), len(digest))
        return number

    def _interned(self, table: Table, column: str, key: Any, **others: Any) -> int:
        """Find the row of a key, or insert it; returns its number."""
        number = self.db.execute(select(table.c.pk).where(table.c[column] == key)).scalar()
        if number is None:
            statement = insert(table).values({column: key, **others}).returning(table.c.pk)
            number = self.db.execute(statement).scalar_one()
        return int(number)

    # ------------------------------------------------------------------ attempts

    def attempt(self, rollout_id: str, attempt: int) -> Any:
        """Read the attempt's row and its rollout's. Raises UnknownRecord."""
        rows = self.rows(_ATTEMPT, of_id=rollout_id, of_number=as_number(attempt))
        if not rows:
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {attempt}; attempts start with a lease")
        return rows[0]

    def live(self, rollout_id: str, attempt: int, what: str) -> LiveAttempt:
        """Return the running attempt. Raises UnknownRecord, or AttemptOver naming `what` comes too late."""
        live = self._live.get((rollout_id, attempt))
        if live is not None and (not self._database.is_shared or self._is_current(live)):
            return live
        row = self.attempt(rollout_id, attempt)
        if row.outcome is not None:
            raise over(rollout_id, attempt, row.outcome, what)
        live = self._live[rollout_id, attempt] = self._read_live(row)
        live.seen_in = self._number
        return live

    def take_live(self, row: Any) -> LiveAttempt:
        """Return the running attempt of `row`, and remember it no longer. Whatever other servers recorded is in it."""
        live = None if self._database.is_shared else self._live.get((row.rollout_id, row.number))
        live = live or self._read_live(row)
        self.forget(row.rollout_id, row.number)
        return live

    def _read_live(self, row: Any) -> LiveAttempt:
        if (row.rollout_id, row.number) in self._fresh:
            self._fresh.discard((row.rollout_id, row.number))
            return LiveAttempt(row.pk)
        return LiveAttempt.read(self.db, row.pk)

    def _is_current(self, live: LiveAttempt) -> bool:
        """True if no other server has ended the attempt, or recorded calls or tool calls of it."""
        if live.seen_in != self._number:
            standing = [(row.calls, row.tool_calls, row.shown) for row in self.rows(_STANDING, of_pk=live.pk)]
            if standing != [live.standing]:
                return False
            live.seen_in = self._number
        return True

    def begun(self, key_digest: bytes, info: AttemptInfo) -> None:
        """Note that an attempt was leased."""
        if not self._database.is_shared:
            self._fresh.add((info.rollout_id, info.attempt))
        self.add_event(StartEvent(key_digest, info))

    def forget(self, rollout_id: str, attempt: int) -> None:
        self._fresh.discard((rollout_id, attempt))
        self._live.pop((rollout_id, attempt), None)


def over(rollout_id: str, attempt: int, outcome: str, what: str) -> AttemptOver:
    return AttemptOver(
        f"attempt {attempt} of rollout {rollout_id!r} is over ({outcome}); {what} came too late and is not kept"
    )


_INSERT_CALLS = PreparedStatement(insert(calls))
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
WITH_ROLLOUT = select(
    *(attempts.c[name] for name in ("pk", "rollout_pk", "number", "worker_id", "outcome", "expires_at")),
    rollouts.c.id.label("rollout_id"),
    *(rollouts.c[name] for name in ("state", "started", "forgiven", "max_attempts", "branch")),
).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
"""Attempts with what an operation needs of their rollouts."""
_ATTEMPT = PreparedStatement(
    WITH_ROLLOUT.where(rollouts.c.id == bindparam("of_id"), attempts.c.number == bindparam("of_number"))
)
