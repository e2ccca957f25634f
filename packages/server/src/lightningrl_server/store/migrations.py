"""Changes that make a store of an older version one of the next; they run in the transaction of its opening.

Each is written for the tables as they were then, not as `lightningrl_server.store.schema` has them now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    insert,
    text,
)

from lightningrl.types import ToolStatus
from lightningrl_server.store.codec import decode_span, decode_text, encode_text
from lightningrl_server.store.dialects import CLUSTERED
from lightningrl_server.store.participants import Participants, SpanNode

__all__ = ["MIGRATIONS"]


def _seed_of_its_own(db: Connection) -> None:
    db.execute(text("ALTER TABLE calls ADD COLUMN seed TEXT"))


def _other_calls(db: Connection) -> None:
    """Columns are called as the fields they hold; refused and forwarded calls, which were kept as tool calls, have a table."""
    for old, new in (("version", "policy_version"), ("finish", "finish_reason"), ("span", "span_id")):
        db.execute(text(f"ALTER TABLE calls RENAME COLUMN {old} TO {new}"))
    texts, blobs = ("path", "model", "code"), ("message", "request", "answer")
    other_calls = _of_attempts(
        "other_calls",
        Column("pk", Integer, primary_key=True),
        Column("attempt_pk", ForeignKey("attempts.pk"), nullable=False, index=True),
        Column("kind", String(9), nullable=False),
        *(Column(name, Text, nullable=name == "code") for name in texts),
        *(Column(name, Integer) for name in ("agent", "status")),
        *(Column(name, LargeBinary) for name in blobs),
        *(Column(name, Float, nullable=False) for name in ("started_at", "duration_s")),
    )
    other_calls.create(db)
    kept = db.execute(
        text(
            "SELECT t.pk, t.attempt_pk, w.text, t.arguments, t.result, t.agent, t.error_type, t.started_at, t.duration_s "
            "FROM tool_calls t JOIN words w ON w.pk = t.name WHERE w.text LIKE 'refused:%' OR w.text LIKE 'upstream:%'"
        )
    ).all()
    for pk, attempt_pk, name, arguments, result, agent, code, started_at, duration_s in kept:
        kind, _, model = name.partition(":")
        asked, answered = json.loads(decode_text(arguments)), json.loads(decode_text(result))
        is_refused = kind == "refused"
        row = {
            "attempt_pk": attempt_pk,
            "kind": "refused" if is_refused else "forwarded",
            "path": str(asked.get("path", "")).removeprefix("/"),
            "model": "" if is_refused else model,
            "agent": agent,
            "status": answered.get("status"),
            "code": code,
            "message": encode_text(answered.get("message")),
            "request": None if is_refused else encode_text(json.dumps(asked.get("request"))),
            "answer": None if is_refused else encode_text(json.dumps(answered.get("answer"))),
            "started_at": started_at,
            "duration_s": duration_s,
        }
        db.execute(insert(other_calls).values(row))
        db.execute(text("DELETE FROM tool_calls WHERE pk = :pk"), {"pk": pk})


def _computed_values(db: Connection) -> None:
    """What a run computed has a table of its own. Until now it lay among what agents reported, and nobody can tell which is which: of an
    attempt that was scored it is kept as both, and without a digest, so that re-scoring computes it again."""

    def attempt() -> Column[int]:
        return Column("attempt_pk", ForeignKey("attempts.pk"), primary_key=True, autoincrement=False)

    index, name, part = (Column(key, Integer, primary_key=True, autoincrement=False) for key in ("idx", "name", "part"))
    _of_attempts("computed", attempt(), index, name, Column("value", Float), **CLUSTERED).create(db)
    _of_attempts("digests", attempt(), part, Column("digest", Integer, nullable=False), **CLUSTERED).create(db)
    _of_attempts("evidence", attempt(), Column("data", LargeBinary, nullable=False)).create(db)
    db.execute(
        text(
            "INSERT INTO computed (attempt_pk, idx, name, value) "
            "SELECT attempt_pk, idx, name, value FROM rewards WHERE attempt_pk IN (SELECT attempt_pk FROM scores)"
        )
    )
    db.execute(text("ALTER TABLE scores ADD COLUMN unrewarded TEXT"))


def _branches(db: Connection) -> None:
    db.execute(text("ALTER TABLE rollouts ADD COLUMN branch TEXT"))
    db.execute(text("ALTER TABLE calls ADD COLUMN replayed_from TEXT"))


def _participants(db: Connection) -> None:
    """Who takes part in a rollout stands beside it. The indices by which it was looked for had a row for each call."""
    for column in ("roles", "tools", "failed_tools"):
        db.execute(text(f"ALTER TABLE rollouts ADD COLUMN {column} TEXT"))
    for index in ("calls_agent", "tool_calls_name"):
        db.execute(text(f"DROP INDEX IF EXISTS {index}"))

    def of_rollouts(columns: str) -> Any:
        joined = "JOIN attempts a ON a.pk = x.attempt_pk JOIN rollouts r ON r.pk = a.rollout_pk AND r.deciding = a.number"
        return db.execute(text(f"SELECT r.pk, {columns} x {joined}"))

    found: dict[int, Participants] = {}
    for (pk,) in db.execute(text("SELECT pk FROM rollouts WHERE deciding IS NOT NULL")):
        found[pk] = Participants()
    for pk, agent, span in of_rollouts("x.agent, x.span_id FROM calls"):
        found[pk].callers.add((agent, decode_span(span)))
    for pk, name, status in of_rollouts("x.name, x.status FROM tool_calls"):
        found[pk].add_tool(name, ToolStatus(status))
    for pk, span, parent, agent in of_rollouts("x.span, x.parent, x.agent FROM spans"):
        found[pk].tree[str(decode_span(span))] = SpanNode(decode_span(parent), agent)
    rows = [{"rollout": pk, **one.columns()} for pk, one in found.items()]
    if rows:
        change = "UPDATE rollouts SET roles = :roles, tools = :tools, failed_tools = :failed_tools WHERE pk = :rollout"
        db.execute(text(change), rows)


def _toolsets(db: Connection) -> None:
    """Which tools a call was offered; of those that are kept, nobody knows."""
    body = Column("body", LargeBinary, nullable=False)
    digest = Column("digest", LargeBinary, nullable=False, unique=True)
    Table("toolsets", MetaData(), Column("pk", Integer, primary_key=True), digest, body).create(db)
    db.execute(text("ALTER TABLE calls ADD COLUMN toolset INTEGER"))


def _left_threads(db: Connection) -> None:
    """Threads that outlived an attempt stand beside it. They were kept among its other calls, which they are none of."""
    db.execute(text("ALTER TABLE attempts ADD COLUMN left_threads TEXT"))
    rows = db.execute(text("SELECT attempt_pk, path FROM other_calls WHERE kind = 'left_behind' ORDER BY attempt_pk, pk")).all()
    for pk, found in groupby(rows, key=lambda row: row.attempt_pk):
        names = json.dumps([row.path for row in found])
        db.execute(text("UPDATE attempts SET left_threads = :names WHERE pk = :pk"), {"names": names, "pk": pk})
    db.execute(text("DELETE FROM other_calls WHERE kind = 'left_behind'"))


def _contradictions(db: Connection) -> None:
    """Counts of what was said of a tool call, or of an attempt's end, and was not so. Of what is kept nobody counted."""
    db.execute(text("ALTER TABLE tool_calls ADD COLUMN contradicted INTEGER NOT NULL DEFAULT 0"))
    db.execute(text("ALTER TABLE attempts ADD COLUMN results_refused INTEGER NOT NULL DEFAULT 0"))


def _fitting_patterns(db: Connection) -> None:
    """Patterns of rules that a call's system message fits. Of calls that are kept, nobody looked."""
    db.execute(text("ALTER TABLE calls ADD COLUMN fits TEXT"))


def _of_attempts(name: str, *columns: Column[Any], **options: Any) -> Table:
    """A new table whose rows are attempts'."""
    then = MetaData()
    Table("attempts", then, Column("pk", Integer, primary_key=True))
    return Table(name, then, *columns, **options)


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {
    1: _seed_of_its_own,
    2: _other_calls,
    3: _computed_values,
    4: _branches,
    5: _participants,
    6: _toolsets,
    7: _left_threads,
    8: _contradictions,
    9: _fitting_patterns,
}
"""By version."""
