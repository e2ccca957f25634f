"""A forecast of a step, before the first: from the speed that backends measured, and from what a validation's rollouts sampled.

step = rollouts · (sampled ÷ tokens sampled a second + read ÷ tokens read a second + rows ÷ tokens learned a second)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lightningrl.config import Recipe
from lightningrl.protocols import Speed
from lightningrl.types import Trajectory, Transition

__all__ = ["forecast_step", "give_time"]

ANSWERS: Final = 8
"""Whole answers that fit into a rollout's time, where nobody gave it one."""
UNITS: Final = ((86_400, "days"), (3600, "hours"), (60, "minutes"))


def give_time(recipe: Recipe, speed: Speed | None) -> Recipe:
    """The recipe with a time limit for rollouts: its own, else as long as a slow engine takes."""
    if recipe.runtime.timeout_s is not None or speed is None:
        return recipe
    answers = ANSWERS * recipe.sampling.max_tokens * speed.calls / speed.sampled
    limit = max(recipe.runtime.limit_s, float(round(answers)))
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"timeout_s": limit})})


def forecast_step(recipe: Recipe, speed: Speed, seen: Sequence[Trajectory]) -> list[str]:
    """In parts. `seen`: rollouts of the policy as it is; without any, each is taken to sample one answer as long as it may be."""
    sampled, read, like = _of_each(recipe, seen)
    rollouts, steps = recipe.loop.tasks_per_step * recipe.loop.group_size, recipe.loop.steps
    seconds = rollouts * (sampled / speed.sampled + read / speed.read + (sampled + read) / speed.learned)
    return [
        f"{_count(speed.parameters)} parameters",
        *([f"{_count(speed.trained)} learn"] if speed.trained != speed.parameters else []),
        f"{speed.sampled:.3g} tokens/s sampled, {speed.calls} calls at once",
        f"{speed.learned:.3g} learned",
        f"a step of {rollouts} rollouts {_time(seconds)}",
        *([f"{steps} steps {_time(steps * seconds)}"] if steps > 1 else []),
        f"if each {like}",
    ]


def _of_each(recipe: Recipe, seen: Sequence[Trajectory]) -> tuple[float, float, str]:
    """Tokens that a rollout samples and reads, and in words."""
    calls = [call for one in seen for call in one.transitions]
    if not calls:
        most = recipe.sampling.max_tokens
        return most, 0.0, f"samples one answer of sampling.max_tokens = {most}"
    sampled = sum(len(call.completion_ids) for call in calls) / len(seen)
    read = sum(_read(one.transitions, recipe.loop.group_size) for one in seen) / len(seen)
    return sampled, read, f"is like these {len(seen)}: {len(calls) / len(seen):.1f} calls, {sampled:.0f} tokens sampled, {read:.0f} read"


def _read(calls: Sequence[Transition], group_size: int) -> float:
    """Prompt tokens of a rollout that the engine computes: what a call continues it has, and what a group begins with is read once."""
    lengths = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in calls}
    return sum(
        max(0, len(call.prompt_ids) - lengths[call.parent_id]) if call.parent_id in lengths else len(call.prompt_ids) / group_size
        for call in calls
    )


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _time(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if seconds >= 2 * unit), (1, "seconds"))
    return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
