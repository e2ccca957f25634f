"""Whitening: one mean and one deviation for all trained tokens of a step, after credit has been assigned to its groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightningrl.types import Advantages, TrajectoryGroup

__all__ = ["whiten"]


def whiten(groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], *, epsilon: float = 1e-8) -> tuple[Advantages, ...]:
    """Advantages with mean 0 and deviation 1 over the trained tokens of all groups; calls that nobody scored stay None.

    A_t ← (A_t - mean) / (std + ε), over the global batch  (REINFORCE++, arXiv 2501.03262, eq. 8)
    """
    trained = [
        credit
        for group, by_trajectory in zip(groups, advantages, strict=True)
        for trajectory, by_call in zip(group.trajectories, by_trajectory, strict=True)
        for transition, credit in zip(trajectory.transitions, by_call, strict=True)
        if credit is not None and transition.trainable
    ]
    if not trained:
        return tuple(advantages)
    tokens = np.concatenate(trained).astype(np.float64)
    mean, deviation = float(tokens.mean()), float(tokens.std())
    return tuple(
        tuple(
            tuple(None if credit is None else ((credit - mean) / (deviation + epsilon)).astype(np.float32) for credit in by_call)
            for by_call in by_trajectory
        )
        for by_trajectory in advantages
    )
