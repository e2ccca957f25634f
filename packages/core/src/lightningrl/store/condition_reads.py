"""The store as a whole, at a cost that does not grow with it: where it stands, and what its newest attempts and calls say.

neighbours rollouts before and after one
position   the newest step, attempt and call: three ends of indexes, so that it can be asked every second
condition  states and outcomes of all rollouts; versions, workers, failures, refused calls and left threads of the newest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Integer, cast, func, select

from lightningrl.store.condition import (
    Condition,
    FailureCount,
    LeftThreadCount,
    Neighbours,
    Position,
    RefusalCount,
    RunningLease,
    ServedVersion,
    WorkerCount,
)
from lightningrl.store.reads import Reader
from lightningrl.store.schema import attempts, calls, other_calls, rollouts, steps
from lightningrl.types import OtherCallKind, Outcome, RolloutState

__all__ = ["read_condition", "read_neighbours", "read_position"]

_NEWEST: Final = 1000
"""Rows of attempts, calls and other calls that a condition is told from."""
_MOST_NAMES: Final = 50
"""Of threads."""


_POSITION: Final = select(
    *(
        query.scalar_subquery()
        for query in (
            *(select(func.max(column)) for column in (steps.c.step, attempts.c.pk, calls.c.pk)),
            select(func.count()).select_from(attempts).where(attempts.c.outcome.is_(None)),
        )
    )
)


def read_position(_: Reader, db: Connection, after: int = 0) -> Position:
    """`after`: steps later than it are listed."""
    step, attempt, call, running = db.execute(_POSITION).one()
    if (step or 0) <= after:
        return Position(step=step or 0, attempt=attempt or 0, call=call or 0, running=running, later_steps=())
    later = db.execute(select(steps.c.step).where(steps.c.step > after).order_by(steps.c.step).limit(_NEWEST)).scalars()
    return Position(step=step, attempt=attempt or 0, call=call or 0, running=running, later_steps=tuple(later))


def read_condition(reader: Reader, db: Connection) -> Condition:
    tries = db.execute(
        select(
            rollouts.c.id,
            attempts.c.worker_id,
            attempts.c.outcome,
            attempts.c.started_at,
            attempts.c.ended_at,
            attempts.c.left_threads,
        )
        .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
        .order_by(attempts.c.pk.desc())
        .limit(_NEWEST)
    ).all()
    states = db.execute(select(rollouts.c.state, func.count()).group_by(rollouts.c.state)).all()
    outcomes = db.execute(
        select(rollouts.c.outcome, func.count()).where(rollouts.c.outcome.is_not(None)).group_by(rollouts.c.outcome)
    ).all()
    return Condition(
        states=dict(states),
        outcomes=dict(outcomes),
        attempts_read=len(tries),
        versions=_versions(reader, db),
        workers=_workers(tries),
        leases=_leases(db),
        failures=_failures(db, tries),
        refusals=_refusals(db),
        left_threads=_left_threads(tries),
    )


def read_neighbours(_: Reader, db: Connection, rollout_id: str) -> Neighbours:
    pk = rollouts.c.pk
    here = select(pk).where(rollouts.c.id == rollout_id).scalar_subquery()
    before, after = (select(rollouts.c.id).where(pk < here).order_by(pk.desc()), select(rollouts.c.id).where(pk > here).order_by(pk))
    failed = rollouts.c.state == RolloutState.FAILED
    found = [db.execute(query.limit(1)).scalar_one_or_none() for query in (before, after, before.where(failed), after.where(failed))]
    return Neighbours(before=found[0], after=found[1], failed_before=found[2], failed_after=found[3])


def _versions(reader: Reader, db: Connection) -> tuple[ServedVersion, ...]:
    newest = select(calls.c.policy, calls.c.policy_version, calls.c.trainable).order_by(calls.c.pk.desc()).limit(_NEWEST).subquery()
    rows = db.execute(
        select(
            newest.c.policy,
            newest.c.policy_version,
            func.count().label("calls"),
            func.max(cast(newest.c.trainable, Integer)).label("trainable"),
        )
        .group_by(newest.c.policy, newest.c.policy_version)
        .order_by(newest.c.policy, newest.c.policy_version.desc())
    )
    return tuple(
        ServedVersion(policy=reader.text(db, row.policy), version=row.policy_version, calls=row.calls, trainable=bool(row.trainable))
        for row in rows
    )


def _workers(tries: Sequence[Any]) -> tuple[WorkerCount, ...]:
    names = dict.fromkeys(row.worker_id.partition("/")[0] for row in tries)
    found = []
    for name in names:
        own = [row for row in tries if row.worker_id.partition("/")[0] == name]
        found.append(
            WorkerCount(
                worker_id=name,
                attempts=len(own),
                running=sum(row.outcome is None for row in own),
                failed=sum(row.outcome not in (None, Outcome.SUCCEEDED) for row in own),
                last_seen=max(row.ended_at or row.started_at for row in own),
            )
        )
    return tuple(found)


def _leases(db: Connection) -> tuple[RunningLease, ...]:
    rows = db.execute(
        select(rollouts.c.id, attempts.c.number, attempts.c.worker_id, attempts.c.started_at, attempts.c.expires_at)
        .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
        .where(attempts.c.outcome.is_(None))
        .order_by(attempts.c.pk)
        .limit(_NEWEST)
    )
    return tuple(
        RunningLease(rollout_id=row.id, attempt=row.number, worker_id=row.worker_id, started_at=row.started_at, expires_at=row.expires_at)
        for row in rows
    )


def _failures(db: Connection, tries: Sequence[Any]) -> tuple[FailureCount, ...]:
    """Of attempts, the newest of each kind as its example."""
    counts = Counter(row.outcome for row in tries if row.outcome not in (None, Outcome.SUCCEEDED))
    found = []
    for outcome, count in counts.most_common():
        row = db.execute(
            select(rollouts.c.id, attempts.c.error)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(attempts.c.outcome == outcome)
            .order_by(attempts.c.pk.desc())
            .limit(1)
        ).one()
        found.append(FailureCount(outcome=outcome, count=count, rollout_id=row.id, error=row.error or ""))
    return tuple(found)


def _left_threads(tries: Sequence[Any]) -> tuple[LeftThreadCount, ...]:
    """By name, the newest of each as its example."""
    counts = Counter(name for row in tries for name in row.left_threads).most_common(_MOST_NAMES)
    newest = {name: row.id for row in reversed(tries) for name in row.left_threads}
    return tuple(LeftThreadCount(name=name, count=count, rollout_id=newest[name]) for name, count in counts)


def _refusals(db: Connection) -> tuple[RefusalCount, ...]:
    """By code, the newest of each as its example."""
    newest = select(other_calls.c.pk, other_calls.c.kind, other_calls.c.code).order_by(other_calls.c.pk.desc()).limit(_NEWEST).subquery()
    rows = db.execute(
        select(newest.c.code, func.count().label("calls"), func.max(newest.c.pk).label("pk"))
        .where(newest.c.kind == OtherCallKind.REFUSED)
        .group_by(newest.c.code)
        .order_by(func.count().desc())
    ).all()
    found = []
    for row in rows:
        example = db.execute(
            select(rollouts.c.id, other_calls.c.message, other_calls.c.status)
            .join(attempts, attempts.c.pk == other_calls.c.attempt_pk)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(other_calls.c.pk == row.pk)
        ).one()
        found.append(
            RefusalCount(code=row.code or "", status=example.status, count=row.calls, rollout_id=example.id, message=example.message or "")
        )
    return tuple(found)
