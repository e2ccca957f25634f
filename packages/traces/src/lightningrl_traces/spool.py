"""A scratch database between reading a source and making a run of it, so that memory is bounded by one rollout and a
killed import goes on.

items       every record, by its trace         wanted   the history that a trace's first call goes on from
histories   what the calls of traces say       links    a trace ─► an earlier one of those that go on from each other
done        files read, by name                grades   rollouts made, with what is written and counted of them
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from lightningrl_traces.records import Call, Ending, LogRecord, Span, ToolRun, TraceRecord

__all__ = ["Spool"]

_KINDS: Final = {kind.__name__: kind for kind in (Span, LogRecord, Call, ToolRun, Ending)}
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS items
    (seq INTEGER PRIMARY KEY, trace TEXT NOT NULL, kind TEXT NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS items_trace ON items (trace);
CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS histories (digest BLOB NOT NULL, trace TEXT NOT NULL, ended REAL NOT NULL);
CREATE INDEX IF NOT EXISTS histories_digest ON histories (digest);
CREATE TABLE IF NOT EXISTS wanted (trace TEXT PRIMARY KEY, digest BLOB NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS links (trace TEXT PRIMARY KEY, root TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS links_root ON links (root);
CREATE TABLE IF NOT EXISTS grades (rollout TEXT PRIMARY KEY, lines TEXT NOT NULL, facts TEXT NOT NULL);
"""
_BATCH: Final = 100
"""Records that are kept in one commit."""


class Spool:
    """The scratch database of an import. What is written stays once `commit` is called; `add_all` calls it itself."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -8192")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def commit(self) -> None:
        self._db.commit()

    def get(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM done WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO done VALUES (?, ?)", (key, value))

    def add_all(self, records: Iterable[TraceRecord], key: str, done: int) -> None:
        """Keep records, and how many of a file are kept, in the end "all". `done`: those kept before."""
        for number, record in enumerate(records, done + 1):
            body = msgspec.json.encode(record)
            row = (record.trace_id, type(record).__name__, len(body), zlib.compress(body, 1))
            self._db.execute("INSERT INTO items (trace, kind, size, body) VALUES (?, ?, ?, ?)", row)
            if number % _BATCH == 0:
                self.put(key, str(number))
                self.commit()
        self.put(key, "all")
        self.commit()

    def size(self, traces: Sequence[str]) -> int:
        """Bytes of the records of traces."""
        query = "SELECT coalesce(sum(size), 0) FROM items WHERE trace = ?"
        return sum(self._db.execute(query, (trace,)).fetchone()[0] for trace in traces)

    def traces(self) -> Iterator[str]:
        """Traces in the order of their first record."""
        for row in self._db.execute("SELECT trace FROM items GROUP BY trace ORDER BY min(seq)"):
            yield str(row[0])

    def records(self, traces: Sequence[str]) -> Iterator[TraceRecord]:
        for trace in traces:
            for kind, body in self._db.execute("SELECT kind, body FROM items WHERE trace = ? ORDER BY seq", (trace,)):
                yield cast("TraceRecord", msgspec.json.decode(zlib.decompress(body), type=_KINDS[kind]))

    def add_histories(
        self, trace: str, calls: Sequence[tuple[bytes, float]], wanted: tuple[bytes, float] | None
    ) -> None:
        """Keep what a trace's calls say, and what its first call goes on from, each with its time."""
        rows = [(digest, trace, ended) for digest, ended in calls]
        self._db.executemany("INSERT INTO histories VALUES (?, ?, ?)", rows)
        if wanted is not None:
            self._db.execute("INSERT INTO wanted VALUES (?, ?, ?)", (trace, *wanted))

    def is_told_before(self, digest: bytes, traces: Sequence[str]) -> bool:
        """True where a trace that came before these has a call with the same messages and answer."""
        rows = self._db.execute("SELECT trace FROM histories WHERE digest = ? ORDER BY rowid LIMIT 1", (digest,))
        first = rows.fetchone()
        return first is not None and str(first[0]) not in traces

    def link(self) -> None:
        """Link each trace to the one that it goes on from, or to one before that: none leads back to itself."""
        for trace, digest, started in self._db.execute("SELECT trace, digest, started FROM wanted ORDER BY rowid"):
            before = self._db.execute(
                "SELECT trace FROM histories WHERE digest = ? AND trace != ? "
                "ORDER BY ended > ?, CASE WHEN ended > ? THEN ended ELSE -ended END LIMIT 1",
                (digest, trace, started, started),
            ).fetchone()
            if before is not None and (root := self._root(str(before[0]))) != trace:
                self._db.execute("INSERT INTO links VALUES (?, ?)", (trace, root))

    def _root(self, trace: str) -> str:
        while (row := self._db.execute("SELECT root FROM links WHERE trace = ?", (trace,)).fetchone()) is not None:
            trace = str(row[0])
        return trace

    def rollouts(self) -> Iterator[list[str]]:
        """Traces that are one rollout, that which goes on from none first."""
        is_linked = "SELECT 1 FROM links WHERE trace = ?"
        members = (
            "WITH RECURSIVE member(trace) AS (VALUES (?) UNION ALL "
            "SELECT links.trace FROM links JOIN member ON links.root = member.trace) SELECT trace FROM member"
        )
        for trace in self.traces():
            if self._db.execute(is_linked, (trace,)).fetchone() is None:
                yield [str(row[0]) for row in self._db.execute(members, (trace,))]

    def add_grades(self, rollout: str, lines: str, facts: dict[str, Any]) -> None:
        row = (rollout, lines, msgspec.json.encode(facts).decode())
        self._db.execute("INSERT OR REPLACE INTO grades VALUES (?, ?, ?)", row)

    def is_graded(self, rollout: str) -> bool:
        return self._db.execute("SELECT 1 FROM grades WHERE rollout = ?", (rollout,)).fetchone() is not None

    def grades(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Lines of `grades.jsonl` and facts, rollout by rollout."""
        for lines, facts in self._db.execute("SELECT lines, facts FROM grades ORDER BY rowid"):
            yield str(lines), msgspec.json.decode(facts)
