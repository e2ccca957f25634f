"""Lines of a table of rollouts, ordered, a page at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, case, func, select
from sqlalchemy.sql import ColumnElement

from lightningrl.types import OtherCallKind, Outcome, RolloutMode, RolloutState
from lightningrl_runs.queries.rollout_index import MODES, OUTCOMES, STATES, RolloutIndex
from lightningrl_runs.queries.rollout_query import DECIDING, RolloutQuery, choose, group_variances
from lightningrl_server.store.columns import decode_output
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.reader import chunks, decode_task
from lightningrl_server.store.tables import attempts, calls, other_calls, rollouts, tasks

__all__ = ["IMPORT", "Neighbours", "RolloutRow", "Sort", "count_calls", "list_rows", "read_neighbours"]

K = TypeVar("K")
IMPORT: Final = "import"
"""Worker of imported rollouts."""
LONGEST_READ: Final = 2**16
"""Bytes of an output or error, as it is stored, that a list of rollouts reads."""
_is_long = (func.length(attempts.c.output) > LONGEST_READ) | (func.length(attempts.c.error) > LONGEST_READ)


class Sort(StrEnum):
    """The order of rollouts: what comes first."""

    DISAGREE = "disagree"
    """The groups whose rewards differ most, each group together."""
    TASK = "task"
    """The tasks with the least reward, each task's rollouts together."""
    NEWEST = "newest"
    WORST = "worst"
    BEST = "best"
    SLOWEST = "slowest"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """A line of a table of rollouts."""

    id: str
    group_id: str
    task_id: str
    input: Any
    mode: RolloutMode
    step: int
    state: RolloutState
    outcome: Outcome | None
    reward: float | None
    spread: float | None
    """Standard deviation of the group's rewards; None = fewer than two have one."""
    calls: int
    attempts: int
    duration_s: float | None
    """Seconds that the deciding attempt took."""
    answer: Any = None
    """The task's reference answer."""
    output: Any = None
    """The deciding attempt's; None = there is none yet, or it is long."""
    error: str | None = None
    """The deciding attempt's; None as above."""
    is_long: bool = False
    """Output or error is longer than a list reads (`LONGEST_READ`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours(Generic[K]):
    """Rollouts or calls around one, in the order in which they were asked for. None = there is none."""

    before: K | None
    after: K | None
    failed_before: K | None
    failed_after: K | None


def list_rows(
    index: RolloutIndex,
    db: Connection,
    query: RolloutQuery,
    sort: Sort = Sort.DISAGREE,
    after: str | None = None,
    limit: int = 100,
) -> tuple[RolloutRow, ...]:
    """List the rollouts that come after the rollout `after`; None = from the first. Raises UnknownRecord where there is
    none of that name."""
    variances = group_variances(index)
    places = _order(index, sort, variances)
    if after is not None:
        places = places[_place(index, db, after, places) + 1 :]
    places = places[choose(index, db, query, variances)[places]][:limit]
    counted = index.rows[places]
    heads = {row.pk: row for row in db.execute(_HEADS.where(rollouts.c.pk.in_(counted["pk"].tolist())))}
    attempt_pks = [row.attempt_pk for row in heads.values() if row.attempt_pk is not None]
    counts = _count_calls(db, attempt_pks)
    lines = []
    for own in counted:
        row, variance = heads[int(own["pk"])], float(variances[own["group"]])
        task = decode_task(row.body)
        lines.append(
            RolloutRow(
                id=row.id,
                group_id=row.group_id,
                task_id=task.id,
                input=task.input,
                mode=MODES[own["mode"]],
                step=int(own["step"]),
                state=STATES[own["state"]],
                outcome=None if own["outcome"] < 0 else OUTCOMES[own["outcome"]],
                reward=None if math.isnan(own["reward"]) else float(own["reward"]),
                spread=None if math.isnan(variance) else math.sqrt(max(0.0, variance)),
                calls=counts.get(row.attempt_pk, 0),
                attempts=row.started,
                duration_s=None if own["duration"] < 0 else float(own["duration"]),
                answer=task.answer,
                output=decode_output(row.output),
                error=row.error or None,
                is_long=bool(row.is_long),
            )
        )
    return tuple(lines)


def count_calls(db: Connection, rollout_ids: Sequence[str]) -> dict[str, int]:
    """Count the calls of rollouts by id, those of the deciding attempt, also those that providers answered."""
    heads = select(rollouts.c.id, attempts.c.pk).select_from(rollouts.join(attempts, DECIDING))
    pks = {row.pk: row.id for ids in chunks(rollout_ids) for row in db.execute(heads.where(rollouts.c.id.in_(ids)))}
    return {pks[pk]: count for pk, count in _count_calls(db, list(pks)).items()}


def _count_calls(db: Connection, pks: Sequence[int]) -> dict[int, int]:
    """Count them by attempt. Of an imported one all are forwarded; some are there a second time, with their tokens."""
    counts = dict.fromkeys(pks, 0)
    imported = select(attempts.c.pk).where(attempts.c.worker_id == IMPORT)
    for table, which in (
        (calls, calls.c.attempt_pk.not_in(imported)),
        (other_calls, other_calls.c.kind == OtherCallKind.FORWARDED),
    ):
        made = select(table.c.attempt_pk, func.count().label("number")).where(which).group_by(table.c.attempt_pk)
        for some in chunks(pks):
            for row in db.execute(made.where(table.c.attempt_pk.in_(some))):
                counts[row.attempt_pk] += row.number
    return counts


def read_neighbours(db: Connection, rollout_id: str) -> Neighbours[str]:
    pk, ids = rollouts.c.pk, select(rollouts.c.id)
    here = select(pk).where(rollouts.c.id == rollout_id).scalar_subquery()
    before, after = ids.where(pk < here).order_by(pk.desc()), ids.where(pk > here).order_by(pk)
    is_failed = rollouts.c.state == RolloutState.FAILED
    queries = before, after, before.where(is_failed), after.where(is_failed)
    names = [db.execute(query.limit(1)).scalar_one_or_none() for query in queries]
    return Neighbours(before=names[0], after=names[1], failed_before=names[2], failed_after=names[3])


def _order(index: RolloutIndex, sort: Sort, variances: NDArray[np.float64]) -> NDArray[np.int64]:
    """The places of all rollouts. The least is first of what `lexsort` gets, and its last key counts most."""
    rows = index.rows
    newest, reward = -rows["pk"], rows["reward"]
    match sort:
        case Sort.DISAGREE:
            spread = np.nan_to_num(variances, nan=-1.0)[rows["group"]]
            return np.lexsort((rows["pk"], -index.group_ranks[rows["group"]], -spread))
        case Sort.TASK:
            rewarded = rows[~np.isnan(reward)]
            size = len(index.tasks)
            total, count = (
                np.bincount(rewarded["task"], weights, size) for weights in (rewarded["reward"], np.ones(len(rewarded)))
            )
            mean = np.where(count > 0, total / np.maximum(1, count), np.inf)
            return np.lexsort((newest, rows["task"], mean[rows["task"]]))
        case Sort.NEWEST:
            return np.argsort(newest)
        case Sort.WORST:
            return np.lexsort((newest, reward))  # nan is last
        case Sort.BEST:
            return np.lexsort((newest, -reward))
        case Sort.SLOWEST:
            return np.lexsort((newest, -rows["duration"]))


def _place(index: RolloutIndex, db: Connection, rollout_id: str, places: NDArray[np.int64]) -> int:
    """Position of a rollout within `places`."""
    pk = db.execute(select(rollouts.c.pk).where(rollouts.c.id == rollout_id)).scalar()
    positions = () if pk is None else np.flatnonzero(index.rows["pk"][places] == pk).tolist()
    if not positions:
        raise UnknownRecord(f"no rollout {rollout_id[:100]!r} to go on from; begin with the first page")
    return int(positions[0])


def _if_short(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((func.length(column) <= LONGEST_READ, column)).label(str(column.key))


_HEADS: Final = (
    select(rollouts.c.pk, rollouts.c.id, rollouts.c.group_id, rollouts.c.started, tasks.c.body)
    .add_columns(attempts.c.pk.label("attempt_pk"), _if_short(attempts.c.output), _if_short(attempts.c.error))
    .add_columns(_is_long.label("is_long"))
    .select_from(rollouts.join(tasks, tasks.c.pk == rollouts.c.task_pk).outerjoin(attempts, DECIDING))
)
