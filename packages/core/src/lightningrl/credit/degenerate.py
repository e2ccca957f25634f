"""Groups that teach nothing."""

from __future__ import annotations

from lightningrl.types import TrajectoryGroup

__all__ = ["is_degenerate"]


def is_degenerate(group: TrajectoryGroup) -> bool:
    """Whether the group's scored trajectories all have one reward (or there are fewer than two of them), so that every
    group-relative advantage of the outcome is 0.0. Turn rewards may still differ."""
    return len({trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None}) < 2
