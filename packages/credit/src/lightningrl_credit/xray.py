"""The credit X-ray: what several methods make of the same recorded rollouts, beside each other. Nobody is asked.

groups + advantages by method ─► make_table, a step ─► join_tables, a run
CreditTable ─► read_table ─► XRay: agreement (ranks, opposite signs), silent tokens, which methods are one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, center, mean
from lightningrl.figures import rank
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup
from lightningrl_credit.branches import Branches
from lightningrl_credit.states import KEYS, state_keys

__all__ = [
    "Agreement",
    "Columns",
    "CreditTable",
    "MissingMethod",
    "RolloutXRay",
    "XRay",
    "agree",
    "join_tables",
    "make_table",
    "read_table",
]

EQUAL: Final = 1e-6
"""Credit that differs by no more is the same."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodXRay:
    """A method's credit on the rollouts, compared with others'."""

    name: str
    summary: str
    is_own: bool
    """True for the method that the run was trained with."""
    silent: float | None
    """Share of the trained tokens without a gradient; None = nothing is trained."""
    same_as: str | None
    """A method before it whose credit is the same on every token, GRPO's where that is."""
    own: Agreement
    """Agreement with the run's own credit."""
    outcome: Agreement
    """Agreement with the rollout's reward less its group's mean."""
    measured: Agreement | None
    """Agreement with the advantages that branches measured (`A = Q̂ - V̂`); None = no rollout was branched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingMethod:
    """An installed method that these rollouts do not allow."""

    name: str
    summary: str
    why: str
    """Its unmet need, and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class XRay:
    """Credit of all methods on a run, a step, a group or a rollout."""

    steps: tuple[int, ...]
    rollout_count: int
    calls: int
    """Trained and scored by the run's own method."""
    own: str
    """Name of the method that the run was trained with."""
    own_difference: float | None
    """The largest, of a token, between what the run used and what its method makes of the rollouts now; 0.0 = exactly
    the same; None = it cannot be computed, and its column is what the run used."""
    methods: tuple[MethodXRay, ...]
    """The run's own first."""
    missing: tuple[MissingMethod, ...]
    pairs: tuple[tuple[str, str, Agreement], ...]
    """Any two methods that are not the same, those that disagree most first."""
    anchors: Mapping[str, float | None]
    """Share of the trained calls whose state other rollouts of the group were in, and not all, by state key."""
    branched: int
    """Rollouts that were branched."""
    rollouts: tuple[RolloutXRay, ...] = ()
    """Rollouts, those that methods disagree on most first."""

    @property
    def distinct(self) -> dict[str, list[str]]:
        """Methods that differ from each other here, and the run's own, with the names of those that are the same."""
        names = {method.name: list[str]() for method in self.methods if method.same_as is None or method.is_own}
        for method in self.methods:
            if method.same_as in names and method.name not in names:
                names[method.same_as].append(method.name)
        return names


