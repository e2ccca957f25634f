"""Run a query that a model wrote: it reads and does nothing else, in bounded time and memory, and never raises for what
is wrong with it.

`run_query` runs it here (an agent, in its worker), `QueryProcess` in a process of its own (a reward, in the trainer's).
"""

from __future__ import annotations

import atexit
import json
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

__all__ = ["QueryProcess", "Result", "connect", "run_query", "run_query_on"]

MAX_ROWS = 2000
MAX_SIZE = 10_000_000
"""Characters and bytes of all rows."""
MAX_HEAP = 64_000_000
"""Bytes that SQLite may use."""
MAX_MEMORY = 2_000_000_000
"""Bytes of address space of a `QueryProcess`."""
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
REFUSED = {"format", "load_extension", "printf"}
"""Functions: `printf('%.*c', 900000000, 'x')` counts to the end, whatever the limits say."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 200_000,  # of a value: what one function does with one value cannot be interrupted
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}


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


def check_file(db_path: str | Path) -> None:
    if not Path(db_path).is_file():
        raise FileNotFoundError(f"no database file {str(db_path)!r}; build the data with `python data.py`")


def connect(db_path: str | Path) -> sqlite3.Connection:
    """Open a database file that the connection cannot change. Raises `FileNotFoundError` if there is none."""
    check_file(db_path)
    connection = sqlite3.connect(f"file:{quote(str(db_path))}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    return connection


def authorise(action: int, first: str | None, second: str | None, database: str | None, cause: str | None) -> int:
    is_allowed = action in ALLOWED and not (action == sqlite3.SQLITE_FUNCTION and second in REFUSED)
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def run_query_on(connection: sqlite3.Connection, query: str, time_limit_s: float = 2.0) -> Result:
    deadline = time.monotonic() + time_limit_s
    connection.execute(f"PRAGMA hard_heap_limit = {MAX_HEAP}")  # of all SQLite in this process
    connection.execute("PRAGMA temp_store = memory")  # no temporary files
    limits = {name: connection.setlimit(name, value) for name, value in LIMITS.items()}
    connection.set_authorizer(authorise)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 200)
    rows: list[tuple[object, ...]] = []
    size = 0
    try:
        for row in connection.execute(query):
            rows.append(row)
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if len(rows) > MAX_ROWS or size > MAX_SIZE:
                return Result(
                    error=f"more than {MAX_ROWS} rows" if len(rows) > MAX_ROWS else f"more than {MAX_SIZE} bytes"
                )
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return Result(error=str(error))
    except MemoryError:
        return Result(error="out of memory")
    finally:
        connection.set_progress_handler(None, 0)
        connection.set_authorizer(None)
        for name, value in limits.items():
            connection.setlimit(name, value)
    return Result(rows=tuple(rows))


def run_query(db_path: str | Path, query: str, time_limit_s: float = 2.0) -> Result:
    connection = connect(db_path)
    try:
        return run_query_on(connection, query, time_limit_s)
    finally:
        connection.close()


class QueryProcess:
    """Runs queries in a process of its own: nothing that a query does can stop or fill the one that asks. Safe to use
    from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def run(self, db_path: str | Path, query: str, time_limit_s: float = 2.0) -> Result:
        """As `run_query`; a query that the process did not survive is an error. Raises `FileNotFoundError` for a
        missing database."""
        check_file(db_path)
        with self._lock:
            answer = self._ask(json.dumps([str(db_path), query, time_limit_s]))
            if not answer:
                self._end()
                return Result(error="too much time or memory")
        said = json.loads(answer, object_hook=lambda blob: bytes.fromhex(blob["hex"]))
        return Result(error=said[0], rows=tuple(map(tuple, said[1])))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _ask(self, question: str) -> str:
        if self._process is None:
            command = [sys.executable, "-I", str(Path(__file__).resolve())]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(question + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except OSError:  # it is gone
            return ""

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def answer_queries() -> None:
    """The process: one JSON line for each. It dies of a query that takes far too long, or more memory than all of it
    may."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    for line in sys.stdin:
        db_path, query, time_limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s + 1.0)
        result = run_query(db_path, query, time_limit_s)
        print(json.dumps([result.error, result.rows], default=lambda blob: {"hex": blob.hex()}), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


if __name__ == "__main__":
    answer_queries()
