"""A forecast before any run: some dozens of real rollouts, a greedy validation, and one learning step on a copy of
the weights.

serve ─► groups of training tasks ─► rewards, credit ─► one step ─► Evidence ─► GainForecast and what would change it
                                                     with a rehearsal, sixteen steps and what they earn
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from lightningrl.backends import Backend
from lightningrl.errors import ConfigError, LightningError
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import RolloutSpec, Sample, Trajectory
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_training.build import Parts
from lightningrl_training.collector import fetch_ended
from lightningrl_training.forecast.changes import Change, possible_changes
from lightningrl_training.forecast.evidence import Evidence, GreedyAnswers, Rehearsal, gather, judge
from lightningrl_training.forecast.movement import Movement, measure_movement
from lightningrl_training.forecast.prediction import GainForecast, predict
from lightningrl_training.forecast.rehearsal import SAMPLES, STEPS_OF_ROLLOUTS, rehearse
from lightningrl_training.serving import RunningServices, serve_recipe
from lightningrl_training.tasks import plan_branches, plan_evaluation, plan_group, plan_validation

__all__ = ["RecipeForecast", "forecast_recipe"]

MOST_TASKS: Final = 64
"""Validation tasks that a rehearsal is measured on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeForecast:
    """A recipe's forecast, what it was made from, and what would change it."""

    evidence: Evidence
    forecast: GainForecast
    changes: Sequence[Change]
    unlearned: str = ""
    """Why a step was not learned, where the learner raised; empty = none failed."""


