"""Whether a group teaches anything."""

from __future__ import annotations

from lightningrl.types import Advantages, TrajectoryGroup

__all__ = ["has_signal"]

_ROUNDING = 1e-9
"""Advantages below this share of the group's largest reward are what rounding left of equal ones."""


def has_signal(group: TrajectoryGroup, advantages: Advantages) -> bool:
    """Whether some trained call has an advantage that is not 0, nor a rounding of 0 beside the rewards of the group."""
    rewards = [one.reward for one in group.members]
    rewards += [value for one in group.members for call in one.transitions for value in call.rewards.values()]
    least = _ROUNDING * max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    return any(
        credit is not None and call.trainable and bool((abs(credit) > least).any())
        for trajectory, calls in zip(group.members, advantages, strict=True)
        for call, credit in zip(trajectory.transitions, calls, strict=True)
    )
