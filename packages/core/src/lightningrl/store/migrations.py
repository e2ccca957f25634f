"""What makes a store of an older version one of the next; runs in the transaction of its opening.

Each is written for the tables as they were then, not as `lightningrl.store.schema` has them now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from sqlalchemy import Connection

from lightningrl.store.codec import decode_text, encode_text

__all__ = ["MIGRATIONS"]


def _seed_of_its_own(db: Connection) -> None:
    db.exec_driver_sql("ALTER TABLE calls ADD COLUMN seed TEXT")


def _other_calls(db: Connection) -> None:
    """Columns are called as the fields they hold; refused and forwarded calls, which were kept as tool calls, have a table."""
    for old, new in (("version", "policy_version"), ("finish", "finish_reason"), ("span", "span_id")):
        db.exec_driver_sql(f"ALTER TABLE calls RENAME COLUMN {old} TO {new}")
    db.exec_driver_sql(
        "CREATE TABLE other_calls (pk INTEGER NOT NULL PRIMARY KEY, attempt_pk INTEGER NOT NULL REFERENCES attempts (pk), "
        "kind VARCHAR(9) NOT NULL, path TEXT NOT NULL, model TEXT NOT NULL, agent INTEGER, status INTEGER, code TEXT, message BLOB, "
        "request BLOB, answer BLOB, started_at FLOAT NOT NULL, duration_s FLOAT NOT NULL)"
    )
    db.exec_driver_sql("CREATE INDEX ix_other_calls_attempt_pk ON other_calls (attempt_pk)")
    kept = db.exec_driver_sql(
        "SELECT t.pk, t.attempt_pk, w.text, t.arguments, t.result, t.agent, t.error_type, t.started_at, t.duration_s "
        "FROM tool_calls t JOIN words w ON w.pk = t.name WHERE w.text LIKE 'refused:%' OR w.text LIKE 'upstream:%'"
    ).all()
    for pk, attempt_pk, name, arguments, result, agent, code, started_at, duration_s in kept:
        kind, _, model = name.partition(":")
        asked, answered = json.loads(decode_text(arguments)), json.loads(decode_text(result))
        is_refused = kind == "refused"
        db.exec_driver_sql(
            "INSERT INTO other_calls "
            "(attempt_pk, kind, path, model, agent, status, code, message, request, answer, started_at, duration_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                attempt_pk,
                "refused" if is_refused else "forwarded",
                str(asked.get("path", "")).removeprefix("/"),
                "" if is_refused else model,
                agent,
                answered.get("status"),
                code,
                encode_text(answered.get("message")),
                None if is_refused else encode_text(json.dumps(asked.get("request"))),
                None if is_refused else encode_text(json.dumps(answered.get("answer"))),
                started_at,
                duration_s,
            ),
        )
        db.exec_driver_sql("DELETE FROM tool_calls WHERE pk = ?", (pk,))


def _computed_values(db: Connection) -> None:
    """What a run computed has a table of its own. Until now it lay among what agents reported, and nobody can tell which is which: of an
    attempt that was scored it is kept as both, and without a digest, so that re-scoring computes it again."""
    for name, columns in (
        ("computed", "idx INTEGER NOT NULL, name INTEGER NOT NULL, value FLOAT, PRIMARY KEY (attempt_pk, idx, name)"),
        ("digests", "part INTEGER NOT NULL, digest INTEGER NOT NULL, PRIMARY KEY (attempt_pk, part)"),
    ):
        db.exec_driver_sql(f"CREATE TABLE {name} (attempt_pk INTEGER NOT NULL REFERENCES attempts (pk), {columns}) WITHOUT ROWID")
    db.exec_driver_sql(
        "INSERT INTO computed (attempt_pk, idx, name, value) "
        "SELECT attempt_pk, idx, name, value FROM rewards WHERE attempt_pk IN (SELECT attempt_pk FROM scores)"
    )
    db.exec_driver_sql("ALTER TABLE scores ADD COLUMN unrewarded TEXT")
    db.exec_driver_sql("CREATE TABLE evidence (attempt_pk INTEGER NOT NULL PRIMARY KEY REFERENCES attempts (pk), data BLOB NOT NULL)")


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {1: _seed_of_its_own, 2: _other_calls, 3: _computed_values}
"""By version."""
