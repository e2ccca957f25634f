"""Whitening, after credit has been assigned: one mean and one deviation for all tokens of a step that a policy is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightningrl.advantages.baselines import mean
from lightningrl.types import Advantages, Array, TrajectoryGroup, Transition

__all__ = ["whiten"]


def whiten(groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], *, epsilon: float = 1e-8) -> tuple[Advantages, ...]:
    """Advantages with mean 0 and deviation 1 over each policy's trained tokens of all groups; calls that nobody scored stay None.

    A_t ← (A_t - mean) / (std + ε), over the global batch  (REINFORCE++, arXiv 2501.03262, eq. 8)
    """
    trained: dict[str, list[Array]] = {}
    for group, by_trajectory in zip(groups, advantages, strict=True):
        for trajectory, by_call in zip(group.members, by_trajectory, strict=True):
            for transition, credit in zip(trajectory.transitions, by_call, strict=True):
                if credit is not None and transition.trainable:
                    trained.setdefault(transition.policy, []).append(credit)
    if not trained:
        return tuple(advantages)
    tokens = {policy: np.concatenate(found).astype(np.float64) for policy, found in trained.items()}
    scales = {policy: (mean(values), float(values.std()) + epsilon) for policy, values in tokens.items()}

    def scaled(transition: Transition, credit: Array | None) -> Array | None:
        if credit is None or transition.policy not in scales:
            return credit
        middle, deviation = scales[transition.policy]
        return ((credit - middle) / deviation).astype(np.float32)

    return tuple(
        tuple(
            tuple(scaled(transition, credit) for transition, credit in zip(trajectory.transitions, by_call, strict=True))
            for trajectory, by_call in zip(group.members, by_trajectory, strict=True)
        )
        for group, by_trajectory in zip(groups, advantages, strict=True)
    )
