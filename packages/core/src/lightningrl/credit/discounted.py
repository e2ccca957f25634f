"""Discounted turn returns: each call is credited with its own reward and with what came after it.

    G_t = Σ_{k ≥ t} γ^{k-t} r_k,   r_last += R        A = baseline({G})     (arXiv 2507.11948; AReaL)

With γ = 1 and no turn rewards this is identical assignment.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lightningrl.credit.baselines import Baseline, FloatArray, check_baseline
from lightningrl.credit.spread import spread
from lightningrl.errors import ConfigError
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup, Transition

__all__ = ["DiscountedReturns"]


class DiscountedReturns:
    """Returns-to-go over the calls of an episode, in order of arrival; a discount never crosses branches of one history."""

    requires: frozenset[str] = frozenset({"group", "turn_rewards"})

    def __init__(
        self, *, gamma: float = 1.0, weights: Mapping[str, float] | None = None, baseline: Baseline = "grpo", epsilon: float = 1e-6
    ) -> None:
        """`gamma` discounts per call (2507.11948 uses 0.4, AReaL 0.9). `weights` weighs turn rewards by name; 1.0 for the others."""
        check_baseline(baseline)
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"credit assigner 'discounted': gamma {gamma!r} is not between 0 and 1; try 0.95")
        self.gamma = gamma
        self.weights = dict(weights or {})
        self.baseline: Baseline = baseline
        self.epsilon = epsilon

    def returns(self, trajectory: Trajectory) -> FloatArray:
        """G of each transition. A turn reward of None adds nothing; the episode's reward arrives with the last call that counts."""
        transitions = trajectory.transitions
        outcome = float(trajectory.reward or 0.0)
        rewards = [self._turn_reward(transition) for transition in transitions]
        lineages = _lineages(transitions)
        returns = np.zeros(len(transitions))
        if lineages is None:
            value = outcome
            for t in reversed(range(len(transitions))):
                value = rewards[t] + (self.gamma * value if t < len(transitions) - 1 else value)
                returns[t] = value
            return returns
        for t in range(len(transitions)):
            later = [k for k in range(t, len(transitions)) if not _is_other_branch(t, k, lineages)]
            discounts = self.gamma ** np.arange(len(later))
            returns[t] = float(discounts @ np.array([rewards[k] for k in later])) + discounts[-1] * outcome
        return returns

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return spread(group, self)

    def _turn_reward(self, transition: Transition) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in transition.rewards.items() if value is not None)


def _lineages(transitions: tuple[Transition, ...]) -> list[tuple[int, ...]] | None:
    """For each transition its ancestors from the root, itself last; None where no history branches."""
    position = {transition.id: t for t, transition in enumerate(transitions)}
    parents = [position.get(transition.parent_id or "", -1) for transition in transitions]
    known = [parent for t, parent in enumerate(parents) if 0 <= parent < t]
    if len(known) == len(set(known)):
        return None
    lineages: list[tuple[int, ...]] = []
    for t, parent in enumerate(parents):
        lineages.append((*(lineages[parent] if 0 <= parent < t else ()), t))
    return lineages


def _is_other_branch(t: int, k: int, lineages: list[tuple[int, ...]]) -> bool:
    """Whether call k, later than t, grew from the same history as t without having t in its past."""
    return lineages[t][0] == lineages[k][0] and t not in lineages[k]
