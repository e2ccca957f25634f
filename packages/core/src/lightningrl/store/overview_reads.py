"""The queries of `lightningrl.store.overview`. What is counted over rollouts is in the census, and what is asked of their calls is in an
index: none reads a row of tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Table, TextClause, case, func, select, text
from sqlalchemy.sql import ColumnElement

from lightningrl.store.census import MODES, OUTCOMES, STATES, Census
from lightningrl.store.codec import decode_output
from lightningrl.store.errors import UnknownRecord
from lightningrl.store.overview import Cell, FacetCount, Mark, Part, RewardValues, RolloutQuery, RolloutRow, Sort, StepReward, ToolCount
from lightningrl.store.participants import NOBODY, words_in
from lightningrl.store.reads import STEP, Reader, decode_task
from lightningrl.store.schema import attempts, calls, other_calls, rollouts, tasks, tool_calls, trained, words
from lightningrl.types import OtherCallKind, RolloutMode

__all__ = ["cells", "cut_calls", "list_rows", "part_counts", "reward_values", "step_rewards", "task_counts", "tool_counts"]

Mask: TypeAlias = NDArray[np.bool_]
"""Whether a rollout is meant, by its place in the census."""

_MOST_VALUES: Final = 8
_DECIDING = (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding)
_IS_CUT = text("finish_reason = 'length'")
"""As its index says it: a bound value would not find it."""
_IS_BREAK = text("CAST(is_break AS INTEGER) = 1")
_EQUAL: Final = 1e-12
"""Variance of rewards that differ by rounding."""
LONGEST_READ: Final = 2**16
"""Bytes of an output, as it is kept, that a list of rollouts reads."""
_is_long = (func.length(attempts.c.output) > LONGEST_READ) | (func.length(attempts.c.error) > LONGEST_READ)


def list_rows(
    census: Census,
    _: Reader,
    db: Connection,
    query: RolloutQuery,
    sort: Sort = Sort.DISAGREE,
    after: str | None = None,
    limit: int = 100,
) -> tuple[RolloutRow, ...]:
    variances = _variances(census)
    places = _order(census, sort, variances)
    if after is not None:
        places = places[_place(census, db, after, places) + 1 :]
    places = places[_chosen(census, db, query, variances)[places]][:limit]
    counted = census.rows[places]
    found = {
        row.pk: row
        for row in db.execute(
            select(rollouts.c.pk, rollouts.c.id, rollouts.c.group_id, rollouts.c.started, attempts.c.pk.label("attempt_pk"), tasks.c.body)
            .add_columns(_if_short(attempts.c.output), _if_short(attempts.c.error), _is_long.label("is_long"))
            .select_from(rollouts.join(tasks, tasks.c.pk == rollouts.c.task_pk).outerjoin(attempts, _DECIDING))
            .where(rollouts.c.pk.in_(counted["pk"].tolist()))
        )
    }
    of = [row.attempt_pk for row in found.values() if row.attempt_pk is not None]
    made = select(calls.c.attempt_pk, func.count().label("number")).where(calls.c.attempt_pk.in_(of)).group_by(calls.c.attempt_pk)
    counts = {row.attempt_pk: row.number for row in db.execute(made)}
    lines = []
    for own in counted:
        row, variance = found[int(own["pk"])], float(variances[own["group"]])
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
                reward=_number(own["reward"]),
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


def cells(census: Census, _: Reader, db: Connection, query: RolloutQuery, edges: Sequence[float] = ()) -> tuple[Cell, ...]:
    rows = census.rows[_chosen(census, db, query)]
    rewards = rows["reward"]
    bins = np.where(np.isnan(rewards), -1, np.searchsorted(np.array(edges, np.float64), rewards, side="right"))
    kinds, which = _kinds(rows["step"], rows["mode"], rows["state"], rows["outcome"], bins)
    counts, totals = np.bincount(which), np.bincount(which, np.nan_to_num(rewards))
    return tuple(
        Cell(
            step=step,
            mode=MODES[mode],
            state=STATES[state],
            outcome=None if outcome < 0 else OUTCOMES[outcome],
            bin=None if place < 0 else place,
            count=count,
            total=total,
        )
        for (step, mode, state, outcome, place), count, total in zip(kinds.tolist(), counts.tolist(), totals.tolist(), strict=True)
    )


def task_counts(census: Census, _: Reader, db: Connection, query: RolloutQuery, limit: int = 20) -> tuple[FacetCount, ...]:
    rows = census.rows[_chosen(census, db, query)]
    has_reward = ~np.isnan(rows["reward"])
    number = np.bincount(rows["task"], minlength=len(census.tasks))
    rewarded = np.bincount(rows["task"][has_reward], minlength=len(census.tasks))
    total = np.bincount(rows["task"][has_reward], rows["reward"][has_reward], minlength=len(census.tasks))
    names = list(census.tasks)
    found = [
        FacetCount(value=names[task], count=int(number[task]), reward=float(total[task] / rewarded[task]) if rewarded[task] else None)
        for task in np.flatnonzero(number).tolist()
    ]
    found.sort(key=lambda one: (one.reward is None, one.reward or 0.0, -one.count, one.value))
    return tuple(found[:limit])


def part_counts(census: Census, reader: Reader, db: Connection, part: Part, limit: int = 20) -> tuple[FacetCount, ...]:
    number = np.bincount(census.rows["roles" if part is Part.ROLE else "tools"], minlength=len(census.lists)).tolist()
    counts: Counter[int] = Counter()
    for listed, place in census.lists.items():
        for word in words_in(listed or ""):
            counts[word] += number[place]
    return tuple(
        FacetCount(value=None if word == NOBODY else reader.word(db, word), count=count) for word, count in (+counts).most_common(limit)
    )


def reward_values(census: Census, _: Reader, db: Connection) -> RewardValues:
    known = census.rows["reward"]
    found = np.unique(known[~np.isnan(known)])
    is_all = len(found) <= _MOST_VALUES
    return RewardValues(values=tuple((found if is_all else found[[0, -1]]).tolist()), is_all=is_all)


def step_rewards(census: Census, _: Reader, db: Connection) -> tuple[StepReward, ...]:
    rows = census.rows[_counts_in_groups(census)]
    groups, of_group = _kinds(rows["step"], rows["mode"], rows["group"])
    size, total = np.bincount(of_group), np.bincount(of_group, rows["reward"])
    mean = total / np.maximum(1, size)
    steps, of_step = _kinds(groups[:, 0], groups[:, 1])
    count, sums, number = np.bincount(of_step, size), np.bincount(of_step, total), np.bincount(of_step)
    variance = np.bincount(of_step, mean * mean) / number - (np.bincount(of_step, mean) / number) ** 2
    return tuple(
        StepReward(
            step=step,
            mode=MODES[mode],
            count=int(count[place]),
            mean=float(sums[place] / count[place]),
            groups=int(number[place]),
            variance=max(0.0, float(variance[place])),
        )
        for place, (step, mode) in enumerate(steps.tolist())
    )


def tool_counts(_: Census, reader: Reader, db: Connection) -> tuple[ToolCount, ...]:
    rows = db.execute(
        select(tool_calls.c.name, tool_calls.c.status, func.count().label("number")).group_by(tool_calls.c.name, tool_calls.c.status)
    )
    return tuple(ToolCount(name=reader.text(db, row.name), status=row.status, count=row.number) for row in rows.all())


def cut_calls(_: Census, __: Reader, db: Connection) -> dict[int, int]:
    cut = select(calls.c.attempt_pk, func.count().label("number")).where(_IS_CUT).group_by(calls.c.attempt_pk).cte("cut")
    rows = db.execute(
        select(STEP.label("shown_step"), func.sum(cut.c.number).label("number"))
        .select_from(
            cut.join(attempts, attempts.c.pk == cut.c.attempt_pk)
            .join(rollouts, (rollouts.c.pk == attempts.c.rollout_pk) & (rollouts.c.deciding == attempts.c.number))
            .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
        )
        .where(rollouts.c.mode == RolloutMode.TRAIN)
        .group_by(STEP)
    )
    return {row.shown_step: int(row.number) for row in rows}


def _kinds(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different rows of whole numbers, in order; and for each row given, the place of its kind among them."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        above = column.astype(np.int64) - column.min(initial=0)
        key = key * (above.max(initial=0) + 1) + above
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1).astype(np.int64), which


def _if_short(column: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((func.length(column) <= LONGEST_READ, column)).label(str(column.key))


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _counts_in_groups(census: Census) -> Mask:
    """A branch is compared with its own siblings alone."""
    rows = census.rows
    return np.asarray(~np.isnan(rows["reward"]) & (rows["mode"] != MODES.index(RolloutMode.BRANCH)))


def _variances(census: Census) -> NDArray[np.float64]:
    """Of each group's rewards; nan where fewer than two have one."""
    rows = census.rows[_counts_in_groups(census)]
    reward, group, count = rows["reward"], rows["group"], len(census.groups)
    number = np.bincount(group, minlength=count)
    mean, square = (np.bincount(group, values, minlength=count) / np.maximum(1, number) for values in (reward, reward * reward))
    return np.where(number > 1, square - mean * mean, np.nan)


