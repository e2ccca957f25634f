"""Agreement of methods: how far two columns of credit rank calls alike, and how often they pull a call apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray

__all__ = ["Agreement", "Columns", "agree"]

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
            return _ranks(self._values[row][among])
        if row not in self._ranks:
            self._ranks[row] = _ranks(self._values[row][among])
        return self._ranks[row]


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks less their mean; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: FloatArray = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    ranks -= ranks.mean()
    return ranks


def _correlation(first: FloatArray, second: FloatArray) -> float | None:
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale else None
