"""A scratch database between reading a source and making a run of it, so that memory is bounded by one rollout and a
killed import goes on.

items      every record, by its trace        histories   digest of a call's history, for traces that go on from others
done       files read, rollouts made         links       a trace ─► the first of those that it goes on from
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
CREATE TABLE IF NOT EXISTS grades (rollout TEXT PRIMARY KEY, seq INTEGER, lines TEXT NOT NULL, facts TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS grades_seq ON grades (seq);
"""
_PACKED_FROM: Final = 500
_BATCH: Final = 500
_BYTES: Final = 4 * 2**20
"""Records, and their bytes, that are kept in one commit."""
_PAGE: Final = 1000


class Spool:
    """The scratch database of an import. Each method that writes commits, but `add`, for which `commit` does."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -8192")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def get(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM done WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO done VALUES (?, ?)", (key, value))

    def add_all(self, records: Iterable[TraceRecord], key: str, done: int) -> None:
        """Keep records, and how many of a file are kept, in commits of bounded size. `done`: those kept before."""
        rows: list[tuple[str, str, int, bytes]] = []
        held = 0
        for record in records:
            row = _row(record)
            rows.append(row)
            held += len(row[3])
            if len(rows) == _BATCH or held > _BYTES:
                done += len(rows)
                self._add(rows, key, done)
                rows, held = [], 0
        self._add(rows, key, done + len(rows))

    def _add(self, rows: Sequence[tuple[str, str, int, bytes]], key: str, done: int) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO items (trace, kind, size, body) VALUES (?, ?, ?, ?)", rows)
        self.put(key, str(done))
        self._db.execute("COMMIT")

    def size(self, traces: Sequence[str]) -> int:
        """Bytes of the records of traces."""
        sizes = [
            self._db.execute("SELECT coalesce(sum(size), 0) FROM items WHERE trace = ?", (trace,)).fetchone()[0]
            for trace in traces
        ]
        return sum(sizes)

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
        for trace, digest, started in self._pages("SELECT rowid, trace, digest, started FROM wanted"):
            before = self._db.execute(
                "SELECT trace FROM histories WHERE digest = ? AND trace != ? "
                "ORDER BY ended > ?, CASE WHEN ended > ? THEN ended ELSE -ended END LIMIT 1",
                (digest, trace, started, started),
            ).fetchone()
            if before is not None and (root := self._root(str(before[0]))) != trace:
                self._db.execute("INSERT OR REPLACE INTO links VALUES (?, ?)", (trace, root))
        for trace, root in self._pages("SELECT rowid, trace, root FROM links"):  # roots may have got roots since
            if (first := self._root(root)) != root:
                self._db.execute("UPDATE links SET root = ? WHERE trace = ?", (first, trace))
        self._db.execute("COMMIT")

    def _pages(self, query: str) -> Iterator[Any]:
        """Rows of a query whose first column is the rowid, without it, in its order, as their table is changed."""
        last = 0
        while rows := self._db.execute(f"{query} WHERE rowid > ? ORDER BY rowid LIMIT {_PAGE}", (last,)).fetchall():
            last = rows[-1][0]
            yield from (row[1:] for row in rows)

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
        linked = "SELECT 1 FROM links WHERE trace = ?"
        members = "SELECT trace FROM links WHERE root = ? AND trace != root ORDER BY rowid"
        for trace in self.traces():
            if self._db.execute(linked, (trace,)).fetchone() is None:
                yield trace, [trace, *(str(row[0]) for row in self._db.execute(members, (trace,)))]

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


def _row(record: TraceRecord) -> tuple[str, str, int, bytes]:
    body = msgspec.json.encode(record)
    packed = b"z" + zlib.compress(body, 1) if len(body) >= _PACKED_FROM else b"p" + body
    return record.trace_id, type(record).__name__, len(body), packed


def _unpack(kind: str, body: bytes) -> TraceRecord:
    plain = zlib.decompress(body[1:]) if body[:1] == b"z" else body[1:]
    return cast("TraceRecord", msgspec.json.decode(plain, type=_KINDS[kind]))
