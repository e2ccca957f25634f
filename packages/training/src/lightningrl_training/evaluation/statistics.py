"""Statistics of rewards on tasks.

rewards[task][sample] ─► mean per task ─► interval of the mean      (t over tasks: a task's samples are no new tasks)
two policies, same tasks ─► difference per task ─► interval, and a betting test that may be looked at after every task
slices ─► a p-value each ─► corrected for their number (Holm)

Tasks are the sample and policies the treatment: the results hold for tasks like these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["LEVEL", "Interval", "Verdict", "bet", "holm", "mean_interval", "pass_at_k", "rank_sum_p", "sign_flip_p"]

Question = TypeVar("Question")
Numbers = NDArray[np.float64]
LEVEL = 0.95
"""Probability with which an interval holds."""
GRID = 401
"""Candidate means that the betting interval tries."""
LARGEST_BET = 0.75
"""Largest stake, as a share of what may be staked without ruin; Waudby-Smith & Ramdas name 1/2 and 3/4."""
EXACT = 12
"""Differences up to which every flip of signs is tried."""
FLIPS = 9999
NEARLY = 1e-9
"""Values no farther apart are equal: 0.9 - 0.8 and 0.8 - 0.7 are 1e-16 apart."""


class Verdict(StrEnum):
    """The result of a comparison."""

    BETTER = "better"
    WORSE = "worse"
    NOT_ENOUGH = "not enough tasks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float | None
    """Lower end; None = there are too few values for an interval."""
    high: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples passes, without bias. `k` is at most `samples`."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} wants at least {k} samples of a task, and there are {samples}")
    # 1 - C(n - c, k) / C(n, k)  (Chen et al. 2021, arXiv 2107.03374, eq. 1)
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_interval(values: Sequence[float] | Numbers, *, bounds: tuple[float, float] | None = None) -> Interval:
    """Mean of independent values with Student's t interval, cut where `bounds`, the least and most that a value can be,
    end. Of equal values t would be certain: then bounds give the interval of `bet`; without them there is none."""
    numbers = np.asarray(values, dtype=np.float64)
    mean = float(numbers.mean())
    if len(numbers) < 2 or np.ptp(numbers) <= NEARLY:
        if bounds is None or len(numbers) < 2:
            return Interval(mean=mean, low=None, high=None)
        return bet(numbers, bounds=bounds, horizon=len(numbers)).interval
    from lightningrl_viewer.reading.summary import t_quantile  # it imports SQLAlchemy, which no trainer needs

    half = t_quantile(len(numbers) - 1, LEVEL) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    return Interval(mean=mean, low=max(low, mean - half), high=min(high, mean + half))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bet:
    """Anytime-valid interval and verdict for a mean, by betting."""

    interval: Interval
    """Interval that holds at every look at once."""
    decided_after: int | None
    """Values until the interval left out 0 for good; None = it has not."""
    verdict: Verdict
    """Verdict on the mean against 0."""


def bet(values: Sequence[float] | Numbers, *, bounds: tuple[float, float], horizon: int) -> Bet:
    """Judge the mean of bounded values that come one after the other, in any random order, after each of them.

    Against each candidate mean m a gambler stakes on "more" and another on "less", half of the money each; who is right
    by chance cannot make 1 / (1 - LEVEL) of it, however often one looks (Ville 1939). The candidates that nobody became
    rich against are the interval: the hedged capital process of Waudby-Smith & Ramdas (2023, "Estimating means of
    bounded random variables by betting", arXiv 2010.09686). Stakes are those for a test of `horizon` values in all;
    with more or fewer it holds as well, and sees less. No distribution is assumed.
    """
    low, high = bounds
    raw = np.asarray(values, dtype=np.float64)
    scaled = (raw - low) / (high - low)
    candidates = np.append(np.linspace(0.0, 1.0, GRID), (0.0 - low) / (high - low))
    is_out = _richest(scaled, candidates, horizon) >= -math.log(1.0 - LEVEL)
    ever: NDArray[np.bool_] = np.asarray(is_out.any(axis=0))
    remaining = low + (high - low) * candidates[:-1][~ever[:-1]]
    mean = float(raw.mean())
    edge = (float(remaining.min()), float(remaining.max())) if len(remaining) else (mean, mean)
    decided, verdict = None, Verdict.NOT_ENOUGH
    if ever[-1]:
        decided = int(np.argmax(is_out[:, -1])) + 1
        verdict = Verdict.BETTER if raw[:decided].mean() > 0.0 else Verdict.WORSE
    return Bet(interval=Interval(mean=mean, low=edge[0], high=edge[1]), decided_after=decided, verdict=verdict)


def _richest(values: Numbers, candidates: Numbers, horizon: int) -> Numbers:
    """Log of the hedged capital, `[after][candidate]`."""
    count = np.arange(1, len(values) + 1)
    # mean and variance before each value: those so far with one of 1/2 ahead of them, whose variance counts as 1/4
    means = (0.5 + np.cumsum(values)) / (count + 1)
    variances = (0.25 + np.cumsum((values - means) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    stakes = np.sqrt(2.0 * math.log(2.0 / (1.0 - LEVEL)) / (before * horizon))[:, None]
    with np.errstate(divide="ignore"):
        more = np.minimum(stakes, LARGEST_BET / candidates)
        less = np.minimum(stakes, LARGEST_BET / (1.0 - candidates))
    surprise = values[:, None] - candidates
    capital = np.stack([np.cumsum(np.log1p(more * surprise), axis=0), np.cumsum(np.log1p(-less * surprise), axis=0)])
    return np.asarray(capital.max(axis=0) - math.log(2.0))


def sign_flip_p(differences: Sequence[float] | Numbers) -> float:
    """P-value of a mean difference: the chance of one as large where both policies are alike, since each task's
    difference might then as well have the other sign. All flips of few differences are tried, 9,999 random ones of many
    (Fisher 1935; Phipson & Smyth 2010 for the + 1)."""
    numbers = np.asarray(differences, dtype=np.float64)
    if len(numbers) <= EXACT:
        signs = 1.0 - 2.0 * ((np.arange(2 ** len(numbers))[:, None] >> np.arange(len(numbers))) & 1)
        return float(np.mean(np.abs(signs @ numbers) >= abs(numbers.sum()) - 1e-12))
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), size=(FLIPS, len(numbers)))
    return float((1 + np.sum(np.abs(signs @ numbers) >= abs(numbers.sum()) - 1e-12)) / (FLIPS + 1))


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """P-value of two sets of runs by their ranks alone: the share of all ways to deal the runs out whose sum of ranks
    is as far from its mean (Wilcoxon 1945). Equal runs share a rank, so runs that never arrived may all be infinite."""
    values = [*first, *second]
    ranks = [
        sum(other < value for other in values) + (1 + sum(other == value for other in values)) / 2 for value in values
    ]
    doubled = [round(2 * rank) for rank in ranks]
    ways = [Counter({0: 1}), *(Counter[int]() for _ in first)]  # of so many runs: sum of their ranks -> hands
    for rank in doubled:
        for fewer, more in zip(ways[-2::-1], ways[:0:-1], strict=True):
            for total, hands in fewer.items():
                more[total + rank] += hands
    mean = len(first) * (len(values) + 1)
    seen = abs(sum(doubled[: len(first)]) - mean)
    return sum(hands for total, hands in ways[-1].items() if abs(total - mean) >= seen) / ways[-1].total()


def holm(p_values: Mapping[Question, float]) -> dict[Question, float]:
    """Correct the p-values of several questions, so that, where each below 0.05 is called different, all of it is right
    95 times in 100 (Holm 1979)."""
    corrected: dict[Question, float] = {}
    largest = 0.0
    for rank, question in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[question]))
        corrected[question] = largest
    return {question: corrected[question] for question in p_values}
