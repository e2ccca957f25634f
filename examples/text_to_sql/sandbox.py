"""Run a query that a model wrote: read-only, with a time limit, never raising for what the query itself does wrong."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

__all__ = ["Result", "connect", "run_query", "run_query_on"]

MAX_ROWS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The rows a query gave, or the sentence SQLite refused it with."""

    rows: tuple[tuple[object, ...], ...] = ()
    error: str | None = None

    def __str__(self) -> str:
        """What the model is shown: the error, or how many rows and the first three."""
        if self.error is not None:
            return f"error: {self.error}"
        if not self.rows:
            return "no rows"
        shown = "; ".join(" ".join(_literal(value) for value in row[:4]) for row in self.rows[:3])
        return f"{len(self.rows)} rows: {shown}"


def _literal(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, str):
        return f"'{value[:40]}'"
    return "null" if value is None else str(value)[:40]


def connect(db_path: str | Path) -> sqlite3.Connection:
    """Open a database file that the connection cannot change. Raises `FileNotFoundError` if there is none."""
    if not Path(db_path).is_file():
        raise FileNotFoundError(f"no database file {str(db_path)!r}; build the data with `python data.py`")
    connection = sqlite3.connect(f"file:{quote(str(db_path))}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def run_query_on(connection: sqlite3.Connection, query: str, time_limit_s: float = 2.0) -> Result:
    deadline = time.monotonic() + time_limit_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    try:
        cursor = connection.execute(query)
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return Result(error=str(error))
    finally:
        connection.set_progress_handler(None, 0)
    if len(rows) > MAX_ROWS:
        return Result(error=f"more than {MAX_ROWS} rows")
    return Result(rows=tuple(rows))


def run_query(db_path: str | Path, query: str, time_limit_s: float = 2.0) -> Result:
    connection = connect(db_path)
    try:
        return run_query_on(connection, query, time_limit_s)
    finally:
        connection.close()
