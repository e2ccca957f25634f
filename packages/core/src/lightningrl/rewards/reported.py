"""A reward that the agent itself, or its environment, has reported to the server."""

from __future__ import annotations

from typing import Any

from lightningrl.types import Task, Trajectory

__all__ = ["Reported"]


class Reported:
    """The value reported under `name`; None where nobody reported it."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        return trajectory.rewards.get(self.name)
