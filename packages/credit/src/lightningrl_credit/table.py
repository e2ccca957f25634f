"""The table of an X-ray: every call of some groups, with the credit that each method gives it. Pure numpy.

groups + advantages by method ─► make_table, a step ─► join_tables, a run ─► lightningrl_credit.xray
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, mean
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup
from lightningrl_credit.branches import Branches
from lightningrl_credit.state_keys import KEYS, state_keys

__all__ = ["CreditTable", "RolloutXRay", "TableRow", "join_tables", "make_table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutXRay:
    """One rollout: a row of credit for each method, one number for each call."""

    rollout_id: str
    group_id: str
    task_id: str
    step: int
    reward: float | None
    outcome: float | None
    """Reward less its group's mean; None = no reward."""
    roles: tuple[str | None, ...]
    """One per call."""
    credit: Mapping[str, tuple[float | None, ...]]
    """Mean over the call's tokens, by method; None = not trained, or nobody scored it."""
    measured: tuple[float | None, ...] | None
    """Advantages measured by branching; None = it was not branched."""
    flips: int
    """Number of times that a method gives a call the opposite sign of the run's own credit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A rollout, without its credit, and its place in a table."""

    rollout: RolloutXRay
    start: int

    @property
    def calls(self) -> slice:
        """The table's columns that are its calls."""
        return slice(self.start, self.start + len(self.rollout.roles))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CreditTable:
    """All calls of some groups. Columns are calls."""

    credit: FloatArray
    """`[method][call]`; NaN = not trained, or nobody scored it."""
    outcome: FloatArray
    """`[call]`"""
    measured: FloatArray
    """`[call]`; NaN = not branched."""
    silent: NDArray[np.int64]
    """`[method]`: trained tokens without a gradient."""
    tokens: NDArray[np.int64]
    """`[method]`: trained tokens; 0 where it could not be computed."""
    differences: FloatArray
    """`[method][method]`: the largest of a token; inf where one of them could not be computed."""
    own_difference: float
    hits: Mapping[str, tuple[int, int]]
    """Calls in a state of two rollouts, of so many, by state key."""
    rows: tuple[TableRow, ...]


