"""Statistics of runs and tasks.

rewards[task][sample] ─► mean per task ─► interval of the mean      (t over tasks: a task's samples are no new tasks)
two policies, same tasks ─► difference per task ─► interval, and a betting test that may be looked at after every task
two settings, some seeds each ─► Welch's interval of their difference
slices ─► a p-value each ─► corrected for their number (Holm)

Of two policies tasks are the sample and policies the treatment: the results hold for tasks like these. Of two settings
seeds are the sample: the results hold for other seeds of the same recipe, tasks and policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from statistics import fmean
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "LEVEL",
    "NEARLY",
    "Bet",
    "Interval",
    "Verdict",
    "bet",
    "holm",
    "mean_interval",
    "pass_at_k",
    "rank",
    "rank_sum_p",
    "sign_flip_p",
    "smooth",
    "t_quantile",
    "welch_interval",
    "wilson",
]

Question = TypeVar("Question")
Numbers = NDArray[np.float64]
LEVEL = 0.95
"""Probability with which an interval holds."""
Z = 1.959964
"""The z that |Z| of a normal number stays below with 95 %."""
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

    @property
    def is_shown(self) -> bool:
        """True where a difference is shown: the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)

    def __format__(self, number: str) -> str:
        """`0.512 [0.401, 0.623]`, each written as `number` says; without ends where there are none."""
        if self.low is None or self.high is None:
            return format(self.mean, number)
        return f"{self.mean:{number}} [{self.low:{number}}, {self.high:{number}}]"


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples passes, without bias. `k` is at most `samples`."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} wants at least {k} samples of a task, and there are {samples}")
    # 1 - C(n - c, k) / C(n, k)  (Chen et al. 2021, arXiv 2107.03374, eq. 1)
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


@lru_cache(maxsize=1024)
def t_quantile(freedom: float, level: float) -> float:
    """The t that |T| stays below with probability `level`."""
    # With t = √ν tan θ the density of T is cos^(ν-1) θ on (-π/2, π/2): smooth and bounded, so a sum over a grid is
    # exact enough. cos is far below its top beyond some 12 / √ν.
    angles = np.linspace(0.0, min(math.pi / 2, 12.0 / math.sqrt(freedom)), 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, below / below[-1], angles)))


def mean_interval(
    values: Sequence[float] | Numbers, *, bounds: tuple[float, float] | None = None, grain: float | None = None
) -> Interval:
    """Mean of independent values with Student's t interval, cut where `bounds`, the least and most that a value can be,
    end. Of equal values t would be certain: then bounds give the interval of `bet`; without them there is none.

    `grain` is the least by which two values can differ: a mean of 16 answers that are right or wrong moves by 1/16.
    Values that happen to agree leave its rounding, grain² / 12, as their variance (Sheppard 1898).
    """
    numbers = np.asarray(values, dtype=np.float64)
    mean, count = fmean(numbers), len(numbers)
    if count < 2:
        return Interval(mean=mean, low=None, high=None)
    if grain is None and np.ptp(numbers) <= NEARLY:
        if bounds is None:
            return Interval(mean=mean, low=None, high=None)
        return bet(numbers, bounds=bounds, horizon=count).interval
    half = t_quantile(count - 1, LEVEL) * math.sqrt(_variance(numbers, grain or 0.0))
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    return Interval(mean=mean, low=max(low, mean - half), high=min(high, mean + half))


def welch_interval(
    first: Sequence[float], second: Sequence[float], *, grain: float = 0.0, level: float = LEVEL
) -> Interval:
    """Interval of the difference of two means, whose variances may differ (Welch 1947, Biometrika 34). Without an
    interval where either has fewer than two values. `grain`: as for `mean_interval`.

    Colas, Sigaud & Oudeyer (2018, "How Many Random Seeds?", arXiv 1806.08295) advise it for runs of two methods.
    """
    mean = fmean(first) - fmean(second)
    if len(first) < 2 or len(second) < 2:
        return Interval(mean=mean, low=None, high=None)
    variances = [_variance(np.asarray(values, dtype=np.float64), grain) for values in (first, second)]
    if not sum(variances):
        return Interval(mean=mean, low=mean, high=mean)
    counts = (len(first), len(second))
    freedom = sum(variances) ** 2 / sum(part**2 / (n - 1) for part, n in zip(variances, counts, strict=True))
    half = t_quantile(freedom, level) * math.sqrt(sum(variances))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def _variance(values: Numbers, grain: float) -> float:
    """Variance of the mean of values that differ by `grain` at least; exactly 0 where they are equal without one."""
    variance = float(values.var(ddof=1)) if np.ptp(values) else 0.0
    return max(variance, grain**2 / 12) / len(values)


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` draws, by Wilson (1927): within 0 and 1, also of all or none."""
    # centre = (p + z²/2n) / (1 + z²/n), half = z √(p(1 - p)/n + z²/4n²) / (1 + z²/n)
    square = Z * Z / count
    centre, half = share + square / 2, Z * math.sqrt(max(0.0, share * (1 - share)) / count + square / (4 * count))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))


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


def rank(values: ArrayLike) -> Numbers:
    """Ranks of values, from 1; equal ones share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[place])


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """P-value of two sets of runs by their ranks alone: the share of all ways to deal the runs out whose sum of ranks
    is as far from its mean (Wilcoxon 1945). Equal runs share a rank, so runs that never arrived may all be infinite."""
    values = [*first, *second]
    doubled = (2 * rank(values)).astype(int).tolist()
    ways = [Counter({0: 1}), *(Counter[int]() for _ in first)]  # of so many runs: sum of their ranks -> hands
    for twice in doubled:
        for fewer, more in zip(ways[-2::-1], ways[:0:-1], strict=True):
            for total, hands in fewer.items():
                more[total + twice] += hands
    mean = len(first) * (len(values) + 1)
    seen = abs(sum(doubled[: len(first)]) - mean)
    return sum(hands for total, hands in ways[-1].items() if abs(total - mean) >= seen) / ways[-1].total()


def holm(p_values: Mapping[Question, float]) -> dict[Question, float]:
    """Correct the p-values of several questions, so that, where each below 0.05 is called different, all of it is right
    95 times in 100 (Holm 1979)."""
    corrected: dict[Question, float] = {}
    largest = 0.0
    for place, question in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[question]))
        corrected[question] = largest
    return {question: corrected[question] for question in p_values}


def smooth(values: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential mean of the values so far, unbiased at its start: each weighs `smoothing` times the one
    after it."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean, weight = smoothing * mean + value, smoothing * weight + 1.0
        means.append(mean / weight)
    return means
