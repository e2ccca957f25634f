"""Counts over many rollouts: by step, task, role, tool and reward.

Rollouts are counted in the index, their calls in indexes of the database: no query reads a row of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, select

from lightningrl.types import Outcome, RolloutMode, RolloutState, ToolStatus
from lightningrl_runs.queries.rollout_index import MODES, OUTCOMES, STATES, RolloutIndex
from lightningrl_runs.queries.rollout_query import DECIDING, IS_CUT, RolloutQuery, choose, is_compared
from lightningrl_server.store.participants import NOBODY, words_in
from lightningrl_server.store.reader import STEP
from lightningrl_server.store.tables import attempts, calls, rollouts, tool_calls, trained, words

__all__ = [
    "Cell",
    "FacetCount",
    "Part",
    "RewardValues",
    "StepReward",
    "ToolCount",
    "count_cells",
    "count_cut_calls",
    "count_parts",
    "count_tasks",
    "count_tools",
    "read_reward_values",
    "read_step_rewards",
]

_MOST_VALUES: Final = 8
V = TypeVar("V", bound=int | str | None, covariant=True)


class Part(StrEnum):
    """A kind of participant in rollouts, by its column in the index."""

    ROLE = "roles"
    TOOL = "tools"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Rollouts of one step, mode, ending and range of rewards."""

    step: int
    mode: RolloutMode
    state: RolloutState
    outcome: Outcome | None
    bin: int | None
    """Which range of rewards; None = it has none."""
    count: int
    total: float
    """Sum of the rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FacetCount(Generic[V]):
    """Rollouts with one value of a facet."""

    value: V
    """None = nobody said."""
    count: int
    reward: float | None = None
    """Mean of those that have one; not computed for roles and tools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardValues:
    """The rewards that occur, in order."""

    values: tuple[float, ...]
    is_all: bool
    """True if there are at most eight; else `values` is the least and the greatest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReward:
    """The rewards of a step's rollouts. Those of a group share a task, so the mean's uncertainty is that of the groups'
    means."""

    step: int
    mode: RolloutMode
    count: int
    mean: float
    groups: int
    variance: float
    """Population variance of the groups' means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCount:
    """Calls of a tool that ended alike."""

    name: str
    status: ToolStatus
    count: int


def count_cells(
    index: RolloutIndex, db: Connection, query: RolloutQuery, edges: Sequence[float] = ()
) -> tuple[Cell, ...]:
    """Count rollouts by step, mode, ending and range of rewards. `edges`: where each range but the first begins."""
    rows = index.rows[choose(index, db, query)]
    rewards = rows["reward"]
    bins = np.where(np.isnan(rewards), -1, np.searchsorted(np.array(edges, np.float64), rewards, side="right"))
    kinds, which = _kinds(rows["step"], rows["mode"], rows["state"], rows["outcome"], bins)
    counts, totals = np.bincount(which).tolist(), np.bincount(which, np.nan_to_num(rewards)).tolist()
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
        for (step, mode, state, outcome, place), count, total in zip(kinds.tolist(), counts, totals, strict=True)
    )


def count_tasks(
    index: RolloutIndex, db: Connection, query: RolloutQuery, limit: int = 20
) -> tuple[FacetCount[str], ...]:
    """Count rollouts by task, the least rewarded first."""
    rows = index.rows[choose(index, db, query)]
    rewarded = rows[~np.isnan(rows["reward"])]
    size = len(index.tasks)
    number, with_reward = (np.bincount(some["task"], minlength=size) for some in (rows, rewarded))
    total = np.bincount(rewarded["task"], rewarded["reward"], minlength=size)
    counts = [
        FacetCount(
            value=name,
            count=int(number[task]),
            reward=float(total[task] / with_reward[task]) if with_reward[task] else None,
        )
        for task, name in enumerate(index.tasks)
        if number[task]
    ]
    counts.sort(key=lambda count: (count.reward is None, count.reward or 0.0, -count.count, count.value))
    return tuple(counts[:limit])


def count_parts(index: RolloutIndex, db: Connection, part: Part, limit: int = 20) -> tuple[FacetCount[str | None], ...]:
    """Count finished rollouts by what took part in their deciding attempt, the most frequent first."""
    number = np.bincount(index.rows[part], minlength=len(index.lists)).tolist()
    counts: Counter[int] = Counter()
    for listed, place in index.lists.items():
        for word in words_in(listed or ""):
            counts[word] += number[place]
    most = (+counts).most_common(limit)
    named = select(words.c.pk, words.c.text).where(words.c.pk.in_([word for word, _ in most]))
    names: dict[int, str | None] = {row.pk: row.text for row in db.execute(named)}
    return tuple(FacetCount(value=None if word == NOBODY else names[word], count=count) for word, count in most)


def read_reward_values(index: RolloutIndex, _: Connection) -> RewardValues:
    rewards = index.rows["reward"]
    values = np.unique(rewards[~np.isnan(rewards)])
    is_all = len(values) <= _MOST_VALUES
    return RewardValues(values=tuple((values if is_all else values[[0, -1]]).tolist()), is_all=is_all)


def read_step_rewards(index: RolloutIndex, _: Connection) -> tuple[StepReward, ...]:
    """The rewards of each step and mode, in order."""
    rows = index.rows[is_compared(index)]
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


def count_tools(db: Connection) -> tuple[ToolCount, ...]:
    """Count the calls of each tool by how they ended."""
    name, status = tool_calls.c.name, tool_calls.c.status
    counted = select(name, status, func.count().label("number")).group_by(name, status).subquery()
    rows = db.execute(
        select(words.c.text, counted.c.status, counted.c.number)
        .join(words, words.c.pk == counted.c.name)
        .order_by(counted.c.name, counted.c.status)
    )
    return tuple(ToolCount(name=row.text, status=row.status, count=row.number) for row in rows)


def count_cut_calls(db: Connection) -> dict[int, int]:
    """Count completions of training rollouts that ended at max_tokens, by step."""
    number = func.count().label("number")
    cut = select(calls.c.attempt_pk, number).where(IS_CUT).group_by(calls.c.attempt_pk).cte("cut")
    rows = db.execute(
        select(STEP.label("shown_step"), func.sum(cut.c.number).label("number"))
        .select_from(
            cut.join(attempts, attempts.c.pk == cut.c.attempt_pk)
            .join(rollouts, DECIDING)
            .outerjoin(trained, trained.c.rollout_pk == rollouts.c.pk)
        )
        .where(rollouts.c.mode == RolloutMode.TRAIN)
        .group_by(STEP)
    )
    return {row.shown_step: int(row.number) for row in rows}


def _kinds(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different rows of whole numbers, in order; and, for each row given, the place of its kind among them."""
    # One number stands for a row: of steps 3 to 5 and modes 0 to 1, (4, 1) is (4 - 3) * 2 + (1 - 0) = 3.
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        above = column.astype(np.int64) - column.min(initial=0)
        key = key * (above.max(initial=0) + 1) + above
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return np.stack([column[first] for column in columns], axis=1).astype(np.int64), which
