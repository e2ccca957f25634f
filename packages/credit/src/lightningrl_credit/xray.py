"""The credit X-ray: what several methods make of the same recorded rollouts, beside each other. Nobody is asked.

CreditTable ─► read_table ─► XRay: agreement (ranks, opposite signs), silent tokens, which methods are one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, center
from lightningrl.figures import rank
from lightningrl_credit.table import CreditTable, RolloutXRay, TableRow

__all__ = ["Agreement", "Columns", "MissingMethod", "XRay", "agree", "read_table"]

EQUAL: Final = 1e-6
"""Credit that differs by no more is the same."""


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
