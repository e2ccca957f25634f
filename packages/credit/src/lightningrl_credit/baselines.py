"""Baselines: returns of several trajectories → advantages, each weighing the same; and checked options of assigners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, are_equal, mean
from lightningrl.errors import ConfigError

__all__ = [
    "DIVIDING",
    "Baseline",
    "baseline_advantages",
    "check_baseline",
    "check_gamma",
    "options_of_kind",
    "undivided",
]

Baseline = Literal["grpo", "dr_grpo", "rloo", "maxrl", "opo", "none"]
DIVIDING: Final[frozenset[Baseline]] = frozenset({"grpo", "maxrl"})
"""Baselines that divide by the returns' own deviation or mean: a tenth of the returns has the same advantages."""


def check_baseline(baseline: str) -> None:
    """Raise ConfigError when there is no such baseline."""
    if baseline not in get_args(Baseline):
        raise ConfigError(f"no baseline named {baseline!r}; there are: {', '.join(get_args(Baseline))}")


def undivided(baseline: Baseline) -> Baseline:
    """The same baseline without its division, for what stands beside another part in a sum and keeps its size."""
    return "dr_grpo" if baseline in DIVIDING else baseline


def baseline_advantages(
    returns: FloatArray,
    owners: NDArray[np.intp],
    *,
    baseline: Baseline,
    epsilon: float = 1e-6,
    lengths: FloatArray | None = None,
) -> FloatArray:
    """Advantages of `returns[n]`, where `owners[n]` is the trajectory (0…N-1, none empty) that return n belongs to.

    Mean and standard deviation weigh each trajectory once, split evenly over its returns, so long episodes count no
    more than short ones; with one return per trajectory these are the ordinary ones. The standard deviation is the
    sample's (ddof = 1), as in verl and TRL; ε is verl's. `lengths`: sampled tokens of each return's call, which `opo`
    weighs by; None = equal. One trajectory, or returns equal but for rounding, give exact zeros, except with `none`.

    Raises ConfigError where `maxrl` has a return below 0.
    """
    if baseline == "none":
        return returns.copy()
    counts = np.bincount(owners).astype(np.float64)
    n = len(counts)
    if n < 2 or are_equal(returns):
        return np.zeros_like(returns)
    means: FloatArray = np.bincount(owners, weights=returns) / counts
    if baseline == "rloo":
        others: FloatArray = (means.sum() - means[owners]) / (n - 1)
        return returns - others  # A_i = R_i - 1/(N-1) Σ_{j≠i} R_j  (RLOO)
    if baseline == "opo":
        tokens = np.ones(n) if lengths is None or not lengths.any() else np.bincount(owners, weights=lengths)
        # A_i = R_i - Σ_j ℓ_j R_j / Σ_j ℓ_j  (OPO, arXiv 2505.23585)
        # measured from a return of the set, so that near returns round to nothing
        least = means.min()
        middle = float(tokens @ (means - least)) / float(tokens.sum())
        weighed: FloatArray = returns - least - middle
        return weighed
    middle = mean(means)
    centred: FloatArray = returns - middle
    if baseline == "dr_grpo":
        return centred  # A_i = R_i - μ  (Dr. GRPO)
    if baseline == "maxrl":
        if (least := float(returns.min())) < 0.0:
            raise ConfigError(
                f"baseline 'maxrl' divides by the mean return, and one is {least:g}; "
                "reward with 0 or more, or take 'grpo'"
            )
        return centred / (middle + epsilon)  # A_i = (R_i - μ) / (μ + ε)  (MaxRL, arXiv 2602.02710, algorithm 1)
    variance = float((centred**2 / counts[owners]).sum()) / (n - 1)
    return centred / (math.sqrt(variance) + epsilon)  # A_i = (R_i - μ) / (σ + ε)  (GRPO, outcome supervision)


def check_gamma(name: str, gamma: float) -> None:
    """Raise ConfigError for what is no discount."""
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"{name} {gamma!r} is not between 0 and 1; try 0.95")


def options_of_kind(use: str, key: str, kind: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Select the given (not None) options of one kind of an assigner. Raises ConfigError for options of another."""
    if kind not in options:
        raise ConfigError(f"credit assigner {use!r}: {key} {kind!r} is none of {', '.join(map(repr, options))}")
    given = {name: {key: value for key, value in some.items() if value is not None} for name, some in options.items()}
    if unread := [name for other, some in given.items() if other != kind for name in some]:
        raise ConfigError(
            f"credit assigner {use!r} with {key} = {kind!r} does not read {', '.join(unread)}; leave it out"
        )
    return given[kind]