def read_table(
    table: CreditTable,
    methods: Sequence[tuple[str, str]],
    missing: Sequence[MissingMethod] = (),
    *,
    most: int | None = None,
) -> XRay:
    """Read a table. Methods that no step allowed are left out. `methods`: name and summary of the table's rows, the
    run's first. `most`: shown rollouts, with most disagreement."""
    names = [name for name, _ in methods]
    shown = [number for number, tokens in enumerate(table.tokens) if number == 0 or tokens]
    columns = Columns(np.vstack([table.credit, table.outcome, table.measured]))
    outcome, measured = len(names), len(names) + 1
    branched = sum(bool(np.isfinite(table.measured[row.calls]).any()) for row in table.rows)
    signs = columns.signs
    flips = ((signs[shown] * signs[0]) < 0).sum(axis=0)
    same = {number: _same_as(number, shown, table.differences, names) for number in shown}
    rows = sorted(table.rows, key=lambda row: -int(flips[row.calls].sum()))
    distinct = [number for number in shown if same[number] is None]
    pairs = [(names[i], names[j], columns.agree(i, j)) for i, j in combinations(distinct, 2)]
    pairs.sort(key=lambda pair: (-(pair[2].flips or 0.0), 1.0 if pair[2].rank is None else pair[2].rank))
    return XRay(
        steps=tuple(sorted({row.rollout.step for row in table.rows})),
        rollout_count=len(table.rows),
        calls=int(np.isfinite(table.credit[0]).sum()),
        own=names[0],
        own_difference=float(table.own_difference) if np.isfinite(table.own_difference) else None,
        methods=tuple(
            MethodXRay(
                name=names[number],
                summary=methods[number][1],
                is_own=number == 0,
                silent=float(table.silent[number] / table.tokens[number]) if table.tokens[number] else None,
                same_as=same[number],
                own=columns.agree(number, 0),
                outcome=columns.agree(number, outcome),
                measured=columns.agree(number, measured) if branched else None,
            )
            for number in shown
        ),
        missing=tuple(missing),
        pairs=tuple(pairs),
        anchors={name: hits / calls if calls else None for name, (hits, calls) in table.hits.items()},
        branched=branched,
        rollouts=tuple(_read_row(row, table, [(n, names[n]) for n in shown], flips) for row in rows[:most]),
    )


def _same_as(number: int, shown: Sequence[int], differences: FloatArray, names: Sequence[str]) -> str | None:
    """Name an equal method: GRPO before all others, then the run's own, then whatever stands before it."""
    grpo = names.index("grpo") if "grpo" in names else None
    if number == grpo:
        return None
    order = [other for other in shown if other == grpo] + [other for other in shown if other < number and other != grpo]
    return next((names[other] for other in order if differences[number, other] <= EQUAL), None)


def _read_row(
    row: TableRow, table: CreditTable, methods: Sequence[tuple[int, str]], flips: NDArray[np.int64]
) -> RolloutXRay:
    measured = _numbers(table.measured[row.calls])
    return replace(
        row.rollout,
        credit={name: _numbers(table.credit[number][row.calls]) for number, name in methods},
        measured=measured if any(value is not None for value in measured) else None,
        flips=int(flips[row.calls].sum()),
    )


def _numbers(values: FloatArray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(value) else float(value) for value in values)


_DIGITS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of two methods on the calls that both score."""

    calls: int
    rank: float | None
    """Spearman's rank correlation, -1 to 1; None where one of them gives every call the same."""
    flips: float | None
    """Share of the calls that one raises and the other lowers; None = there are no calls."""


def agree(first: Sequence[float] | FloatArray, second: Sequence[float] | FloatArray) -> Agreement:
    """Compare two lists of numbers place by place; NaN = no number."""
    return Columns(np.array([first, second], dtype=np.float64)).agree(0, 1)


class Columns:
    """Rows of numbers that are compared in pairs; each is ranked once."""

    def __init__(self, values: FloatArray) -> None:
        self._values = np.round(values, _DIGITS) + 0.0
        self._is_scored = np.isfinite(values)
        self._ranks: dict[int, FloatArray] = {}
        self.signs = np.sign(np.where(self._is_scored, self._values, 0.0))

    def agree(self, first: int, second: int) -> Agreement:
        """Compare two rows by their numbers."""
        both = self._is_scored[first] & self._is_scored[second]
        calls = int(both.sum())
        if not calls:
            return Agreement(calls=0, rank=None, flips=None)
        flips = float((self.signs[first] * self.signs[second] < 0).sum() / calls)
        rank = _correlation(self._rank(first, both), self._rank(second, both))
        return Agreement(calls=calls, rank=rank, flips=flips)

    def _rank(self, row: int, among: NDArray[np.bool_]) -> FloatArray:
        if not np.array_equal(among, self._is_scored[row]):
            return center(rank(self._values[row][among]))
        if row not in self._ranks:
            self._ranks[row] = center(rank(self._values[row][among]))
        return self._ranks[row]


def _correlation(first: FloatArray, second: FloatArray) -> float | None:
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None
