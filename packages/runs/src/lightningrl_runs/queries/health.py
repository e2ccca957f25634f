"""A run's health, at a cost that does not grow with the run.

position   the newest step, attempt and call: three ends of indexes, so that it can be asked every second
health     states and outcomes of all rollouts; versions, workers, failures, refusals and left threads of the newest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Integer, cast, func, select

from lightningrl.types import OtherCallKind, Outcome, RolloutState
from lightningrl_server.store.tables import attempts, calls, other_calls, rollouts, steps, words

__all__ = ["Health", "Incidents", "Position", "RunningLease", "read_health", "read_position"]

_NEWEST: Final = 1000
"""Rows of attempts, calls and other calls that health is read from."""
_MOST_NAMES: Final = 50
"""Names of threads that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Progress of a store. Its numbers only grow, but for steps that a resumed run takes back."""

    step: int
    """The last that finished; 0 = none."""
    attempt: int
    """Number of the newest lease in this store."""
    call: int
    """Number of the newest call in this store."""
    running: int
    """Attempts that run now."""
    later_steps: tuple[int, ...]
    """Finished steps after the one that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """Calls of one version of a policy, among the newest."""

    policy: str
    version: int
    calls: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCount:
    """A worker's share of the newest attempts."""

    worker_id: str
    attempts: int
    running: int
    failed: int
    last_seen: float
    """Unix seconds: when an attempt of it began or ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningLease:
    """An attempt that has not ended: a worker's, or nobody's since a run was killed."""

    rollout_id: str
    attempt: int
    worker_id: str
    started_at: float
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incidents:
    """Incidents of one kind, with the newest of them as the example."""

    name: str
    count: int
    rollout_id: str
    text: str = ""
    """Error or message of the example."""
    status: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """A store as a whole: all rollouts by state and outcome, and the newest attempts, calls and refusals."""

    states: Mapping[RolloutState, int]
    outcomes: Mapping[Outcome, int]
    """Finished rollouts by outcome."""
    attempts_read: int
    """Attempts that workers, failures and left threads are counted over."""
    versions: tuple[ServedVersion, ...]
    workers: tuple[WorkerCount, ...]
    leases: tuple[RunningLease, ...]
    failures: tuple[Incidents, ...]
    """Attempts, by outcome."""
    refusals: tuple[Incidents, ...]
    """Calls that the gateway refused, by code."""
    left_threads: tuple[Incidents, ...]
    """Threads that attempts left running, by name."""


def read_position(db: Connection, after: int = 0) -> Position:
    """Read how far the store has come, with the steps later than `after`."""
    step, attempt, call, running = db.execute(_POSITION).one()
    later: tuple[int, ...] = ()
    if (step or 0) > after:
        newer = select(steps.c.step).where(steps.c.step > after).order_by(steps.c.step).limit(_NEWEST)
        later = tuple(db.execute(newer).scalars())
    return Position(step=step or 0, attempt=attempt or 0, call=call or 0, running=running, later_steps=later)


def read_health(db: Connection) -> Health:
    columns = attempts.c.worker_id, attempts.c.outcome, attempts.c.started_at, attempts.c.ended_at
    tries = db.execute(
        select(rollouts.c.id, *columns, attempts.c.left_threads)
        .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
        .order_by(attempts.c.pk.desc())
        .limit(_NEWEST)
    ).all()
    state, outcome = rollouts.c.state, rollouts.c.outcome
    return Health(
        states=dict(db.execute(select(state, func.count()).group_by(state)).all()),
        outcomes=dict(db.execute(select(outcome, func.count()).where(outcome.is_not(None)).group_by(outcome)).all()),
        attempts_read=len(tries),
        versions=_versions(db),
        workers=_workers(tries),
        leases=_leases(db),
        failures=_failures(db, tries),
        refusals=_refusals(db),
        left_threads=_left_threads(tries),
    )


def _versions(db: Connection) -> tuple[ServedVersion, ...]:
    columns = calls.c.policy, calls.c.policy_version, calls.c.trainable
    newest = select(*columns).order_by(calls.c.pk.desc()).limit(_NEWEST).subquery()
    is_trainable = func.max(cast(newest.c.trainable, Integer)).label("trainable")
    rows = db.execute(
        select(words.c.text, newest.c.policy_version, func.count().label("calls"), is_trainable)
        .join(words, words.c.pk == newest.c.policy)
        .group_by(newest.c.policy, words.c.text, newest.c.policy_version)
        .order_by(newest.c.policy, newest.c.policy_version.desc())
    )
    return tuple(
        ServedVersion(policy=row.text, version=row.policy_version, calls=row.calls, trainable=bool(row.trainable))
        for row in rows
    )


def _workers(tries: Sequence[Any]) -> tuple[WorkerCount, ...]:
    by_name: dict[str, list[Any]] = {}
    for row in tries:
        by_name.setdefault(row.worker_id.partition("/")[0], []).append(row)
    return tuple(
        WorkerCount(
            worker_id=name,
            attempts=len(own),
            running=sum(row.outcome is None for row in own),
            failed=sum(row.outcome not in (None, Outcome.SUCCEEDED) for row in own),
            last_seen=max(row.ended_at or row.started_at for row in own),
        )
        for name, own in by_name.items()
    )


def _leases(db: Connection) -> tuple[RunningLease, ...]:
    rows = db.execute(
        select(
            rollouts.c.id.label("rollout_id"),
            attempts.c.number.label("attempt"),
            attempts.c.worker_id,
            attempts.c.started_at,
            attempts.c.expires_at,
        )
        .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
        .where(attempts.c.outcome.is_(None))
        .order_by(attempts.c.pk)
        .limit(_NEWEST)
    )
    return tuple(RunningLease(**row._mapping) for row in rows)


def _failures(db: Connection, tries: Sequence[Any]) -> tuple[Incidents, ...]:
    counts = Counter(row.outcome for row in tries if row.outcome not in (None, Outcome.SUCCEEDED))
    failures = []
    for outcome, count in counts.most_common():
        row = db.execute(
            select(rollouts.c.id, attempts.c.error)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(attempts.c.outcome == outcome)
            .order_by(attempts.c.pk.desc())
            .limit(1)
        ).one()
        failures.append(Incidents(name=outcome, count=count, rollout_id=row.id, text=row.error or ""))
    return tuple(failures)


def _left_threads(tries: Sequence[Any]) -> tuple[Incidents, ...]:
    counts = Counter(name for row in tries for name in row.left_threads).most_common(_MOST_NAMES)
    newest = {name: row.id for row in reversed(tries) for name in row.left_threads}
    return tuple(Incidents(name=name, count=count, rollout_id=newest[name]) for name, count in counts)


def _refusals(db: Connection) -> tuple[Incidents, ...]:
    columns = other_calls.c.pk, other_calls.c.kind, other_calls.c.code
    newest = select(*columns).order_by(other_calls.c.pk.desc()).limit(_NEWEST).subquery()
    by_code = db.execute(
        select(newest.c.code, func.count().label("calls"), func.max(newest.c.pk).label("pk"))
        .where(newest.c.kind == OtherCallKind.REFUSED)
        .group_by(newest.c.code)
        .order_by(func.count().desc())
    ).all()
    refusals = []
    for row in by_code:
        rollout_id, text, status = db.execute(
            select(rollouts.c.id, other_calls.c.message, other_calls.c.status)
            .join(attempts, attempts.c.pk == other_calls.c.attempt_pk)
            .join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
            .where(other_calls.c.pk == row.pk)
        ).one()
        refusals.append(
            Incidents(name=row.code or "", count=row.calls, rollout_id=rollout_id, text=text or "", status=status)
        )
    return tuple(refusals)


_RUNNING = select(func.count()).select_from(attempts).where(attempts.c.outcome.is_(None))
_ENDS = [select(func.max(column)) for column in (steps.c.step, attempts.c.pk, calls.c.pk)]
_POSITION: Final = select(*(query.scalar_subquery() for query in (*_ENDS, _RUNNING)))
