"""A teacher's rollouts: the same agent, tasks and rewards, answered by another policy, kept as a run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import UpstreamConfig
from lightningrl.types import RolloutMode, RolloutSpec
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.scoring import score_of
from lightningrl_training.build import Parts
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import FETCH, fetch_ended
from lightningrl_training.progress import Progress
from lightningrl_training.serving import RunningServices, give_time, serve_policy, server_settings
from lightningrl_training.tasks import plan_evaluation
from lightningrl_training.warm_start.folders import open_stage
from lightningrl_training.warm_start.settings import WarmStart

__all__ = ["ask_teacher"]


async def ask_teacher(settings: WarmStart, path: Path, progress: Progress) -> Path:
    """Run the agent with the teacher on training tasks, and reward it; what an earlier process ran is not run again.
    Returns the run, which is `path`. Raises LightningError."""
    assert settings.teacher is not None
    teacher, plugins = settings.teacher, load_plugins()
    recipe = with_settings(teacher.recipe, {"store_url": None, "runtime.servers": 1, "warm_start": {}})
    parts = build_checked(recipe, plugins, will_work=True)
    changes: dict[str, Any] = {}
    if teacher.upstream is not None:
        parts = replace(parts, backends={}, models={})
        changes = {"policies": {}, "default_policy": None, "upstream": UpstreamConfig(models={"*": teacher.upstream})}
    folder = open_stage(path, recipe, parts.models)
    try:
        served = server_settings(
            recipe, replace(parts, models={**dict.fromkeys(recipe.all_policies, ""), **parts.models}), folder.store_url
        )
        async with serve_policy(
            served.model_copy(update=changes),
            parts,
            folder.logs,
            None if teacher.checkpoint is None else teacher.checkpoint.folder,
            workers=recipe,
            starting=lambda what: progress.phase(f"teacher: {what}", 0, 0),
        ) as services:
            await _collect(give_time(recipe, services.policies.speed), parts, services, settings, progress)
    finally:
        folder.close()
    return path


async def _collect(
    recipe: Recipe, parts: Parts, services: RunningServices, settings: WarmStart, progress: Progress
) -> None:
    specs = _plan(recipe, parts, settings)
    ids = [spec.id for spec in specs]
    await services.client.create_rollouts(specs)
    await services.start_workers()
    had, good = 0, 0

    def show(ended: int) -> None:
        progress.phase("teacher", had + ended, len(ids))

    at_once = max(1, FETCH // settings.samples) * settings.samples  # whole groups: some rewards compare them
    for start in range(0, len(ids), at_once):
        ended = await fetch_ended(services.client, ids[start : start + at_once], show)
        rewarded = await parts.evaluator.evaluate(ended, services.client.set_scores)
        await services.client.set_scores([score_of(trajectory) for trajectory in rewarded])
        had += len(rewarded)
        least = settings.threshold or 0.0
        good += sum(trajectory.reward is not None and trajectory.reward >= least for trajectory in rewarded)
    progress.say(f"teacher: {good} of {had} rollouts have a reward of at least {settings.threshold:g}")


def _plan(recipe: Recipe, parts: Parts, settings: WarmStart) -> Sequence[RolloutSpec]:
    tasks = dict(enumerate(parts.tasks.train[: settings.tasks]))
    planned = plan_evaluation(tasks, recipe, samples=settings.samples, sampling=recipe.sampling.settings(), step=0)
    return [replace(spec, mode=RolloutMode.TRAIN) for spec in planned]