def _order(census: Census, sort: Sort, variances: NDArray[np.float64]) -> NDArray[np.int64]:
    """The places of all rollouts. The least is first of what `lexsort` gets, and its last key counts most."""
    rows = census.rows
    newest, reward = -rows["pk"], rows["reward"]
    match sort:
        case Sort.DISAGREE:
            spread = np.nan_to_num(variances, nan=-1.0)[rows["group"]]
            return np.lexsort((rows["pk"], -census.group_ranks[rows["group"]], -spread))
        case Sort.NEWEST:
            return np.argsort(newest)
        case Sort.WORST:
            return np.lexsort((newest, reward))  # nan is last
        case Sort.BEST:
            return np.lexsort((newest, -reward))
        case Sort.SLOWEST:
            return np.lexsort((newest, -rows["duration"]))


def _place(census: Census, db: Connection, rollout_id: str, places: NDArray[np.int64]) -> int:
    """Of a rollout among these."""
    pk = db.execute(select(rollouts.c.pk).where(rollouts.c.id == rollout_id)).scalar()
    found = () if pk is None else np.flatnonzero(census.rows["pk"][places] == pk).tolist()
    if not found:
        raise UnknownRecord(f"no rollout {rollout_id[:100]!r} to go on from; begin with the first page")
    return int(found[0])


