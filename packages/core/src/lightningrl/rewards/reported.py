"""Rewards that the agent itself, or its environment, has reported to the server: of the rollout, or of its calls."""

from __future__ import annotations

from typing import Any

from lightningrl.types import Task, Trajectory

__all__ = ["Reported", "ReportedOfCalls"]


class Reported:
    """The value reported under `name`; None where nobody reported it."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        return trajectory.rewards.get(self.name)


class ReportedOfCalls:
    """What was reported of single calls. It adds nothing: those values are on the calls already, under their own names. A recipe that
    names it says that calls have rewards, which credit per turn asks for."""

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return [None] * len(trajectory.transitions)
