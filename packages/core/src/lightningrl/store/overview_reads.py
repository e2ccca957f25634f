"""The queries of `lightningrl.store.overview`. None reads a row of tokens: what they need of calls is in an index or beside a rollout."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Integer,
    Table,
    Text,
    TextClause,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    text,
)
from sqlalchemy.sql import Select

from lightningrl.store.errors import UnknownRecord
from lightningrl.store.overview import Cell, FacetCount, Mark, Part, RolloutQuery, RolloutRow, Sort, StepReward, ToolCount
from lightningrl.store.participants import NOBODY, words_in
from lightningrl.store.reads import Reader, decode_task
from lightningrl.store.schema import attempts, calls, other_calls, rollouts, scores, tasks, tool_calls, trained, words
from lightningrl.types import OtherCallKind, RolloutMode

__all__ = ["cells", "cut_calls", "list_rows", "part_counts", "reward_values", "step_rewards", "task_counts", "tool_counts"]

_MOST_VALUES = 8
_STEP = case((rollouts.c.mode == RolloutMode.VALIDATION, rollouts.c.step), else_=func.coalesce(trained.c.step, rollouts.c.step + 1))
_BASE = (
    rollouts.outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
    .outerjoin(attempts, (attempts.c.rollout_pk == rollouts.c.pk) & (attempts.c.number == rollouts.c.deciding))
    .outerjoin(scores, scores.c.attempt_pk == attempts.c.pk)
)
"""A rollout with its step, deciding attempt and score."""
_SCORED = scores.join(attempts, attempts.c.pk == scores.c.attempt_pk).join(
    rollouts, (rollouts.c.pk == attempts.c.rollout_pk) & (rollouts.c.deciding == attempts.c.number)
)
_IS_CUT = text("finish_reason = 'length'")
"""As its index says it: a bound value would not find it."""
_IS_BREAK = text("CAST(is_break AS INTEGER) = 1")
_EQUAL = 1e-12
"""Variance of rewards that differ by rounding."""


def list_rows(
    _: Reader, db: Connection, query: RolloutQuery, sort: Sort = Sort.DISAGREE, after: str | None = None, limit: int = 100
) -> tuple[RolloutRow, ...]:
    pks = _sorted_pks(db, query, sort, after, limit)
    found = {
        row.pk: row
        for row in db.execute(
            select(
                rollouts.c.pk,
                rollouts.c.id,
                rollouts.c.group_id,
                rollouts.c.mode,
                rollouts.c.state,
                rollouts.c.outcome,
                rollouts.c.started,
                _STEP.label("shown_step"),
                scores.c.reward,
                attempts.c.pk.label("attempt_pk"),
                attempts.c.duration_s,
                tasks.c.body,
            )
            .select_from(_BASE.join(tasks, tasks.c.pk == rollouts.c.task_pk))
            .where(rollouts.c.pk.in_(pks))
        )
    }
    rows = [found[pk] for pk in pks]
    spreads = {row.group_id: row.variance for row in db.execute(_spreads().where(rollouts.c.group_id.in_({row.group_id for row in rows})))}
    of = [row.attempt_pk for row in rows if row.attempt_pk is not None]
    counted = select(calls.c.attempt_pk, func.count().label("number")).where(calls.c.attempt_pk.in_(of)).group_by(calls.c.attempt_pk)
    counts = {row.attempt_pk: row.number for row in db.execute(counted)}
    lines = []
    for row in rows:
        task, variance = decode_task(row.body), spreads.get(row.group_id)
        lines.append(
            RolloutRow(
                id=row.id,
                group_id=row.group_id,
                task_id=task.id,
                input=task.input,
                mode=row.mode,
                step=row.shown_step,
                state=row.state,
                outcome=row.outcome,
                reward=row.reward,
                spread=None if variance is None else math.sqrt(max(0.0, variance)),
                calls=counts.get(row.attempt_pk, 0),
                attempts=row.started,
                duration_s=row.duration_s,
            )
        )
    return tuple(lines)


def _sorted_pks(db: Connection, query: RolloutQuery, sort: Sort, after: str | None, limit: int) -> Sequence[int]:
    spread = _spreads().subquery("spreads")
    keys, where, anchor = _keys(sort, spread), _where(query), None
    whole = _BASE.outerjoin(spread, spread.c.group_id == rollouts.c.group_id) if sort is Sort.DISAGREE else _BASE
    if after is not None:
        anchor = db.execute(select(*(key for key, _ in keys)).select_from(whole).where(rollouts.c.id == after)).one_or_none()
        if anchor is None:
            raise UnknownRecord(f"no rollout {after[:100]!r} to go on from; begin with the first page")
    if sort is Sort.DISAGREE and len(found := _of_first_groups(db, where, anchor, limit)) == limit:
        return found
    beyond = [] if anchor is None else [_beyond(keys, anchor)]
    order = (key.desc() if falls else key.asc() for key, falls in keys)
    return db.execute(select(rollouts.c.pk).select_from(whole).where(*where, *beyond).order_by(*order).limit(limit)).scalars().all()


def _of_first_groups(db: Connection, where: Sequence[ColumnElement[bool]], anchor: Sequence[Any] | None, limit: int) -> Sequence[int]:
    """Of as many groups as there are to be rollouts, those that disagree most: where each has one they are enough, and nobody sorts all
    other rollouts (a third of the first page's cost)."""
    spread = _spreads().subquery("spreads")
    variance, group = spread.c.variance, spread.c.group_id
    groups = select(group).order_by(variance.desc(), group.desc()).limit(limit)
    if anchor is not None:
        groups = groups.where((variance < anchor[0]) | ((variance == anchor[0]) & (group <= anchor[1])))
    rank = {name: number for number, name in enumerate(db.execute(groups).scalars())}
    chosen = select(rollouts.c.pk, rollouts.c.group_id).select_from(_BASE).where(*where, rollouts.c.group_id.in_(rank))
    places = sorted((rank[row.group_id], row.pk) for row in db.execute(chosen))
    if anchor is not None:
        places = [place for place in places if place > (rank.get(anchor[1], -1), anchor[2])]
    return [pk for _, pk in places[:limit]]


def cells(_: Reader, db: Connection, query: RolloutQuery, edges: Sequence[float] = ()) -> tuple[Cell, ...]:
    bins = _bin(edges)
    grouped = (_STEP.label("shown_step"), rollouts.c.mode, rollouts.c.state, rollouts.c.outcome, bins.label("bin"))
    rows = db.execute(
        select(*grouped, func.count().label("number"), func.sum(scores.c.reward).label("total"))
        .select_from(_BASE)
        .where(*_where(query))
        .group_by(*grouped)
    )
    return tuple(
        Cell(
            step=row.shown_step, mode=row.mode, state=row.state, outcome=row.outcome, bin=row.bin, count=row.number, total=row.total or 0.0
        )
        for row in rows
    )


def task_counts(_: Reader, db: Connection, query: RolloutQuery, limit: int = 20) -> tuple[FacetCount, ...]:
    number, reward = func.count().label("number"), func.avg(scores.c.reward).label("reward")
    rows = db.execute(
        select(tasks.c.task_id.label("value"), number, reward)
        .select_from(_BASE.join(tasks, tasks.c.pk == rollouts.c.task_pk))
        .where(*_where(query))
        .group_by(tasks.c.task_id)
        .order_by(reward.is_(None), reward, number.desc(), tasks.c.task_id)
        .limit(limit)
    )
    return tuple(FacetCount(value=row.value, count=row.number, reward=row.reward) for row in rows)


def part_counts(reader: Reader, db: Connection, part: Part, limit: int = 20) -> tuple[FacetCount, ...]:
    listed = rollouts.c.roles if part is Part.ROLE else rollouts.c.tools
    counts: Counter[int] = Counter()
    for row in db.execute(select(listed.label("words"), func.count().label("number")).where(listed.is_not(None)).group_by(listed)):
        for word in words_in(row.words):
            counts[word] += row.number
    return tuple(
        FacetCount(value=None if word == NOBODY else reader.word(db, word), count=count) for word, count in counts.most_common(limit)
    )


def reward_values(_: Reader, db: Connection) -> tuple[float, ...]:
    known = select(scores.c.reward).where(scores.c.reward.is_not(None))
    found = sorted(db.execute(known.distinct().limit(_MOST_VALUES + 1)).scalars())
    if len(found) <= _MOST_VALUES:
        return tuple(found)
    return tuple(db.execute(select(func.min(scores.c.reward), func.max(scores.c.reward))).one())


def step_rewards(_: Reader, db: Connection) -> tuple[StepReward, ...]:
    of_groups = (
        select(
            _STEP.label("shown_step"),
            rollouts.c.mode,
            func.count().label("number"),
            func.sum(scores.c.reward).label("total"),
            func.avg(scores.c.reward).label("mean"),
        )
        .select_from(_BASE)
        .where(scores.c.reward.is_not(None), rollouts.c.mode != RolloutMode.BRANCH)
        .group_by(_STEP, rollouts.c.mode, rollouts.c.group_id)
        .subquery()
    )
    mean = of_groups.c.mean
    rows = db.execute(
        select(
            of_groups.c.shown_step,
            of_groups.c.mode,
            func.sum(of_groups.c.number).label("number"),
            func.sum(of_groups.c.total).label("total"),
            func.count().label("groups"),
            (func.avg(mean * mean) - func.avg(mean) * func.avg(mean)).label("variance"),
        )
        .group_by(of_groups.c.shown_step, of_groups.c.mode)
        .order_by(of_groups.c.shown_step)
    )
    return tuple(
        StepReward(
            step=row.shown_step,
            mode=row.mode,
            count=int(row.number),
            mean=float(row.total) / int(row.number),
            groups=row.groups,
            variance=max(0.0, float(row.variance)),
        )
        for row in rows
    )


def tool_counts(reader: Reader, db: Connection) -> tuple[ToolCount, ...]:
    rows = db.execute(
        select(tool_calls.c.name, tool_calls.c.status, func.count().label("number")).group_by(tool_calls.c.name, tool_calls.c.status)
    )
    return tuple(ToolCount(name=reader.text(db, row.name), status=row.status, count=row.number) for row in rows.all())


def cut_calls(_: Reader, db: Connection) -> dict[int, int]:
    cut = select(calls.c.attempt_pk, func.count().label("number")).where(_IS_CUT).group_by(calls.c.attempt_pk).cte("cut")
    rows = db.execute(
        select(_STEP.label("shown_step"), func.sum(cut.c.number).label("number"))
        .select_from(
            cut.join(attempts, attempts.c.pk == cut.c.attempt_pk)
            .join(rollouts, (rollouts.c.pk == attempts.c.rollout_pk) & (rollouts.c.deciding == attempts.c.number))
            .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
        )
        .where(rollouts.c.mode == RolloutMode.TRAIN)
        .group_by(_STEP)
    )
    return {row.shown_step: int(row.number) for row in rows}


def _spreads() -> Select[Any]:
    """Each group's number of rewards and their variance."""
    reward = scores.c.reward
    return (
        select(rollouts.c.group_id, (func.avg(reward * reward) - func.avg(reward) * func.avg(reward)).label("variance"))
        .select_from(_SCORED)
        .where(reward.is_not(None), rollouts.c.mode != RolloutMode.BRANCH)
        .group_by(rollouts.c.group_id)
        .having(func.count() > 1)
    )


def _keys(sort: Sort, spread: Any) -> list[tuple[ColumnElement[Any], bool]]:
    """What rows are ordered by, and whether it falls; the last one tells any two apart."""
    pk, reward = rollouts.c.pk, scores.c.reward
    match sort:
        case Sort.DISAGREE:
            return [(func.coalesce(spread.c.variance, -1.0), True), (rollouts.c.group_id, True), (pk, False)]
        case Sort.NEWEST:
            return [(pk, True)]
        case Sort.WORST:
            return [(case((reward.is_(None), 1), else_=0), False), (func.coalesce(reward, 0.0), False), (pk, True)]
        case Sort.BEST:
            return [(case((reward.is_(None), 1), else_=0), False), (func.coalesce(reward, 0.0), True), (pk, True)]
        case Sort.SLOWEST:
            return [(func.coalesce(attempts.c.duration_s, -1.0), True), (pk, True)]


def _beyond(keys: Sequence[tuple[ColumnElement[Any], bool]], anchor: Sequence[Any]) -> ColumnElement[bool]:
    """After the row with these keys. Of (a falls, b rises): a < A or (a = A and b > B)."""
    (key, falls), value = keys[0], anchor[0]
    further: ColumnElement[bool] = key < value if falls else key > value
    if len(keys) == 1:
        return further
    return or_(further, and_(key == value, _beyond(keys[1:], anchor[1:])))


def _bin(edges: Sequence[float]) -> ColumnElement[Any]:
    """The number of the range that a reward is in."""
    reward = scores.c.reward
    below = [(reward < edge, number) for number, edge in enumerate(edges)]
    return case((reward.is_(None), null()), *below, else_=literal(len(edges), Integer))


def _where(query: RolloutQuery) -> list[ColumnElement[bool]]:
    reward = scores.c.reward
    where: list[ColumnElement[bool]] = []
    plain = (
        (query.first_step, _STEP.__ge__),
        (query.last_step, _STEP.__le__),
        (query.mode, rollouts.c.mode.__eq__),
        (query.outcome, rollouts.c.outcome.__eq__),
        (query.state, rollouts.c.state.__eq__),
        (query.low, reward.__ge__),
        (query.high, reward.__le__),
    )
    where += [holds(value) for value, holds in plain if value is not None]
    if query.is_unrewarded:
        where.append(reward.is_(None))
    if query.task is not None:
        where.append(rollouts.c.task_pk.in_(select(tasks.c.pk).where(tasks.c.task_id == query.task)))
    if query.role is not None:
        where.append(_lists(rollouts.c.roles, query.role))
    if query.tool is not None:
        where.append(_lists(rollouts.c.tools, query.tool))
    if query.text:
        like = "%" + re.sub(r"([%_\\])", r"\\\1", query.text) + "%"
        known = select(tasks.c.pk).where(tasks.c.task_id.like(like, escape="\\"))
        where.append(rollouts.c.id.like(like, escape="\\") | rollouts.c.task_pk.in_(known))
    if query.mark is not None:
        where.append(_marked(query))
    return where


def _lists(listed: Column[Any], word: str) -> ColumnElement[bool]:
    """Whether a list of words has this one."""
    number = select(cast(words.c.pk, Text)).where(words.c.text == word).scalar_subquery()
    return listed.like(literal("%,") + number + literal(",%"))


def _has(table: Table, *which: ColumnElement[bool] | TextClause) -> ColumnElement[bool]:
    """Whether the deciding attempt has such rows: a look into an index for each rollout."""
    return exists(select(1).select_from(table).where(table.c.attempt_pk == attempts.c.pk, *which).correlate(attempts))


def _marked(query: RolloutQuery) -> ColumnElement[bool]:
    match query.mark:
        case Mark.CUT:
            return _has(calls, _IS_CUT)
        case Mark.BREAK:
            return _has(calls, _IS_BREAK)
        case Mark.TOOL_ERROR:
            return rollouts.c.failed_tools != "" if query.tool is None else _lists(rollouts.c.failed_tools, query.tool)
        case Mark.REFUSED:
            return _has(other_calls, other_calls.c.kind == OtherCallKind.REFUSED)
        case Mark.FAILED_REWARD:
            return scores.c.unrewarded.is_not(None)
        case _:
            equal = _spreads().subquery()
            return rollouts.c.group_id.in_(select(equal.c.group_id).where(equal.c.variance < _EQUAL))
