"""Credit of tokens by log-probs of another policy: a teacher's, or those that the policy itself started from.

    student's tokens y ─► log π_T(y_j | prompt, y_<j) of a frozen policy of the run  ─► evidence

    A_j = log π_T(y_j | x, y_<j) - log π_θ(y_j | x, y_<j)

Its expectation is the gradient of the reverse KL divergence KL(π_θ ‖ π_T) at each token, on prefixes that the student
itself sampled: GKD with reverse KL and λ = 1 (Agarwal et al. 2023, arXiv 2306.13649), estimated from the sampled token
alone, as in "On-Policy Distillation" (Thinking Machines Lab, 2025). The mean falls to 0 where both agree. Rewards are
another part of a `sum`.

The KL to the starting policy in the reward: each sampled token costs how much likelier it is now than at the start.

    r_j = -β k1_j,  k1_j = log π_θ(y_j | x, y_<j) - log π_ref(y_j | x, y_<j)        (REINFORCE++, arXiv 2501.03262, §3;
    A_j = Σ_{i ≥ j} r_i    of the call's own tokens and of those calls that came of it   PPO, arXiv 2203.02155, §3.5)

Its expectation is -β times the gradient of the reverse KL(π_θ ‖ π_ref) of the whole rollout. It is a part of a sum, the
other being the recipe's credit: whitening comes after, over both. A recipe has it by `learner.kl_estimator = "k1"`.

The numbers are evidence: no gradient goes through them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightningrl.errors import ConfigError, PluginError
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.types import Advantages, Array, Evidence, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.rewards.lineages import following

__all__ = ["ReferenceKl", "TeacherCredit"]

_TEACHER = "teacher"
_REFERENCE = "kl_reference"


@dataclass(kw_only=True, eq=False)
class TeacherCredit(CreditAssigner):
    """Each token earns how much likelier a teacher finds it than the policy did. The rollout's reward counts nothing,
    but a rollout without one is left out, as everywhere."""

    teacher: str = "teacher"
    """A policy of the recipe that is not trained, with the tokenizer of those that are."""
    requires: frozenset[str] = field(init=False, default=frozenset({"logprobs"}))

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ConfigError("credit assigner 'teacher': `teacher` is empty; name a policy, as in [policies.teacher]")

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Find `teacher`, the teacher's log-prob of each token less the policy's; 0.0 in calls that are not trained."""
        calls = trajectory.transitions
        gains = await asyncio.gather(*(_log_ratio(call, ask, policy=self.teacher) for call in calls))
        return Evidence(tokens={_TEACHER: tuple(gains)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return tuple(
            (None,) * len(trajectory.transitions)
            if trajectory.reward is None
            else tuple(
                np.where(call.chosen, gain, 0.0).astype(np.float32) if call.trainable else None
                for call, gain in zip(trajectory.transitions, _ratios(trajectory, _TEACHER), strict=True)
            )
            for trajectory in group.trajectories
        )

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /) -> dict[str, float]:
        """Measure `reverse_kl`: the mean over a step's trained tokens of the policy's log-prob less the teacher's."""
        mean = _mean_of_step(groups, _TEACHER, lambda call: call.trainable)
        return {} if mean is None else {"reverse_kl": -mean}


class ReferenceKl(CreditAssigner):
    """Each token earns -β k1 of itself and of all that came of it, whatever the outcome."""

    requires = frozenset({"logprobs"})

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: β by policy; the calls of others cost nothing."""
        self.weights = dict(weights)

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        """Find `kl_reference`, k1 of each token; 0.0 where nobody chose it, and in calls that cost nothing."""
        by_call = await asyncio.gather(*(self._k1(call, ask) for call in trajectory.transitions))
        return Evidence(tokens={_REFERENCE: tuple(by_call)})

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
        mean = _mean_of_step(groups, _REFERENCE, lambda call: call.trainable and call.policy in self.weights)
        return {} if mean is None else {_REFERENCE: mean}

    async def _k1(self, call: Transition, ask: Services) -> Array:
        if call.policy not in self.weights:
            return np.zeros(len(call.completion_ids), np.float32)
        gains = await _log_ratio(call, ask, policy=call.policy, reference=True)
        return np.where(call.chosen, -gains, 0.0).astype(np.float32)

    def _pay(self, trajectory: Trajectory) -> tuple[Array | None, ...]:
        calls = trajectory.transitions
        costs = [
            self.weights.get(call.policy, 0.0) * k1.astype(np.float64)
            for call, k1 in zip(calls, _ratios(trajectory, _REFERENCE), strict=True)
        ]
        sums = np.array([cost.sum() for cost in costs])
        return tuple(
            (-(np.cumsum(costs[t][::-1])[::-1] + sums[later[1:]].sum())).astype(np.float32)
            if calls[t].trainable
            else None
            for t, later in enumerate(following(calls))
        )


async def _log_ratio(call: Transition, ask: Services, *, policy: str, reference: bool = False) -> Array:
    """Log-prob of each token by `policy`, or by the weights that it started from (`reference`), less that by the policy
    that sampled it; 0.0 in calls that are not trained."""
    tokens, context = call.completion_ids, call.prompt_ids
    if not call.trainable:
        return np.zeros(len(tokens), np.float32)
    if _is_plain(call):
        own, others = call.logprobs, await ask.logprobs(tokens, context, policy=policy, reference=reference)
    else:  # the recorded log-probs are those of another distribution than the policy's
        own, others = await asyncio.gather(
            ask.logprobs(tokens, context, policy=call.policy),
            ask.logprobs(tokens, context, policy=policy, reference=reference),
        )
    return np.asarray(others - own, np.float32)


def _is_plain(call: Transition) -> bool:
    """True where a call was sampled from the policy's whole distribution at temperature 1."""
    return call.sampling.temperature == 1.0 and not call.sampling.is_cut


def _ratios(trajectory: Trajectory, name: str) -> Sequence[Array]:
    """Read a number of each token of a rewarded trajectory. Raises PluginError where there is none."""
    if not trajectory.transitions:
        return ()
    if trajectory.evidence is None or name not in trajectory.evidence.tokens:
        raise PluginError(
            f"rollout {trajectory.rollout_id!r} has a reward and no {name!r}; let `score` find it before `assign`"
        )
    return trajectory.evidence.tokens[name]


def _mean_of_step(
    groups: Sequence[TrajectoryGroup], name: str, is_counted: Callable[[Transition], bool]
) -> float | None:
    """Mean over the tokens that the policy chose; None where there are none."""
    tokens = [
        ratios[call.chosen]
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None and trajectory.evidence is not None
        for call, ratios in zip(trajectory.transitions, _ratios(trajectory, name), strict=True)
        if is_counted(call)
    ]
    values = np.concatenate([np.zeros(0, np.float32), *tokens])
    return float(values.mean(dtype=np.float64)) if len(values) else None
