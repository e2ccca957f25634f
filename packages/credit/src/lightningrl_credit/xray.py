"""The credit X-ray: what several methods make of the same recorded rollouts, beside each other. Pure numpy; nobody is asked.

groups + advantages by method ─► CreditTable: credit[method][call], the mean over the call's tokens
                                    └─► read_table ─► XRay: ranks, opposite signs, silent tokens, which methods are one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages.baselines import FloatArray, mean
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup
from lightningrl_credit.branches import Branches
from lightningrl_credit.state_keys import KEYS, state_keys

__all__ = [
    "EQUAL",
    "Agreement",
    "CreditTable",
    "MethodXRay",
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
_DIGITS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Of two columns of credit, over the calls that both score."""

    calls: int
    rank: float | None
    """Spearman's rank correlation, -1 to 1; None where one of them gives every call the same."""
    flips: float | None
    """Share of the calls that one raises and the other lowers; None = there are no calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodXRay:
    """A method's credit on the rollouts, compared with others'."""

    name: str
    summary: str
    is_own: bool
    """Whether the run was trained with it."""
    silent: float | None
    """Share of the trained tokens without a gradient; None = nothing is trained."""
    same_as: str | None
    """A method before it whose credit is the same on every token, GRPO's where that is."""
    own: Agreement
    """With the run's own credit."""
    outcome: Agreement
    """With the rollout's reward less its group's mean."""
    measured: Agreement | None
    """With what branches measured (`A = Q̂ - V̂`); None = no rollout was branched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingMethod:
    """An installed method that these rollouts do not allow."""

    name: str
    summary: str
    why: str
    """What it lacks, and the remedy."""


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
    """By call."""
    credit: Mapping[str, tuple[float | None, ...]]
    """By method: the mean over the call's tokens; None = not trained, or nobody scored it."""
    measured: tuple[float | None, ...] | None
    """What branches measured; None = it was not branched."""
    flips: int
    """How often a method gives a call the opposite sign of the run's own credit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class XRay:
    """Of a run, a step, a group or a rollout."""

    steps: tuple[int, ...]
    rollout_count: int
    calls: int
    """Trained and scored by the run's own method."""
    own: str
    """Name of the method that the run was trained with."""
    own_difference: float | None
    """The largest, of a token, between what the run used and what its method makes of the rollouts now; 0.0 = exactly the same; None = it
    cannot be computed, and its column is what the run used."""
    methods: tuple[MethodXRay, ...]
    """The run's own first."""
    missing: tuple[MissingMethod, ...]
    pairs: tuple[tuple[str, str, Agreement], ...]
    """Any two methods that are not the same, those that disagree most first."""
    anchors: Mapping[str, float | None]
    """By state key: share of the trained calls whose state another rollout of the group was in, too."""
    branched: int
    """Rollouts that were branched."""
    rollouts: tuple[RolloutXRay, ...] = ()
    """Those that methods disagree on most first."""

    @property
    def distinct(self) -> dict[str, list[str]]:
        """Methods of which each is another here, the run's own among them, with the names of those that are the same."""
        names = {method.name: list[str]() for method in self.methods if method.same_as is None or method.is_own}
        for method in self.methods:
            if method.same_as in names and method.name not in names:
                names[method.same_as].append(method.name)
        return names


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A rollout, without its credit, and its place in a table."""

    rollout: RolloutXRay
    start: int

    @property
    def calls(self) -> slice:
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
    """By state key: calls in a state of two rollouts, of so many."""
    rows: tuple[_Row, ...]


def make_table(
    step: int,
    groups: Sequence[TrajectoryGroup],
    advantages: Sequence[Sequence[Advantages] | None],
    used: Mapping[str, Sequence[Array | None]],
    measured: Sequence[TrajectoryGroup] = (),
) -> CreditTable:
    """`advantages[method][group]`, None for a method that these groups do not allow; `used`: by rollout, what the run used; `measured`: the
    same groups, with branches that were sampled by hand."""
    trajectories = [one for group in groups for one in group.trajectories]
    rows = _place(step, groups)
    calls = [call for one in trajectories for call in one.transitions]
    is_trained = np.array([call.trainable for call in calls], dtype=np.bool_)
    lengths = np.array([len(call.completion_ids) for call in calls], dtype=np.int64)
    trained = np.repeat(is_trained, lengths)
    columns = [None if found is None else _tokens([of for by in found for of in by], trajectories) for found in advantages]
    kept = _tokens([used.get(one.rollout_id, ()) for one in trajectories], trajectories)
    if columns[0] is None:
        columns[0], own_difference = kept, np.inf
    else:
        own_difference = _largest(columns[0][0][trained], kept[0][trained])
    return CreditTable(
        credit=np.array([_by_call(column, lengths, is_trained) for column in columns]).reshape(len(columns), len(calls)),
        outcome=np.repeat(
            [np.nan if row.rollout.outcome is None else row.rollout.outcome for row in rows], [len(row.rollout.roles) for row in rows]
        ),
        measured=_measure(measured or groups, is_trained),
        silent=np.array([0 if column is None else int((column[0][trained] == 0.0).sum()) for column in columns], dtype=np.int64),
        tokens=np.array([0 if column is None else int(trained.sum()) for column in columns], dtype=np.int64),
        differences=_differences(columns, trained),
        own_difference=own_difference,
        hits={name: _hits(groups, name) for name in KEYS},
        rows=tuple(rows),
    )


def join_tables(tables: Sequence[CreditTable]) -> CreditTable:
    """Their calls one after the other."""
    starts = np.cumsum([0, *(table.credit.shape[1] for table in tables)])
    rows = [replace(row, start=row.start + int(start)) for table, start in zip(tables, starts, strict=False) for row in table.rows]
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


def read_table(
    table: CreditTable, methods: Sequence[tuple[str, str]], missing: Sequence[MissingMethod] = (), *, most: int | None = None
) -> XRay:
    """`methods`: name and summary of the table's rows, the run's own first; those that no step allowed are left out. `most`: so many
    rollouts, those that methods disagree on most."""
    names = [name for name, _ in methods]
    shown = [number for number, tokens in enumerate(table.tokens) if number == 0 or tokens]
    columns = _Columns(np.vstack([table.credit, table.outcome, table.measured]))
    outcome, measured = len(names), len(names) + 1
    branched = sum(bool(np.isfinite(table.measured[row.calls]).any()) for row in table.rows)
    signs = columns.signs
    flips = ((signs[shown] * signs[0]) < 0).sum(axis=0)
    same = {number: _same_as(number, shown, table.differences, names) for number in shown}
    rows = sorted(table.rows, key=lambda row: -int(flips[row.calls].sum()))
    pairs = [(names[i], names[j], columns.agree(i, j)) for i, j in combinations(shown, 2) if same[i] is None and same[j] is None]
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
        rollouts=tuple(_read_row(row, table, [(number, names[number]) for number in shown], flips) for row in rows[:most]),
    )


def agree(one: Sequence[float] | FloatArray, other: Sequence[float] | FloatArray) -> Agreement:
    """Of two lists of numbers, place by place; NaN = none."""
    return _Columns(np.array([one, other], dtype=np.float64)).agree(0, 1)


class _Columns:
    """Rows of numbers that are compared in pairs; each is ranked once."""

    def __init__(self, values: FloatArray) -> None:
        self._values = np.round(values, _DIGITS) + 0.0
        self._known = np.isfinite(values)
        self._ranks: dict[int, FloatArray] = {}
        self.signs = np.sign(np.where(self._known, self._values, 0.0))

    def agree(self, one: int, other: int) -> Agreement:
        both = self._known[one] & self._known[other]
        calls = int(both.sum())
        if not calls:
            return Agreement(calls=0, rank=None, flips=None)
        flips = float((self.signs[one] * self.signs[other] < 0).sum() / calls)
        return Agreement(calls=calls, rank=_correlation(self._rank(one, both), self._rank(other, both)), flips=flips)

    def _rank(self, row: int, among: NDArray[np.bool_]) -> FloatArray:
        if not np.array_equal(among, self._known[row]):
            return _ranks(self._values[row][among])
        if row not in self._ranks:
            self._ranks[row] = _ranks(self._values[row][among])
        return self._ranks[row]


def _ranks(values: FloatArray) -> FloatArray:
    """Equal values share the mean of their ranks; less the mean of all."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    ranks -= ranks.mean()
    return ranks


