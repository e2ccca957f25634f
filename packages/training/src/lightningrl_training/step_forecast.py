"""Forecasts a step, before the first: from the speed that backends measured, and from a validation's rollouts.

step = rollouts · (sampled ÷ tokens sampled a second + read ÷ tokens read a second + rows ÷ tokens learned a second)

In time as this machine was when it was measured, and in CPU time, which is the same on a busy one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightningrl.backends import Speed
from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory, Transition

__all__ = ["forecast_step", "give_time", "step_seconds"]

ANSWERS: Final = 8
"""Whole answers that fit into a rollout's time, where nobody gave it one."""
LONGER: Final = 3
"""Most times that a sampled answer is as long as the likeliest; a 135 M model's sums of two were up to so many."""
UNITS: Final = ((86_400, "days"), (3600, "hours"), (60, "minutes"))


def give_time(recipe: Recipe, speed: Speed | None) -> Recipe:
    """The recipe with a time limit for rollouts: its own, else as long as a slow engine takes."""
    if recipe.runtime.timeout_s is not None or speed is None:
        return recipe
    answers = ANSWERS * recipe.sampling.max_tokens * speed.calls / speed.sampled
    limit = max(recipe.runtime.limit_s, float(round(answers)))
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"timeout_s": limit})})


def forecast_step(recipe: Recipe, speed: Speed, seen: Sequence[Trajectory]) -> list[str]:
    """Forecast a step, in parts of a sentence. `seen`: rollouts of the policy; none = each is one longest answer."""
    each = _expect(recipe, seen)
    rollouts, steps = recipe.loop.tasks_per_step * recipe.loop.group_size, recipe.loop.steps

    cpu = (speed.sampled_cpu, speed.read_cpu, speed.learned_cpu)

    def take(steps: int) -> str:
        wall = _ends(each, steps * rollouts, speed.sampled, speed.read, speed.learned)
        if None in cpu:
            return wall
        return f"{wall}, {_ends(each, steps * rollouts, *cpu)} of CPU"  # type: ignore[arg-type]

    return [
        f"{_count(speed.parameters)} parameters",
        *([f"{_count(speed.trained)} learn"] if speed.trained != speed.parameters else []),
        f"{speed.sampled:.3g} tokens/s sampled, {speed.calls} calls at once",
        f"{speed.learned:.3g} learned",
        f"a step of {rollouts} rollouts {take(1)}",
        *([f"{steps} steps {take(steps)}"] if steps > 1 else []),
        f"if each {each.like}",
    ]


def step_seconds(recipe: Recipe, speed: Speed, seen: Sequence[Trajectory]) -> float:
    """Forecast the seconds of a step, at most."""
    each, rollouts = _expect(recipe, seen), recipe.loop.tasks_per_step * recipe.loop.group_size
    return max(_seconds(each, rollouts, speed.sampled, speed.read, speed.learned))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollout:
    """A rollout as it may be expected."""

    sampled: tuple[float, float]
    """Tokens that it samples, from … to."""
    read: float
    like: str
    """The rollout in words."""


def _expect(recipe: Recipe, seen: Sequence[Trajectory]) -> _Rollout:
    calls = [call for rollout in seen for call in rollout.transitions]
    most = recipe.sampling.max_tokens
    if not calls:
        return _Rollout(sampled=(most, most), read=0.0, like=f"samples one answer of sampling.max_tokens = {most}")
    count = len(calls) / len(seen)
    sampled = sum(len(call.completion_ids) for call in calls) / len(seen)
    prompt = sum(len(call.prompt_ids) for call in calls) / len(seen)
    read = sum(_read(rollout.transitions, recipe.loop.group_size) for rollout in seen) / len(seen)
    like = (
        f"is like these {len(seen)}: {count:.1f} calls, {sampled:.0f} tokens sampled, {prompt:.0f} in prompts, of "
        f"which {read:.0f} are computed (what is shared is once)"
    )
    # the likeliest answer is a short one
    is_greedier = recipe.validation_sampling.temperature < recipe.sampling.temperature
    longer = max(sampled, min(LONGER * sampled, count * most)) if is_greedier else sampled
    if longer > sampled:
        like += f", or samples {longer:.0f}, as at temperature {recipe.sampling.temperature:g} it may"
    return _Rollout(sampled=(sampled, longer), read=read, like=like)


def _read(calls: Sequence[Transition], group_size: int) -> float:
    """Prompt tokens of a rollout that the engine computes: none that a call continues, a group's beginning once."""
    lengths = {call.id: len(call.prompt_ids) + len(call.completion_ids) for call in calls}
    return sum(
        max(0, len(call.prompt_ids) - lengths[call.parent_id])
        if call.parent_id in lengths
        else len(call.prompt_ids) / group_size
        for call in calls
    )


def _ends(each: _Rollout, rollouts: int, sampled: float, read: float, learned: float) -> str:
    """Time of so many rollouts at these tokens a second, from … to."""
    low, high = map(_time, _seconds(each, rollouts, sampled, read, learned))
    return low if low == high else f"{low} to {high}"


def _seconds(each: _Rollout, rollouts: int, sampled: float, read: float, learned: float) -> list[float]:
    return [
        rollouts * (tokens / sampled + each.read / read + (tokens + each.read) / learned) for tokens in each.sampled
    ]


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _time(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if seconds >= 2 * unit), (1, "seconds"))
    return f"{seconds / unit:.{0 if seconds >= 10 * unit else 1}f} {name}"
