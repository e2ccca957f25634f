"""Statements compiled once and handed to the database's driver, and the connection of the writer that runs them.

SQLAlchemy's own way of a statement takes ten times as long as what SQLite does with it.

INSERT = PreparedStatement(insert(calls), columns=("id", "idx", …))
WriteConnection(database).run(INSERT, id=…, idx=…)
FOUND = PreparedStatement(select(calls).where(calls.c.attempt_pk.in_(bindparam("pks", expanding=True))))
FOUND.read(connection, pks=[3, 17])
"""

from __future__ import annotations

import hashlib
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Dialect, Insert, Table, bindparam, insert, select
from sqlalchemy.sql import visitors

from lightningrl.sanitize import clean_text
from lightningrl_server.lru import LruCache
from lightningrl_server.store.columns import column_text
from lightningrl_server.store.databases import Database, Event
from lightningrl_server.store.tables import calls, toolsets, words

__all__ = ["CompiledStatement", "PreparedStatement", "WriteConnection"]


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
            (
                name if binds[name].required else None,
                _process(binds[name].type, dialect, "bind_processor"),
                binds[name].value,
            )
            for name in self._names
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
            cursor.execute(self._text, self._bound(values))
        elif not (wanted := values[self._list]):
            return []
        else:
            marks = ", ".join([self._mark] * len(wanted))
            cursor.execute(self._text.replace(f"__[POSTCOMPILE_{self._list}]", marks), wanted)
        readers = self._readers
        if readers is None:
            kinds = zip(self._selected, cursor.description, strict=True)
            processes = [
                _process(column.type, self._dialect, "result_processor", described[1]) for column, described in kinds
            ]
            readers = self._readers = [
                (place, process) for place, process in enumerate(processes) if process is not None
            ]
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
    """A statement of SQLAlchemy's, whatever the database. `columns`: those that an insert or update is given."""

    def __init__(self, statement: Any, columns: Sequence[str] | None = None) -> None:
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


class WriteConnection:
    """The writer's connection: runs statements, collects calls for one insert, interns words.

    What it remembers is a copy of what is committed or about to be: a rollback empties it.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_shared = database.is_shared
        self.now = 0.0
        """Unix seconds at the beginning of the transaction."""
        self.number = 0
        """Number of the transaction, from 1."""
        self._events: list[Event] = []
        self._connection: Connection | None = None
        self._dialect = database.writing.dialect
        self._cursor: Any = None
        """The driver's, in the transaction."""
        self._calls: list[dict[str, Any]] = []
        self._words = LruCache[str, int]()
        self._toolsets = LruCache[bytes, int]()
        self._upserts: dict[tuple[str, ...], PreparedStatement] = {}

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Commit what is done inside, or undo all of it."""
        self.now = time.time()
        self.number += 1
        try:
            if self._connection is None:
                self._connection = self.database.writing.connect()
            with self._connection.begin():
                self._cursor = self._connection.connection.cursor()
                yield
                self.flush()
                if self.database.peers is not None:
                    self.database.peers.tell(self._connection, self._events)
        except BaseException:
            self.forget_all()
            self.close()
            raise

    def forget_all(self) -> None:
        """Forget what was not committed."""
        self._calls.clear()
        self._events.clear()
        self._words.clear()
        self._toolsets.clear()

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
        """Run a statement; returns how many rows it changed."""
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

    def add_call(self, row: dict[str, Any]) -> None:
        self._calls.append(row)

    def replace(self, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows; where the primary key is taken, the new values stand."""
        if not rows:
            return
        place = table.name, *rows[0]
        prepared = self._upserts.get(place)
        if prepared is None:
            statement = self.database.insert(table)
            keys = [column.name for column in table.primary_key]
            others = {name: statement.excluded[name] for name in rows[0] if name not in keys}
            statement = statement.on_conflict_do_update(index_elements=keys, set_=others)
            prepared = self._upserts[place] = PreparedStatement(statement, columns=tuple(rows[0]))
        self.run_many(prepared, rows)

    def word(self, text: str) -> int:
        """Intern a text; returns its number."""
        number = self._words.get(text)
        if number is None:
            clean = column_text(text)
            number = self.db.execute(_WORD, {"text": clean}).scalar()
            if number is None:
                number = self.db.execute(insert(words).values(text=clean).returning(words.c.pk)).scalar_one()
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
            number = self.db.execute(_TOOLSET, {"digest": digest}).scalar()
            if number is None:
                statement = insert(toolsets).values(digest=digest, body=offered).returning(toolsets.c.pk)
                number = self.db.execute(statement).scalar_one()
            self._toolsets.put(digest, number, len(digest))
        return number


_INSERT_CALLS = PreparedStatement(insert(calls), columns=[column.name for column in calls.c if column.name != "pk"])
_WORD = select(words.c.pk).where(words.c.text == bindparam("text"))
_TOOLSET = select(toolsets.c.pk).where(toolsets.c.digest == bindparam("digest"))
