"""`lightningrl try`: one rollout of one task, shown and not trained; most mistakes of an agent or a reward are seen
here in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError, Interruption
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import RolloutMode, RolloutSpec, Task, Trajectory
from lightningrl_client.recipe_file import read_recipe
from lightningrl_credit.scoring import score_of
from lightningrl_credit.trained_calls import explain_left_out
from lightningrl_training.build import Parts
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import fetch_ended
from lightningrl_training.commands.printing import Page, show_warnings
from lightningrl_training.commands.stopping import scratch_folder
from lightningrl_training.explanations import explain_ignored, explain_malformed
from lightningrl_viewer.listing import show_command

__all__ = ["try_command", "try_harness"]

ROLLOUT = "try"
OF_HARNESS: Final = {"runtime.workers": 1, "runtime.concurrency": 1, "sampling.max_tokens": 4096}
"""Settings for a rollout of a harness, whose answers are long."""


def try_command(source: Path, *, task: str | None, full: bool, settings: Mapping[str, Any]) -> None:
    _try(*read_recipe(source, {"runtime.workers": 1, "runtime.concurrency": 1, **settings}), task=task, full=full)


def try_harness(name: str, text: str | None, *, full: bool, settings: Mapping[str, Any]) -> None:
    """Let a coding harness do what `text` says, in an empty folder; 1.0 where it changed anything there."""
    if not text:
        raise ConfigError(f'say what {name!r} is to do: lightningrl try --harness {name} "Write answer.txt"')
    if "policy.model" not in settings:
        raise ConfigError(f"name the model that {name!r} asks: --policy Qwen/Qwen2.5-0.5B-Instruct, or a folder")
    tasks = {"train": partial(_one_task, text)}
    policy, rewards = {"model": settings["policy.model"]}, {"changed": {"use": has_changed}}
    data: dict[str, Any] = {"agent": {"harness": name}, "tasks": tasks, "policy": policy, "rewards": rewards}
    _try(*read_recipe(Recipe(**data), {**OF_HARNESS, **settings}), task=None, full=full)


def _one_task(text: str) -> list[Task]:
    return [Task(id="given", input=text)]


def has_changed(task: Task, output: Any, trajectory: Trajectory) -> float:
    """1.0 where a harness changed files in its folder."""
    return float(bool(output["diff"]))


def _try(recipe: Recipe, wrong: Sequence[str], *, task: str | None, full: bool) -> None:
    show_warnings()
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