def _correlation(one: FloatArray, other: FloatArray) -> float | None:
    scale = float(np.sqrt((one @ one) * (other @ other)))
    return float(one @ other) / scale if scale else None


_Tokens = tuple[FloatArray, NDArray[np.bool_]]
"""Credit of each token, 0 where nobody scored the call; and which calls were scored."""


def _place(step: int, groups: Sequence[TrajectoryGroup]) -> list[_Row]:
    rows: list[_Row] = []
    start = 0
    for group in groups:
        rewards = [one.reward for one in group.trajectories if one.reward is not None]
        for one in group.trajectories:
            rollout = RolloutXRay(
                rollout_id=one.rollout_id,
                group_id=one.group_id,
                task_id=one.task.id,
                step=step,
                reward=one.reward,
                outcome=None if one.reward is None else one.reward - mean(rewards),
                roles=tuple(call.agent for call in one.transitions),
                credit={},
                measured=None,
                flips=0,
            )
            rows.append(_Row(rollout=rollout, start=start))
            start += len(rollout.roles)
    return rows


def _tokens(credit: Sequence[Sequence[Array | None]], trajectories: Sequence[Trajectory]) -> _Tokens:
    parts: list[FloatArray] = [np.zeros(0)]
    is_scored: list[bool] = []
    for by_call, one in zip(credit, trajectories, strict=True):
        for number, call in enumerate(one.transitions):
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
    found = np.full((len(columns), len(columns)), np.inf)
    values = [None if column is None else column[0][trained] for column in columns]
    for i, j in combinations(range(len(columns)), 2):
        one, other = values[i], values[j]
        if one is not None and other is not None:
            found[i, j] = found[j, i] = _largest(one, other)
    return found


