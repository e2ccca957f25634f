"""Distillation on policy: a teacher says of each token that the policy sampled how likely it would have been.

    student's tokens y ─► log π_T(y_j | prompt, y_<j) of a frozen policy of the run  ─► evidence

    A_j = log π_T(y_j | x, y_<j) - log π_θ(y_j | x, y_<j)

Its expectation is the gradient of the reverse KL divergence KL(π_θ ‖ π_T) at each token, on prefixes that the student
itself sampled: GKD with reverse KL and λ = 1 (Agarwal et al. 2023, arXiv 2306.13649), estimated from the sampled token
alone, as in "On-Policy Distillation" (Thinking Machines Lab, 2025). The mean falls to 0 where both agree. Rewards are
another part of a `sum`. The teacher's numbers are evidence: no gradient goes through them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lightningrl.errors import ConfigError, PluginError
from lightningrl.protocols import Services
from lightningrl.types import Advantages, Array, Evidence, Trajectory, TrajectoryGroup, Transition

__all__ = ["TeacherCredit", "log_ratio"]

_NAME = "teacher"


@dataclass(kw_only=True, eq=False)
class TeacherCredit:
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
        gains = await asyncio.gather(*(log_ratio(call, ask, policy=self.teacher) for call in calls))
        return Evidence(tokens={_NAME: tuple(gains)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return tuple(
            (None,) * len(trajectory.transitions)
            if trajectory.reward is None
            else tuple(
                np.where(call.chosen, gain, 0.0).astype(np.float32) if call.trainable else None
                for call, gain in zip(trajectory.transitions, _gains_of(trajectory), strict=True)
            )
            for trajectory in group.trajectories
        )

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], /) -> dict[str, float]:
        """Measure `reverse_kl`: the mean over a step's trained tokens of the policy's log-prob less the teacher's."""
        scored = [
            gain[call.chosen]
            for group in groups
            for trajectory in group.trajectories
            if trajectory.reward is not None and trajectory.evidence is not None
            for call, gain in zip(trajectory.transitions, _gains_of(trajectory), strict=True)
            if call.trainable
        ]
        tokens = np.concatenate(scored) if scored else np.zeros(0, np.float32)
        return {"reverse_kl": -float(tokens.mean(dtype=np.float64))} if len(tokens) else {}


async def log_ratio(call: Transition, ask: Services, *, policy: str, reference: bool = False) -> Array:
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


def _gains_of(trajectory: Trajectory) -> Sequence[Array]:
    if not trajectory.transitions:
        return ()
    if trajectory.evidence is None or _NAME not in trajectory.evidence.tokens:
        raise PluginError(
            f"rollout {trajectory.rollout_id!r} has a reward and nothing of a teacher; let `score` ask it before "
            "`assign`"
        )
    return trajectory.evidence.tokens[_NAME]
