"""Plugin of this distribution: the task source `reasoning_gym`. The library is imported when tasks are drawn."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_tasks"]


@hookimpl
def lightningrl_tasks() -> Iterable[Plugin]:
    from lightningrl_tasks_reasoning_gym.source import ReasoningGym  # it imports numpy

    yield Plugin(
        name="reasoning_gym",
        summary="reasoning-gym: questions of a hundred generators, each with its own check",
        factory=ReasoningGym,
    )