def make_table(
    step: int,
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[Sequence[Advantages] | None],
    used: Mapping[str, Sequence[Array | None]],
    measured: Sequence[TrajectoryGroup] = (),
) -> CreditTable:
    """Build the table of a step. `advantages[method][group]`, None for a method that these groups do not allow. `used`:
    by rollout, the credit that the run used. `measured`: the same groups, with branches that were sampled by hand."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rows = _place(step, groups)
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    is_trained = np.array([call.trainable for call in calls], dtype=np.bool_)
    lengths = np.array([len(call.completion_ids) for call in calls], dtype=np.int64)
    trained = np.repeat(is_trained, lengths)
    columns = [
        None if by_group is None else _tokens([credit for group in by_group for credit in group], trajectories)
        for by_group in advantages
    ]
    own = _tokens([used.get(trajectory.rollout_id, ()) for trajectory in trajectories], trajectories)
    if columns[0] is None:
        columns[0], own_difference = own, np.inf
    else:
        own_difference = _largest(columns[0][0][trained], own[0][trained])
    silent = [0 if column is None else int((column[0][trained] == 0.0).sum()) for column in columns]
    outcomes = [np.nan if row.rollout.outcome is None else row.rollout.outcome for row in rows]
    credit = np.array([_by_call(column, lengths, is_trained) for column in columns])
    return CreditTable(
        credit=credit.reshape(len(columns), len(calls)),
        outcome=np.repeat(outcomes, [len(row.rollout.roles) for row in rows]),
        measured=_measure(measured or groups, is_trained),
        silent=np.array(silent, dtype=np.int64),
        tokens=np.array([0 if column is None else int(trained.sum()) for column in columns], dtype=np.int64),
        differences=_differences(columns, trained),
        own_difference=own_difference,
        hits={name: _hits(groups, name) for name in KEYS},
        rows=tuple(rows),
    )


def join_tables(tables: Sequence[CreditTable]) -> CreditTable:
    """Append the calls of several steps."""
    starts = np.cumsum([0, *(table.credit.shape[1] for table in tables)])
    rows = [
        replace(row, start=row.start + int(start))
        for table, start in zip(tables, starts, strict=False)
        for row in table.rows
    ]
    allowed = [np.where(np.isinf(table.differences), -np.inf, table.differences) for table in tables]
    largest = np.max(allowed, axis=0)  # a step that does not allow a method says nothing of it
    return CreditTable(
        credit=np.concatenate([table.credit for table in tables], axis=1),
        outcome=np.concatenate([table.outcome for table in tables]),
        measured=np.concatenate([table.measured for table in tables]),
        silent=np.sum([table.silent for table in tables], axis=0),
        tokens=np.sum([table.tokens for table in tables], axis=0),
        differences=np.where(np.isneginf(largest), np.inf, largest),
        own_difference=max(table.own_difference for table in tables),
        hits={name: tuple(np.sum([table.hits[name] for table in tables], axis=0).tolist()) for name in KEYS},
        rows=tuple(rows),
    )


_Tokens = tuple[FloatArray, NDArray[np.bool_]]
"""Credit of each token, 0 where nobody scored the call; and which calls were scored."""


def _place(step: int, groups: Sequence[TrajectoryGroup]) -> list[TableRow]:
    rows: list[TableRow] = []
    start = 0
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
        for trajectory in group.trajectories:
            rollout = RolloutXRay(
                rollout_id=trajectory.rollout_id,
                group_id=trajectory.group_id,
                task_id=trajectory.task.id,
                step=step,
                reward=trajectory.reward,
                outcome=None if trajectory.reward is None else trajectory.reward - mean(rewards),
                roles=tuple(call.agent for call in trajectory.transitions),
                credit={},
                measured=None,
                flips=0,
            )
            rows.append(TableRow(rollout=rollout, start=start))
            start += len(rollout.roles)
    return rows


def _tokens(credit: Sequence[Sequence[Array | None]], trajectories: Sequence[Trajectory]) -> _Tokens:
    parts: list[FloatArray] = [np.zeros(0)]
    is_scored: list[bool] = []
    for by_call, trajectory in zip(credit, trajectories, strict=True):
        for number, call in enumerate(trajectory.transitions):
            values = by_call[number] if number < len(by_call) else None
            is_scored.append(values is not None)
            parts.append(np.zeros(len(call.completion_ids)) if values is None else values.astype(np.float64))
    return np.concatenate(parts), np.array(is_scored, dtype=np.bool_)


def _by_call(column: _Tokens | None, lengths: NDArray[np.int64], is_trained: NDArray[np.bool_]) -> FloatArray:
    if column is None or not len(lengths):
        return np.full(len(lengths), np.nan)
    tokens, is_scored = column
    means = np.add.reduceat(tokens, np.cumsum(lengths) - lengths) / lengths
    return np.where(is_scored & is_trained, means, np.nan)


def _differences(columns: Sequence[_Tokens | None], trained: NDArray[np.bool_]) -> FloatArray:
    differences = np.full((len(columns), len(columns)), np.inf)
    values = [None if column is None else column[0][trained] for column in columns]
    for i, j in combinations(range(len(columns)), 2):
        first, second = values[i], values[j]
        if first is not None and second is not None:
            differences[i, j] = differences[j, i] = _largest(first, second)
    return differences


def _largest(first: FloatArray, second: FloatArray) -> float:
    return float(np.abs(first - second).max(initial=0.0))


def _measure(groups: Sequence[TrajectoryGroup], is_trained: NDArray[np.bool_]) -> FloatArray:
    """Q̂ - V̂ of the calls of rollouts that some rewarded branch left."""
    parts: list[FloatArray] = [np.zeros(0)]
    for group in groups:
        left = {
            branch.branch.rollout_id
            for branch in group.branches
            if branch.branch is not None and branch.reward is not None
        }
        advantages = Branches().assign(group) if left else ((),) * len(group.trajectories)
        for trajectory, by_call in zip(group.trajectories, advantages, strict=True):
            if trajectory.rollout_id in left:
                parts.append(np.array([np.nan if call is None else float(call[0]) for call in by_call]))
            else:
                parts.append(np.full(len(trajectory.transitions), np.nan))
    return np.where(is_trained, np.concatenate(parts), np.nan)


def _hits(groups: Sequence[TrajectoryGroup], key: str) -> tuple[int, int]:
    """Trained calls in a state that others of the group's rollouts were in, and not all, which `states` compares; and
    all trained calls of rewarded rollouts."""
    hits = calls = 0
    for group in groups:
        owners: dict[object, set[int]] = {}
        trained: list[object] = []
        for number, trajectory in enumerate(group.trajectories):
            if trajectory.reward is None:
                continue
            for call, state in zip(trajectory.transitions, state_keys(trajectory, KEYS[key]), strict=True):
                place = (call.agent, call.policy, state)
                owners.setdefault(place, set()).add(number)
                trained += [place] if call.trainable else []
        rewarded = sum(trajectory.reward is not None for trajectory in group.trajectories)
        hits += sum(1 < len(owners[place]) < rewarded for place in trained)
        calls += len(trained)
    return hits, calls
