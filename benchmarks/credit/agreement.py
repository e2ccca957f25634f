"""Agreement of a method's credit of turns with their true advantage, over many rollouts of a policy that stays as it
is.

    τ = Σ sign(c_i - c_j) · sign(A_i - A_j) / √(pairs with c_i ≠ c_j · pairs with A_i ≠ A_j)   (Kendall's τ-b)
    sign agreement = right / (right + wrong), of the turns with A ≠ 0 to which the method says anything at all

Turns of one group are no independent witnesses: intervals come from drawing whole groups again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Agreement", "agree", "kendall"]

DRAWS = 400
DIGITS = 9
"""Values that differ by less are equal."""
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What was found, with 95 % intervals."""

    tau: float
    tau_low: float
    tau_high: float
    right: float
    """Share of right signs; NaN where the method says nothing at all."""
    right_low: float
    right_high: float
    silent: float
    """Share of the turns with A ≠ 0 that get no credit."""
    turns: int
    groups: int


def agree(credit: Sequence[float], true: Sequence[float], groups: Sequence[int], *, seed: int = 0) -> Agreement:
    """`groups` says which group each turn is of: 0 … G - 1."""
    c: _Numbers = np.asarray(credit, np.float64).round(DIGITS)
    a: _Numbers = np.asarray(true, np.float64).round(DIGITS)
    owners = np.asarray(groups)
    count = int(owners.max()) + 1
    pairs = [_pair_sums(c, a, owners, count), _pair_sums(c, c, owners, count), _pair_sums(a, a, owners, count)]
    weights = np.concatenate([np.ones((1, count)), _redraw(count, seed)])
    both, own, truth = (np.einsum("dg,gh,dh->d", weights, sums, weights) for sums in pairs)
    taus = np.divide(both, np.sqrt(own * truth), out=np.zeros_like(both), where=own * truth > 0)
    signs = np.sign(c) * np.sign(a)
    tallies = [
        np.bincount(owners[chosen], minlength=count) for chosen in (signs > 0, signs < 0, (a != 0.0) & (c == 0.0))
    ]
    right, wrong, silent = (weights @ tally for tally in tallies)
    shares = np.divide(right, right + wrong, out=np.full_like(right, np.nan), where=right + wrong > 0)
    quiet = silent[0] / max(1.0, silent[0] + right[0] + wrong[0])
    tau_low, tau_high = np.percentile(taus[1:], [2.5, 97.5])
    defined = shares[1:][~np.isnan(shares[1:])]
    low, high = np.percentile(defined, [2.5, 97.5]) if len(defined) else (math.nan, math.nan)
    return Agreement(
        tau=float(taus[0]),
        tau_low=float(tau_low),
        tau_high=float(tau_high),
        right=float(shares[0]),
        right_low=float(low),
        right_high=float(high),
        silent=float(quiet),
        turns=len(c),
        groups=count,
    )


def kendall(first: Sequence[float], other: Sequence[float]) -> float:
    """τ-b of two short lists."""
    x, y = (np.asarray(values, np.float64) for values in (first, other))
    by_x, by_y = (np.sign(values[:, None] - values[None, :]) for values in (x, y))
    scale = float(np.sqrt((by_x**2).sum() * (by_y**2).sum()))
    return float((by_x * by_y).sum()) / scale if scale else 0.0


def _pair_sums(x: _Numbers, y: _Numbers, owners: NDArray[np.intp], count: int) -> _Numbers:
    """Σ sign(x_i - x_j) sign(y_i - y_j) over i of group g and j of group h, for all g and h."""
    order = np.argsort(owners, kind="stable")
    x, y = x[order].astype(np.float32), y[order].astype(np.float32)
    starts = np.searchsorted(owners[order], np.arange(count))
    ends = np.append(starts[1:], len(x))
    sums = np.zeros((count, count))
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        products = np.sign(x[start:end, None] - x) * np.sign(y[start:end, None] - y)
        sums[group] = np.add.reduceat(products.sum(0), starts)
    return sums


def _redraw(count: int, seed: int) -> _Numbers:
    """How often each group is drawn, [draw][group]."""
    drawn = np.random.default_rng(seed).integers(0, count, (DRAWS, count))
    return np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(np.float64)
