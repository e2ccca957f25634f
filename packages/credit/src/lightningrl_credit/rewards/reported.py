"""Rewards that the agent itself, or its environment, has reported to the server: of the rollout, or of its calls."""

from __future__ import annotations

from typing import Any, Final

from lightningrl.types import Task, Trajectory, Transition

__all__ = ["ReportedReward", "ReportedTurnReward"]


class ReportedReward:
    """The value reported under `name`; None where nobody reported it."""

    range: Final = (0.0, 1.0)
    """Where the recipe declares none: whoever reports holds the attempt's key, and so may the agent."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        return trajectory.reported.get(self.name)


class ReportedTurnReward:
    """The sum of what was reported of each call, or the value under `name` alone; None where nobody reported any."""

    range: Final = (-1.0, 1.0)
    """Where the recipe declares none."""

    def __init__(self, *, name: str | None = None) -> None:
        self.name = name

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return [self._of(call) for call in trajectory.transitions]

    def _of(self, call: Transition) -> float | None:
        names = call.reported if self.name is None else (self.name,)
        values = [value for name in names if (value := call.reported.get(name)) is not None]
        return sum(values) if values else None
