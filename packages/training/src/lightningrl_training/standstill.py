"""The likely reason why a run has not made its policy better: a sentence for its end, from what was measured on the
way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from lightningrl.errors import LightningError
from lightningrl.recipe import Recipe
from lightningrl_training.collector import Rollouts
from lightningrl_training.tasks import TaskSets, plan_validation

__all__ = ["count_repeated_answers", "explain_standstill", "has_stood_still", "last_validation"]

SCORE: Final = "validation/reward"
LR: Final = re.compile(r"learn/(.+/)?lr")
MOST: Final = 0.8
"""A share that says what the matter is."""


def has_stood_still(rows: Sequence[Mapping[str, float]], top: float) -> bool:
    """True where no validation was better than that before the first step, unless a policy earned `top` from the
    start."""
    first, *later = _scores(rows) or (top,)
    return bool(later) and first < top and max(later) <= first


def last_validation(rows: Sequence[Mapping[str, float]]) -> int:
    """The step that the last validation was made after."""
    return max(int(row["step"]) for row in rows if SCORE in row)


async def count_repeated_answers(
    rollouts: Rollouts, tasks: TaskSets, recipe: Recipe, step: int
) -> tuple[int, int] | None:
    """Count the validation tasks that are answered after this step in the tokens of before the first, and all of them;
    None where answers differ by chance, or are no longer there."""
    if recipe.validation_sampling.temperature > 0:
        return None
    plans = (plan_validation(tasks.validation, recipe, validated) for validated in (0, step))
    try:
        before, after = [await rollouts.trajectories([spec.id for spec in plan]) for plan in plans]
    except LightningError:  # forgotten (loop.keep_rollouts), or lost, which was said at the start
        return None
    answers = [
        [[call.completion_ids.tolist() for call in rollout.transitions] for rollout in validation]
        for validation in (before, after)
    ]
    return sum(first == last for first, last in zip(*answers, strict=True)), len(before)


def explain_standstill(
    rows: Sequence[Mapping[str, float]], recipe: Recipe, *, answers: tuple[int, int] | None, earned: float | None
) -> str:
    """A sentence from metrics, by step. `answers`: of the validation tasks those that are answered as at the start, and
    all; `earned`: the highest reward that was trained on."""
    first, *later = _scores(rows)
    steps = [row for row in rows if row["step"] > 0 and "groups" in row]
    cause = _cause(steps, recipe, answers, earned)
    return f"validation is no better than before the first step: {first:.3f} then, {max(later):.3f} since; {cause}"


def _cause(
    steps: Sequence[Mapping[str, float]], recipe: Recipe, answers: tuple[int, int] | None, earned: float | None
) -> str:
    groups, silent = (int(sum(row[name] for row in steps)) for name in ("groups", "groups_without_signal"))
    if silent >= MOST * groups:
        return (
            f"{silent} of {groups} groups taught nothing, for their rewards were equal: raise loop.group_size or "
            "sampling.temperature, or take tasks that the policy solves now and then"
        )
    reach = _reach(steps, recipe)
    if answers is not None and answers[0] >= MOST * answers[1]:
        remedy = "raise learner.learning_rate, or loop.steps"
        return f"{answers[0]} of {answers[1]} answers are what they were, to the letter{reach}: {remedy}"
    top = recipe.reward_bounds[1]
    if earned is not None and earned < top:
        return (
            f"no rollout that was learned from earned more than {earned:.3g} of {top:g}, and what is never sampled is "
            "not learned: show it in the prompt, reward a part of it, or take easier tasks"
        )
    early, late = _ends([row["reward"] for row in steps if "reward" in row])
    if late > early:
        return (
            f"training rewards rose from {early:.3f} to {late:.3f}: see whether validation has harder tasks, or too few"
        )
    return (
        f"training rewards did not rise either ({early:.3f}, then {late:.3f}){reach}: try another learner.learning_rate"
    )


def _reach(steps: Sequence[Mapping[str, float]], recipe: Recipe) -> str:
    """The furthest that weights can have moved: an update by AdamW moves each by its learning rate, or little more."""
    learned = [[value for name, value in row.items() if LR.fullmatch(name)] for row in steps]
    rates = [max(values) for values in learned if values]
    if not rates:
        return ""
    options = recipe.backend_options
    moved = sum(rates) * int(options.get("minibatches", 1)) * int(options.get("epochs", 1))
    return (
        f", and {len(rates)} steps at a learning rate of {max(rates):.2g} move no weight by more than some {moved:.1g}"
    )


def _ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Means of the first third, and of the last."""
    part = max(1, len(rewards) // 3)
    return fmean(rewards[:part] or [0.0]), fmean(rewards[-part:] or [0.0])


def _scores(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Scores of the validations, the one before the first step first; none where that is missing."""
    scores = {row["step"]: row[SCORE] for row in rows if SCORE in row}
    return [scores[step] for step in sorted(scores)] if 0 in scores else []
