"""Identical assignment, the Agent Lightning paper's: every call of an episode gets the episode's return. Source: arXiv
2508.03680 (LightningRL); the token level is left to the baseline of the single-turn method below it."""

from __future__ import annotations

import numpy as np

from lightningrl.advantages import FloatArray
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup
from lightningrl_credit.baselines import Baseline, check_baseline
from lightningrl_credit.spread import spread

__all__ = ["IdenticalAssignment", "with_epsilon", "without_epsilon"]


class IdenticalAssignment:
    """A_{i,t} = baseline(R_i) for each call t of episode i."""

    requires: frozenset[str] = frozenset({"group"})

    def __init__(self, *, baseline: Baseline = "grpo", epsilon: float = 1e-6) -> None:
        """`baseline`: `grpo` (R - μ)/(σ + ε), `dr_grpo` R - μ, `rloo` R - mean of the others, `none` R."""
        check_baseline(baseline)
        self.baseline: Baseline = baseline
        self.epsilon = epsilon
        if baseline == "none":
            self.requires = frozenset()

    def returns(self, trajectory: Trajectory) -> FloatArray:
        """The episode's reward, once for each call."""
        return np.full(len(trajectory.transitions), trajectory.reward, dtype=np.float64)

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return spread(group, self)


def with_epsilon(baseline: Baseline, *, epsilon: float = 1e-6) -> IdenticalAssignment:
    """Build an assigner whose baseline divides by something, as a recipe names it."""
    return IdenticalAssignment(baseline=baseline, epsilon=epsilon)


def without_epsilon(baseline: Baseline) -> IdenticalAssignment:
    """Build an assigner whose baseline divides by nothing."""
    return IdenticalAssignment(baseline=baseline)