async def forecast_recipe(
    recipe: Recipe,
    *,
    rollouts: int,
    is_rehearsed: bool = False,
    wrong: Sequence[str] = (),
    starting: Callable[[str], None] = lambda what: None,
) -> RecipeForecast:
    """Try so many rollouts, in whole groups, at least two; with a rehearsal those of four steps. `wrong`: sentences on
    keys that the recipe is read without; `starting` is told what is being done. Nothing is left behind. Raises
    LightningError for what a run would refuse, and where no rollout has a reward."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.memory_check import check_memory

    refuse_in_import("lightningrl.forecast")
    if recipe.runtime.workers == 0:
        raise ConfigError("runtime.workers is 0, so no worker would run the agent here; --set runtime.workers=2")
    starting("the recipe")
    parts = build_checked(recipe, load_plugins(), will_work=True, wrong=wrong)
    if is_rehearsed and not parts.tasks.validation:
        raise ConfigError("a rehearsal is measured on validation tasks, and the recipe has none; set tasks.validation")
    check_memory(recipe, parts.models, load_plugins())
    with tempfile.TemporaryDirectory(prefix="lightningrl-forecast-", ignore_cleanup_errors=True) as folder:
        async with serve_recipe(recipe, parts, Path(folder), starting=starting) as (recipe, served):
            size = recipe.loop.tasks_per_step
            groups = max(2, math.ceil(rollouts / recipe.loop.group_size))
            groups = STEPS_OF_ROLLOUTS * size if is_rehearsed else groups
            starting(f"the agent, {groups} groups of {recipe.loop.group_size} rollouts")
            credited = await _collect(recipe, parts, served, groups)
            greedy = await _validate(recipe, parts, served, rollouts, starting)
            starting("one step of the learner")
            first, *more = [credited[start : start + size] for start in range(0, len(credited), size)]
            rows = (await asyncio.to_thread(parts.scorer.build, first)).samples
            movement, unlearned = await _learn(recipe, served, first, rows)
            rehearsed = None
            if is_rehearsed and not unlearned:
                steps = [rows, *[(await asyncio.to_thread(parts.scorer.build, step)).samples for step in more]]
                rehearsed, unlearned = await _rehearse(recipe, parts, served, credited, steps, starting)
    evidence = gather(recipe, credited, movement=movement, greedy=greedy, rehearsed=rehearsed)
    if evidence is None:
        raise LightningError(
            f"no rollout of {groups * recipe.loop.group_size} has a reward, so there is nothing to forecast from; "
            "`lightningrl doctor RECIPE` says why"
        )
    return RecipeForecast(
        evidence=evidence, forecast=predict(evidence), changes=possible_changes(evidence), unlearned=unlearned
    )


async def _collect(recipe: Recipe, parts: Parts, served: RunningServices, groups: int) -> list[CreditedGroup]:
    """Run the groups, and the branches that credit wants of them."""
    specs = [spec for position in range(groups) for spec in plan_group(parts.tasks.train, recipe, position)]
    rollouts = await _rewarded(specs, parts, served)
    sources = {rollout.rollout_id: rollout for rollout in rollouts}
    branches = [
        spec
        for point, count in parts.scorer.branch_points(rollouts).items()
        for spec in plan_branches(recipe, sources[point.rollout_id], point, count)
    ]
    return await asyncio.to_thread(parts.scorer.credit, rollouts, await _rewarded(branches, parts, served))


async def _validate(
    recipe: Recipe, parts: Parts, served: RunningServices, most: int, starting: Callable[[str], None]
) -> GreedyAnswers | None:
    """Measure greedy answers to the first validation tasks, at most so many; None where the recipe has none, or does
    not validate greedily."""
    tasks = parts.tasks.validation[:most]
    if not tasks or recipe.validation_sampling.temperature > 0:
        return None
    starting(f"the agent, greedily, on {len(tasks)} validation tasks")
    rollouts = await _rewarded(plan_validation(tasks, recipe, 0), parts, served)
    return GreedyAnswers.measure(judge(rollouts, *recipe.reward_bounds))


async def _rewarded(specs: Sequence[RolloutSpec], parts: Parts, served: RunningServices) -> list[Trajectory]:
    if not specs:
        return []
    await served.client.create_rollouts(specs)
    return await parts.evaluator.evaluate(await fetch_ended(served.client, [spec.id for spec in specs]))


async def _learn(
    recipe: Recipe, served: RunningServices, step: Sequence[CreditedGroup], rows: Sequence[Sample]
) -> tuple[Movement | None, str]:
    """Take one step; return what it moved, and the sentence of a learner that raised."""
    if not any(group.has_signal for group in step):
        return None, ""
    try:
        await served.policies.learn(rows)
        return await asyncio.to_thread(measure_movement, _trained(recipe, served), step, recipe), ""
    except Exception as error:  # noqa: BLE001  the boundary to a backend and to a loss of the user's
        return None, _sentence(error)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}"


async def _rehearse(
    recipe: Recipe,
    parts: Parts,
    served: RunningServices,
    credited: Sequence[CreditedGroup],
    steps: Sequence[Sequence[Sample]],
    starting: Callable[[str], None],
) -> tuple[Rehearsal | None, str]:
    """Rehearse the steps' rows, and answer validation tasks with the weights that come of it; return the sentence of a
    learner that raised, too."""
    tasks = dict(enumerate(parts.tasks.validation[:MOST_TASKS]))

    async def look(number: int) -> tuple[float, float]:
        starting(f"what it earns after {number} steps")
        greedy, sampled = [
            [
                replace(spec, id=f"{number}-{samples}-{spec.id}")
                for spec in plan_evaluation(tasks, recipe, samples=samples, sampling=sampling, step=number)
            ]
            for samples, sampling in (
                (1, recipe.sampling.model_copy(update={"temperature": 0.0}).settings()),
                (SAMPLES, recipe.sampling.settings()),
            )
        ]
        earned = [judge(await _rewarded(specs, parts, served), *recipe.reward_bounds) for specs in (greedy, sampled)]
        greedy_reward, sampled_reward = (fmean([reward for reward, _ in judged] or [0.0]) for judged in earned)
        return greedy_reward, sampled_reward

    async def learn(rows: Sequence[Sample]) -> None:
        starting("a rehearsal of the learner")
        await served.policies.learn(rows)

    trained = _trained(recipe, served)
    try:
        return await rehearse(steps, credited, trained, most=recipe.loop.steps, learn=learn, look=look), ""
    except Exception as error:  # noqa: BLE001  the boundary to a backend and to a loss of the user's
        return None, _sentence(error)


def _trained(recipe: Recipe, served: RunningServices) -> dict[str, Backend]:
    return {name: served.backends[name] for name, policy in recipe.all_policies.items() if policy.trainable}
