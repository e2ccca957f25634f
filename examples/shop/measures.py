"""What the learning table says of a validation, beside its reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Column of the table -> value. One that ran in circles is a wrong one."""
    count = max(1, len(trajectories))
    ended = [str(rollout.outcome) for rollout in trajectories]
    return {
        "reward": sum(rollout.reward or 0.0 for rollout in trajectories) / count,
        "ran in circles": ended.count("agent_error") / count,
        "calls per rollout": sum(len(rollout.transitions) for rollout in trajectories) / count,
    }
