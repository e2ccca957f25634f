"""A scratch database between reading a source and making a run of it, so that memory is bounded by one rollout and a
killed import goes on.

items      every record, by its trace        histories   digest of a call's history, for traces that go on from others
done       files read, rollouts made         links       a trace ─► the trace that it goes on from
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from lightningrl_traces.records import Call, Ending, LogRecord, Span, ToolRun, TraceRecord

__all__ = ["Spool"]

_KINDS: Final = {kind.__name__: kind for kind in (Span, LogRecord, Call, ToolRun, Ending)}
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS items (seq INTEGER PRIMARY KEY, trace TEXT NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS items_trace ON items (trace);
CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS histories (digest BLOB NOT NULL, trace TEXT NOT NULL, ended REAL NOT NULL);
CREATE INDEX IF NOT EXISTS histories_digest ON histories (digest);
CREATE TABLE IF NOT EXISTS wanted (trace TEXT PRIMARY KEY, digest BLOB NOT NULL, started REAL NOT NULL);
CREATE TABLE IF NOT EXISTS links (trace TEXT PRIMARY KEY, root TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS grades (rollout TEXT PRIMARY KEY, seq INTEGER, lines TEXT NOT NULL, facts TEXT NOT NULL);
"""
_PACKED_FROM: Final = 500


class Spool:
    """The scratch database of an import. Each method that writes commits, but `add`, for which `commit` does."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -32768")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def get(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM done WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO done VALUES (?, ?)", (key, value))

    def add_all(self, records: Sequence[TraceRecord], key: str, value: str) -> None:
        """Keep records, and how far that is, in one commit."""
        rows = [(record.trace_id, type(record).__name__, _pack(record)) for record in records]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO items (trace, kind, body) VALUES (?, ?, ?)", rows)
        self.put(key, value)
        self._db.execute("COMMIT")

    def traces(self) -> Iterator[str]:
        """Traces in the order of their first record."""
        for row in self._db.execute("SELECT trace FROM items GROUP BY trace ORDER BY min(seq)"):
            yield str(row[0])

    def records(self, traces: Sequence[str]) -> Iterator[TraceRecord]:
        for trace in traces:
            for kind, body in self._db.execute("SELECT kind, body FROM items WHERE trace = ? ORDER BY seq", (trace,)):
                yield _unpack(kind, body)

    def add_histories(
        self, trace: str, calls: Sequence[tuple[bytes, float]], wanted: tuple[bytes, float] | None
    ) -> None:
        """Keep what a trace's calls say, and what its first call goes on from."""
        self._db.executemany(
            "INSERT INTO histories VALUES (?, ?, ?)", [(digest, trace, ended) for digest, ended in calls]
        )
        if wanted is not None:
            self._db.execute("INSERT OR REPLACE INTO wanted VALUES (?, ?, ?)", (trace, *wanted))

    def is_told_before(self, digest: bytes, traces: Sequence[str]) -> bool:
        """True where a trace that came before these has a call with the same messages and answer."""
        rows = self._db.execute("SELECT trace FROM histories WHERE digest = ? ORDER BY rowid LIMIT 1", (digest,))
        first = rows.fetchone()
        return first is not None and str(first[0]) not in traces

    def begin(self) -> None:
        self._db.execute("BEGIN")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def forget_links(self) -> None:
        for table in ("histories", "wanted", "links"):
            self._db.execute(f"DELETE FROM {table}")  # noqa: S608  (names of ours)

    def link(self) -> None:
        """Give each trace its root: the first of those that go on from each other."""
        self._db.execute("BEGIN")
        for trace, digest, started in self._db.execute("SELECT trace, digest, started FROM wanted").fetchall():
            before = self._db.execute(
                "SELECT trace FROM histories WHERE digest = ? AND trace != ? "
                "ORDER BY ended > ?, CASE WHEN ended > ? THEN ended ELSE -ended END LIMIT 1",
                (digest, trace, started, started),
            ).fetchone()
            if before is not None and self._root(str(before[0])) != trace:
                self._db.execute("INSERT OR REPLACE INTO links VALUES (?, ?)", (trace, before[0]))
        self._db.execute("COMMIT")

    def _root(self, trace: str) -> str:
        seen = {trace}
        while (row := self._db.execute("SELECT root FROM links WHERE trace = ?", (trace,)).fetchone()) is not None:
            trace = str(row[0])
            if trace in seen:
                break
            seen.add(trace)
        return trace

    def rollouts(self) -> Iterator[tuple[str, list[str]]]:
        """Each root, with the traces that are one rollout with it."""
        members: dict[str, list[str]] = {}
        for row in self._db.execute("SELECT trace FROM links ORDER BY rowid").fetchall():
            members.setdefault(self._root(str(row[0])), []).append(str(row[0]))
        linked = {trace for traces in members.values() for trace in traces}
        for trace in self.traces():
            if trace not in linked:
                yield trace, [trace, *members.get(trace, ())]

    def add_grades(self, rollout: str, lines: str, facts: dict[str, Any]) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO grades SELECT ?, coalesce(max(seq), 0) + 1, ?, ? FROM grades",
            (rollout, lines, msgspec.json.encode(facts).decode()),
        )

    def is_graded(self, rollout: str) -> bool:
        return self._db.execute("SELECT 1 FROM grades WHERE rollout = ?", (rollout,)).fetchone() is not None

    def grades(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Lines of `grades.jsonl` and facts, rollout by rollout."""
        for lines, facts in self._db.execute("SELECT lines, facts FROM grades ORDER BY seq"):
            yield str(lines), msgspec.json.decode(facts)


def _pack(record: TraceRecord) -> bytes:
    body = msgspec.json.encode(record)
    return b"z" + zlib.compress(body, 1) if len(body) >= _PACKED_FROM else b"p" + body


def _unpack(kind: str, body: bytes) -> TraceRecord:
    plain = zlib.decompress(body[1:]) if body[:1] == b"z" else body[1:]
    return cast("TraceRecord", msgspec.json.decode(plain, type=_KINDS[kind]))
