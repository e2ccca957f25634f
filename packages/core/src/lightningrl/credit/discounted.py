"""Discounted credit: each call is credited with its own reward and with what came after it.

    outcome  A^R_{i,t} = γ^{T_i - t} · baseline({R_j})_i          compared over the group's rollouts first, then discounted
    turns    A^G_{i,t} = baseline({G_{j,t}})_i                    compared with the same turn of the others
             G_{i,t} = Σ_{k ≥ t} γ^{k-t} r_{i,k}                  (arXiv 2507.11948; AReaL)
    A = A^R + A^G

Turn rewards and the outcome have baselines of their own, as in MT-GRPO (arXiv 2505.11821) and ReBN (GEM, arXiv
2510.01051): one mean over the discounted returns of all turns would tell the early turns of four equal successes that they
were bad, by their position alone. With γ = 1 and no turn rewards this is identical assignment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.credit.baselines import Baseline, FloatArray, check_baseline
from lightningrl.credit.spread import Channel, spread
from lightningrl.errors import ConfigError
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup, Transition

__all__ = ["DiscountedReturns"]


class DiscountedReturns:
    """Turn rewards to go and a discounted outcome, over the calls of an episode in order of arrival.

    A discount never crosses branches of one history, nor the choices of one call (`n` > 1).
    """

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
        """G of each call, with the outcome at the last one that came of it. A turn reward of None adds nothing."""
        outcome, turns = self.channels(trajectory)
        return turns.returns + outcome.factors * outcome.returns

    def channels(self, trajectory: Trajectory) -> tuple[Channel, Channel]:
        """Outcome and turn rewards."""
        transitions = trajectory.transitions
        count = len(transitions)
        rewards = np.array([self._turn_reward(transition) for transition in transitions])
        following = _following(transitions)
        turns = np.zeros(count, dtype=np.intp)
        for later in following:
            turns[later[1:]] += 1
        discounts = [self.gamma ** np.arange(len(later)) for later in following]
        until_the_end = np.array([discount[-1] for discount in discounts])
        outcome = Channel(returns=np.full(count, float(trajectory.reward or 0.0)), factors=until_the_end, turns=None)
        to_go = np.array([float(discount @ rewards[later]) for discount, later in zip(discounts, following, strict=True)])
        return outcome, Channel(returns=to_go, factors=np.ones(count), turns=turns)

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return spread(group, self)

    def _turn_reward(self, transition: Transition) -> float:
        return sum(self.weights.get(name, 1.0) * value for name, value in transition.rewards.items() if value is not None)


def _following(transitions: Sequence[Transition]) -> list[list[int]]:
    """For each call the calls that came of it, itself first: all later ones but those that grew beside it from one root.

    A root is a history's first call. The choices of one call, which share prompt and start, have a root that is none of them:

        main ─► left                  following(main) = main left right        following(left) = left
             └► right                 following(right) = right
    """
    count = len(transitions)
    position = {transition.id: t for t, transition in enumerate(transitions)}
    roots: dict[object, int] = {}
    origins: list[int] = []
    """Of each call its parent, or its root, numbered from -1 downwards."""
    for t, call in enumerate(transitions):
        parent = position.get(call.parent_id or "", t)
        request = (call.agent, call.policy, call.started_at, call.prompt_ids.tobytes())
        origins.append(parent if parent < t else roots.setdefault(request, -1 - len(roots)))
    if len(set(origins)) == count:  # nothing branches
        return [list(range(t, count)) for t in range(count)]
    lineages: list[tuple[int, ...]] = []
    """Of each call its root, then its ancestors, itself last."""
    for t, origin in enumerate(origins):
        lineages.append((*(lineages[origin] if origin >= 0 else (origin,)), t))
    return [[k for k in range(t, count) if lineages[k][0] != lineages[t][0] or t in lineages[k]] for t in range(count)]
