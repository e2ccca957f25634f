"""Statements of every rollout, compiled once and handed to the database's driver: SQLAlchemy's own way of one takes ten times as long as
what SQLite does with it.

INSERT = PreparedStatement(insert(calls), columns=("id", "idx", …))
INSERT.on(dialect).run(cursor, {"id": …, "idx": …})
FOUND = PreparedStatement(select(calls).where(calls.c.attempt_pk.in_(bindparam("pks", expanding=True))))
FOUND.read(connection, pks=[3, 17])
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Dialect, Insert, Table
from sqlalchemy.sql import visitors

__all__ = ["CompiledStatement", "PreparedStatement"]


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
            raise TypeError(f"a statement with the list {self._list!r} has other values, too: {self._names}; ask SQLAlchemy's own way")
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
        """By column; None = it has not been asked yet, and only the first answer says what the driver's types are."""

    def run(self, cursor: Any, values: Mapping[str, Any]) -> Any:
        """The cursor, for its `rowcount`."""
        return cursor.execute(self._text, self._bound(values))

    def run_many(self, cursor: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        cursor.executemany(self._text, [self._bound(row) for row in rows])

    def rows(self, cursor: Any, values: Mapping[str, Any]) -> list[Any]:
        """With an attribute for each column."""
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
            processes = [_process(column.type, self._dialect, "result_processor", told[1]) for column, told in kinds]
            readers = self._readers = [(place, process) for place, process in enumerate(processes) if process is not None]
        found = []
        for row in cursor.fetchall():
            values_ = list(row)
            for place, process in readers:
                values_[place] = process(values_[place])
            found.append(self._make_row(values_))
        return found

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
        named = (table for part in visitors.iterate(statement) for table in (part, getattr(part, "table", None)))
        self.tables = frozenset(table for table in named if isinstance(table, Table))
        """Those that it reads or writes."""
        self._by_dialect: dict[str, CompiledStatement] = {}

    def read(self, db: Connection, **values: Any) -> list[Any]:
        """The rows, in the connection's transaction."""
        return self.on(db.dialect).rows(db.connection.cursor(), values)

    def on(self, dialect: Dialect) -> CompiledStatement:
        known = self._by_dialect.get(dialect.name)
        if known is None:
            known = self._by_dialect[dialect.name] = CompiledStatement(self._statement, self._columns, dialect)
        return known


def _process(kind: Any, dialect: Dialect, which: str, *more: Any) -> Any:
    """What makes a value of a column's type one of the driver's, or the other way; None = nothing does."""
    return getattr(kind.dialect_impl(dialect), which)(dialect, *more)
