"""`lightningrl try`: one rollout of one task, shown and not trained; most mistakes of an agent or a reward are seen
here in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError, Interruption
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import RolloutMode, RolloutSpec, Task
from lightningrl_client.recipe_file import read_recipe
from lightningrl_credit.scoring import score_of
from lightningrl_credit.trained_calls import explain_left_out
from lightningrl_training.build import Parts
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import fetch_ended
from lightningrl_training.commands.printing import Page
from lightningrl_training.commands.stopping import scratch_folder
from lightningrl_training.explanations import explain_ignored, explain_malformed
from lightningrl_viewer.listing import show_command

__all__ = ["try_command"]

ROLLOUT = "try"


def try_command(source: Path, *, task: str | None, full: bool, settings: Mapping[str, Any]) -> None:
    recipe, wrong = read_recipe(source, {"runtime.workers": 1, "runtime.concurrency": 1, **settings})
    parts = build_checked(recipe, load_plugins(), wrong=wrong)
    chosen = _task(parts, task)
    page = Page()
    for why in parts.without_tools:
        page.print(why)
    with scratch_folder("lightningrl-try-") as scratch:
        try:
            asyncio.run(_attempt(recipe, parts, chosen, scratch, page))
        except asyncio.CancelledError:
            raise Interruption("stopped") from None
        show_command(ROLLOUT, run=scratch, runs=scratch, full=full)


async def _attempt(recipe: Recipe, parts: Parts, task: Task, scratch: Path, page: Page) -> None:
    """One rollout, rewarded, in the scratch folder's store."""
    from lightningrl_training.serving import serve_recipe

    cancel_on_signals()
    with Console().status("starting") as status:
        async with serve_recipe(recipe, parts, scratch, starting=status.update) as (recipe, served):
            status.update(f"running the agent on task {task.id!r}")
            spec = RolloutSpec(
                id=ROLLOUT,
                task=task,
                group_id=ROLLOUT,
                mode=RolloutMode.VALIDATION,
                sampling=recipe.validation_sampling,
                timeout_s=recipe.runtime.limit_s,
            )
            await served.client.create_rollouts([spec])
            (trajectory,) = await parts.evaluator.reward(await fetch_ended(served.client, [ROLLOUT]))
            await served.client.set_scores([score_of(trajectory)])
            ignored = explain_ignored((await served.client.status()).policies)
            notes = ignored, explain_left_out([trajectory], recipe), explain_malformed([trajectory])
            status.update("stopping")
    for note in filter(None, notes):
        page.print(note)


def _task(parts: Parts, wanted: str | None) -> Task:
    tasks = {task.id: task for task in (*parts.tasks.train, *parts.tasks.validation)}
    if wanted is None:
        return parts.tasks.train[0]
    if wanted not in tasks:
        raise ConfigError(
            f"no task has the id {wanted!r}; ids are: {', '.join(list(tasks)[:8])}{' …' if len(tasks) > 8 else ''}"
        )
    return tasks[wanted]
