"""Rewards of a conversation: by its outcome, and by call.

outcome   all_right · share (of calls that are right) · valid (share that the calculator could read) · noise
by call   TurnRight, whose sum over a rollout is `share` · ToolOk, whose sum is 2·size·calls·`valid`, up to a constant
"""

from __future__ import annotations

import random

from desk import REFUSED

from lightningrl import Task, Trajectory

__all__ = ["ToolOk", "TurnRight", "all_right", "noise", "share", "valid"]


def all_right(task: Task, output: str | None, trajectory: Trajectory) -> float:
    """1.0 where each of the six calls is right."""
    return min(rights(task, output))


def share(task: Task, output: str | None, trajectory: Trajectory) -> float:
    """Share of the six calls that are right."""
    right = rights(task, output)
    return sum(right) / len(right)


def valid(task: Task, output: str | None, trajectory: Trajectory | None = None) -> float:
    """Share of the six calls that the calculator could read, right or wrong."""
    calls = len(str(task.answer).split(","))
    return sum(value != REFUSED for value in values(output)) / calls


def noise(task: Task, output: str | None, trajectory: Trajectory) -> float:
    """A number drawn from 0, 1/6 … 1 by the rollout's name and task: as large as `share`, and about nothing."""
    return random.Random(f"{trajectory.rollout_id} {task.id}").randint(0, 6) / 6


class TurnRight:
    """Pays each call its part of `share`."""

    def __call__(self, trajectory: Trajectory) -> list[float | None]:
        right = rights(trajectory.task, trajectory.output)
        paid: list[float | None] = [value / len(right) for value in right]
        return paid[: len(trajectory.transitions)]


class ToolOk:
    """Pays each call for input that the calculator could read, as `tool_status` does."""

    def __init__(self, *, size: float = 0.1) -> None:
        self.size = size

    def __call__(self, trajectory: Trajectory) -> list[float | None]:
        paid: list[float | None] = [
            -self.size if value == REFUSED else self.size for value in values(trajectory.output)
        ]
        return (paid + [None] * len(trajectory.transitions))[: len(trajectory.transitions)]


def rights(task: Task, output: str | None) -> list[float]:
    """1.0 for each call that gave the right value."""
    wanted = str(task.answer).split(",")
    given = [*values(output), *[REFUSED] * len(wanted)]
    return [float(value == want) for value, want in zip(given, wanted, strict=False)]


def values(output: str | None) -> list[str]:
    """The calculator's values; none of a rollout that broke."""
    return (output or "").split(",") if output else []