def _largest(one: FloatArray, other: FloatArray) -> float:
    return float(np.abs(one - other).max(initial=0.0))


def _same_as(number: int, shown: Sequence[int], differences: FloatArray, names: Sequence[str]) -> str | None:
    """GRPO before all others, then the run's own method, then whatever stands before it."""
    grpo = names.index("grpo") if "grpo" in names else None
    if number == grpo:
        return None
    order = [other for other in shown if other == grpo] + [other for other in shown if other < number and other != grpo]
    return next((names[other] for other in order if differences[number, other] <= EQUAL), None)


def _measure(groups: Sequence[TrajectoryGroup], is_trained: NDArray[np.bool_]) -> FloatArray:
    """Q̂ - V̂ of the calls of rollouts that some rewarded branch left."""
    parts: list[FloatArray] = [np.zeros(0)]
    for group in groups:
        left = {one.branch.rollout_id for one in group.branches if one.branch is not None and one.reward is not None}
        found = Branches().assign(group) if left else ((),) * len(group.trajectories)
        for one, by_call in zip(group.trajectories, found, strict=True):
            if one.rollout_id in left:
                parts.append(np.array([np.nan if call is None else float(call[0]) for call in by_call]))
            else:
                parts.append(np.full(len(one.transitions), np.nan))
    return np.where(is_trained, np.concatenate(parts), np.nan)


def _hits(groups: Sequence[TrajectoryGroup], key: str) -> tuple[int, int]:
    """Trained calls in a state that another rollout of the group was in, and all trained calls, of rollouts with a reward."""
    hits = calls = 0
    for group in groups:
        owners: dict[object, set[int]] = {}
        trained: list[object] = []
        for number, one in enumerate(group.trajectories):
            if one.reward is None:
                continue
            for call, state in zip(one.transitions, state_keys(one, KEYS[key]), strict=True):
                place = (call.agent, call.policy, state)
                owners.setdefault(place, set()).add(number)
                trained += [place] if call.trainable else []
        hits += sum(len(owners[place]) > 1 for place in trained)
        calls += len(trained)
    return hits, calls


def _read_row(row: _Row, table: CreditTable, methods: Sequence[tuple[int, str]], flips: NDArray[np.int64]) -> RolloutXRay:
    measured = _numbers(table.measured[row.calls])
    return replace(
        row.rollout,
        credit={name: _numbers(table.credit[number][row.calls]) for number, name in methods},
        measured=measured if any(value is not None for value in measured) else None,
        flips=int(flips[row.calls].sum()),
    )


def _numbers(values: FloatArray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(value) else float(value) for value in values)
