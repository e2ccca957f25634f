"""Looking at a store: rollouts as they stand, and totals; `trajectories` reads what is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from lightningrl.records import AttemptRecord, RolloutFilter, RolloutRecord, StoreCounts
from lightningrl.types import RolloutSpec
from lightningrl_server.store.columns import decode_output
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.reader import STEP, Reader, chunks, decode_task, same_columns
from lightningrl_server.store.tables import attempts, calls, rollouts, scores, tasks, trained
from lightningrl_server.store.trajectories import read_trajectories
from lightningrl_server.store.writer import StorePart, reading

__all__ = ["SqlLook"]


def _read_rollout(_: Reader, db: Connection, rollout_id: str) -> RolloutRecord:
    records = _read_rollouts(db, [rollouts.c.id == rollout_id], 1, 0)
    if not records:
        raise UnknownRecord(f"no rollout {rollout_id!r}; {_near(db, rollout_id)}")
    return records[0]


def _near(db: Connection, rollout_id: str) -> str:
    """Name rollouts beside one that does not exist, in their order."""
    ids = rollouts.c.id
    below = db.execute(select(ids).where(ids < rollout_id).order_by(ids.desc()).limit(2)).scalars().all()
    above = db.execute(select(ids).where(ids > rollout_id).order_by(ids).limit(2)).scalars().all()
    near = ", ".join(map(repr, (*reversed(below), *above)))
    return f"near it are {near}" if near else "there is none yet"


def _list_rollouts(
    _: Reader,
    db: Connection,
    where: RolloutFilter = RolloutFilter(),  # noqa: B008
) -> tuple[RolloutRecord, ...]:
    wanted = {
        rollouts.c.state: where.state,
        rollouts.c.outcome: where.outcome,
        rollouts.c.mode: where.mode,
        STEP: where.step,
        rollouts.c.group_id: where.group_id,
        tasks.c.task_id: where.task_id,
    }
    conditions = [column == value for column, value in wanted.items() if value is not None]
    return _read_rollouts(db, conditions, where.limit, where.offset)


def _read_rollouts(
    db: Connection, where: Sequence[ColumnElement[bool]], limit: int, offset: int
) -> tuple[RolloutRecord, ...]:
    rows = db.execute(_ROLLOUTS.where(*where).order_by(rollouts.c.pk.desc()).limit(limit).offset(offset)).all()
    tries: dict[int, list[AttemptRecord]] = defaultdict(list)
    for pks in chunks([row.pk for row in rows]):
        for row in db.execute(_TRIES.where(attempts.c.rollout_pk.in_(pks)).order_by(attempts.c.number)):
            tries[row.rollout_pk].append(_attempt_record(row))
    return tuple(
        RolloutRecord(
            spec=RolloutSpec(task=decode_task(row.body), **same_columns(row, RolloutSpec, but=("task",))),
            state=row.state,
            outcome=row.outcome,
            attempts=tuple(tries[row.pk]),
            reward=row.reward,
            trained_step=row.trained_step,
            created_at=row.created_at,
        )
        for row in rows
    )


def _attempt_record(row: Any) -> AttemptRecord:
    return AttemptRecord(
        attempt=row.number,
        output=decode_output(row.output),
        error=row.error or None,
        **same_columns(row, AttemptRecord, but=("attempt", "output", "error")),
    )


def _read_counts(db: Connection, late: int) -> StoreCounts:
    state, outcome = rollouts.c.state, rollouts.c.outcome
    states = db.execute(select(state, func.count()).group_by(state)).all()
    outcomes = db.execute(select(outcome, func.count()).where(outcome.is_not(None)).group_by(outcome)).all()
    total, breaks = db.execute(select(func.count(), func.count().filter(calls.c.is_break)).select_from(calls)).one()
    return StoreCounts(
        states=dict(states),
        outcomes=dict(outcomes),
        attempts=db.execute(select(func.count()).select_from(attempts)).scalar_one(),
        calls=total,
        breaks=breaks,
        late=late,
    )


class SqlLook(StorePart):
    """`lightningrl_server.store.protocol.Look`, but for what call log and ledger read."""

    rollout = reading(_read_rollout)
    list_rollouts = reading(_list_rollouts)
    trajectories = reading(read_trajectories)

    async def counts(self) -> StoreCounts:
        return await self.read(lambda db: _read_counts(db, self._late))


_deciding = attempts.alias("deciding")
_ROLLOUTS = (
    select(rollouts, tasks.c.body, trained.c.step.label("trained_step"), scores.c.reward)
    .join(tasks, tasks.c.pk == rollouts.c.task_pk)
    .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .outerjoin(_deciding, (_deciding.c.rollout_pk == rollouts.c.pk) & (_deciding.c.number == rollouts.c.deciding))
    .outerjoin(scores, scores.c.attempt_pk == _deciding.c.pk)
)
_count = select(func.count()).select_from(calls).where(calls.c.attempt_pk == attempts.c.pk).scalar_subquery()
_TRIES = select(attempts, _count.label("calls"))
