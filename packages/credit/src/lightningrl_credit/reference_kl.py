"""The KL to the starting policy in the reward: each sampled token costs how much likelier it is now than at the start.

    r_j = -β k1_j,  k1_j = log π_θ(y_j | x, y_<j) - log π_ref(y_j | x, y_<j)        (REINFORCE++, arXiv 2501.03262, §3;
    A_j = Σ_{i ≥ j} r_i    of the call's own tokens and of those calls that came of it   PPO, arXiv 2203.02155, §3.5)

Its expectation is -β times the gradient of the reverse KL(π_θ ‖ π_ref) of the whole rollout. It is a part of a sum, the
other being the recipe's credit: whitening comes after, over both. A recipe has it by `learner.kl_estimator = "k1"`. The
numbers are evidence: no gradient goes through them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.errors import PluginError
from lightningrl.protocols import Services
from lightningrl.types import Advantages, Array, Evidence, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.rewards.lineages import following
from lightningrl_credit.teacher import log_ratio

__all__ = ["ReferenceKl"]

_NAME = "kl_reference"


class ReferenceKl:
    """Each token earns -β k1 of itself and of all that came of it, whatever the outcome."""

    requires: frozenset[str] = frozenset({"logprobs"})

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: β by policy; the calls of others cost nothing."""
        self.weights = dict(weights)

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Find `kl_reference`, k1 of each token; 0.0 where nobody chose it, and in calls that cost nothing."""
        by_call = await asyncio.gather(*(self._k1(call, ask) for call in trajectory.transitions))
        return Evidence(tokens={_NAME: tuple(by_call)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return tuple(
            (None,) * len(trajectory.transitions) if trajectory.reward is None else self._pay(trajectory)
            for trajectory in group.trajectories
        )

    def assign_by_role(self, group: TrajectoryGroup) -> Advantages:
        """The same: nobody is compared."""
        return self.assign(group)

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /) -> dict[str, float]:
        """Measure `kl_reference`: the mean of k1 over a step's trained tokens."""
        tokens = [
            k1[call.chosen]
            for group in groups
            for trajectory in group.trajectories
            if trajectory.reward is not None and trajectory.evidence is not None
            for call, k1 in zip(trajectory.transitions, _read(trajectory), strict=True)
            if call.trainable and call.policy in self.weights
        ]
        return {_NAME: float(np.concatenate(tokens).mean(dtype=np.float64))} if tokens else {}

    async def _k1(self, call: Transition, ask: Services) -> Array:
        if call.policy not in self.weights:
            return np.zeros(len(call.completion_ids), np.float32)
        gains = await log_ratio(call, ask, policy=call.policy, reference=True)
        return np.where(call.chosen, -gains, 0.0).astype(np.float32)

    def _pay(self, trajectory: Trajectory) -> tuple[Array | None, ...]:
        calls = trajectory.transitions
        costs = [
            self.weights.get(call.policy, 0.0) * k1.astype(np.float64)
            for call, k1 in zip(calls, _read(trajectory), strict=True)
        ]
        sums = np.array([cost.sum() for cost in costs])
        return tuple(
            (-(np.cumsum(costs[t][::-1])[::-1] + sums[later[1:]].sum())).astype(np.float32)
            if calls[t].trainable
            else None
            for t, later in enumerate(following(calls))
        )


def _read(trajectory: Trajectory) -> Sequence[Array]:
    if not trajectory.transitions:
        return ()
    if trajectory.evidence is None or _NAME not in trajectory.evidence.tokens:
        raise PluginError(
            f"rollout {trajectory.rollout_id!r} has a reward and no {_NAME!r}; let `score` find it before `assign`"
        )
    return trajectory.evidence.tokens[_NAME]