def _chosen(census: Census, db: Connection, query: RolloutQuery, variances: NDArray[np.float64] | None = None) -> Mask:
    """Of all rollouts, those that are asked for. `variances`: of the groups, where they are known."""
    rows = census.rows
    reward = rows["reward"]
    conditions: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
        (query.first_step, rows["step"].__ge__),
        (query.last_step, rows["step"].__le__),
        (query.mode, lambda mode: rows["mode"] == MODES.index(mode)),
        (query.outcome, lambda outcome: rows["outcome"] == OUTCOMES.index(outcome)),
        (query.state, lambda state: rows["state"] == STATES.index(state)),
        (query.low, reward.__ge__),
        (query.high, reward.__le__),
        (query.is_unrewarded or None, lambda _: np.isnan(reward)),
        (query.task, lambda task: rows["task"] == census.tasks.get(task, -1)),
        (query.role, lambda role: _lists(census, db, "roles", role)),
        (query.tool, lambda tool: _lists(census, db, "tools", tool)),
        (query.text or None, lambda part: _named_like(census, db, part)),
        (query.mark, lambda mark: _marked(census, db, mark, query.tool, _variances(census) if variances is None else variances)),
    )
    chosen = np.ones(len(rows), np.bool_)
    for value, holds in conditions:
        if value is not None:
            chosen &= holds(value)
    return chosen


def _lists(census: Census, db: Connection, column: str, word: str) -> Mask:
    """Whether a list of words has this one."""
    number = db.execute(select(words.c.pk).where(words.c.text == word)).scalar()
    has = np.array([number in words_in(listed or "") for listed in census.lists])
    return np.asarray(has[census.rows[column]])


def _named_like(census: Census, db: Connection, part: str) -> Mask:
    like = "%" + re.sub(r"([%_\\])", r"\\\1", part) + "%"
    known = select(tasks.c.pk).where(tasks.c.task_id.like(like, escape="\\"))
    return _among(census, db, select(rollouts.c.pk).where(rollouts.c.id.like(like, escape="\\") | rollouts.c.task_pk.in_(known)))


def _among(census: Census, db: Connection, pks: Any) -> Mask:
    """Whether a rollout is one of those that a statement finds."""
    return np.isin(census.rows["pk"], np.array(db.execute(pks).scalars().all(), np.int64))


def _having(table: Table, which: ColumnElement[bool] | TextClause) -> Any:
    """Rollouts whose deciding attempt has such rows."""
    whole = table.join(attempts, attempts.c.pk == table.c.attempt_pk).join(rollouts, _DECIDING)
    return select(rollouts.c.pk).select_from(whole).where(which)


def _marked(census: Census, db: Connection, mark: Mark, tool: str | None, variances: NDArray[np.float64]) -> Mask:
    """`tool`: whose errors are meant; None = any."""
    rows = census.rows
    match mark:
        case Mark.CUT:
            return _among(census, db, _having(calls, _IS_CUT))
        case Mark.BREAK:
            return _among(census, db, _having(calls, _IS_BREAK))
        case Mark.REFUSED:
            return _among(census, db, _having(other_calls, other_calls.c.kind == OtherCallKind.REFUSED))
        case Mark.TOOL_ERROR if tool is not None:
            return _lists(census, db, "failed_tools", tool)
        case Mark.TOOL_ERROR:
            has_any = np.array([bool(listed) for listed in census.lists])
            return np.asarray(has_any[rows["failed_tools"]])
        case Mark.FAILED_REWARD:
            return np.asarray(rows["unrewarded"])
        case Mark.SILENT:
            return np.asarray((variances < _EQUAL)[rows["group"]])
