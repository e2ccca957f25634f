"""`lightningrl try`: one rollout of one task, shown and not trained; most mistakes of an agent or a reward are seen
here in seconds. Where a recipe runs several in a worker, another runs beside it, so that what they share is seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError, Interruption
from lightningrl.plugins import load_plugins
from lightningrl_client.commands import RECIPE_HELP, SetOption, read_settings
from lightningrl_training.commands.printing import Page, show_warnings
from lightningrl_training.commands.stopping import scratch_folder, show_phases

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe
    from lightningrl.types import Task, Trajectory
    from lightningrl_training.build import Parts

__all__ = ["try_recipe"]

ROLLOUTS: Final = ("try", "beside")
"""The rollout that is shown, and one beside it where the recipe runs several at once."""
OF_HARNESS: Final = {"runtime.workers": 1, "runtime.concurrency": 1, "sampling.max_tokens": 4096}
"""Settings for a rollout of a harness, whose answers are long."""


def try_recipe(
    recipe: Annotated[
        str | None, typer.Argument(help=f"{RECIPE_HELP} With --harness: what it is to do.", metavar="RECIPE|TEXT")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Id of the task; by default the first one.")] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            help="Try a coding harness without a recipe: [bold]pi[/], [bold]codex[/], … "
            "(docs/how-to/agents/harnesses.md). It works on an empty folder.",
            metavar="NAME",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model (policy.model).")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole prompts, special tokens included.")] = False,
    settings: SetOption = None,
) -> None:
    """Run the agent once, on one task, and show every call and the reward; twice at once where the recipe runs several
    rollouts in a worker. Nothing is trained, nothing is left behind.

    Examples:
      [bold]lightningrl try my_recipe.toml[/]
      [bold]lightningrl try --harness pi "Write answer.txt" --policy Qwen/Qwen2.5-0.5B-Instruct[/]
    """
    from lightningrl_client.recipe_file import read_recipe, with_settings

    chosen = read_settings(settings, {"policy.model": policy})
    if harness is not None:
        _try(*_recipe_of_harness(harness, recipe, chosen), task=None, full=full)
        return
    if recipe is None:
        raise ConfigError('name a recipe; or a harness and what it is to do: lightningrl try --harness pi "Write it"')
    whole, wrong = read_recipe(Path(recipe), {"runtime.workers": 1, **chosen})
    at_once = {"runtime.concurrency": min(len(ROLLOUTS), whole.runtime.concurrency)}
    _try(with_settings(whole, at_once), wrong, task=task, full=full)


def _recipe_of_harness(name: str, text: str | None, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Read a recipe in which a coding harness does what `text` says, in an empty folder; with its mistakes."""
    from lightningrl.recipe import Recipe
    from lightningrl_client.recipe_file import read_recipe

    if not text:
        raise ConfigError(f'say what {name!r} is to do: lightningrl try --harness {name} "Write answer.txt"')
    if "policy.model" not in settings:
        raise ConfigError(f"name the model that {name!r} asks: --policy Qwen/Qwen2.5-0.5B-Instruct, or a folder")
    tasks = {"train": partial(_one_task, text)}
    policy, rewards = {"model": settings["policy.model"]}, {"changed": {"use": has_changed}}
    data: dict[str, Any] = {"agent": {"harness": name}, "tasks": tasks, "policy": policy, "rewards": rewards}
    return read_recipe(Recipe(**data), {**OF_HARNESS, **settings})


def _one_task(text: str) -> list[Task]:
    from lightningrl.types import Task

    return [Task(id="given", input=text)]


def has_changed(task: Task, output: Any, trajectory: Trajectory) -> float:
    """1.0 where a harness changed files in its folder."""
    return float(bool(output["diff"]))


def _try(recipe: Recipe, wrong: Sequence[str], *, task: str | None, full: bool) -> None:
    import asyncio

    from lightningrl_runs.listing import show_command
    from lightningrl_training.checks import build_checked

    show_warnings()
    page = Page()
    with scratch_folder("lightningrl-try-") as scratch:
        try:
            with show_phases() as show_phase:
                parts = build_checked(recipe, load_plugins(), wrong=wrong)
                chosen = _task(parts, task)
                notes = asyncio.run(_attempt(recipe, parts, chosen, scratch, show_phase))
            for note in (*parts.without_tools, *notes):
                page.print(note)
        except asyncio.CancelledError:
            raise Interruption("stopped") from None
        show_command(ROLLOUTS[0], run=scratch, runs=scratch, full=full)


async def _attempt(
    recipe: Recipe, parts: Parts, task: Task, scratch: Path, show_phase: Callable[[str], None]
) -> list[str]:
    """Run and reward one rollout, in the scratch folder's store; returns what there is to say of it."""
    from lightningrl.types import RolloutMode, RolloutSpec
    from lightningrl_credit.scoring import score_of
    from lightningrl_credit.trained_calls import explain_left_out, explain_read_answers
    from lightningrl_training.collector import fetch_ended
    from lightningrl_training.explanations import explain_ignored, explain_malformed
    from lightningrl_training.serving import serve_recipe

    cancel_on_signals()
    async with serve_recipe(recipe, parts, scratch, starting=show_phase) as (recipe, served):
        show_phase(f"running the agent on task {task.id!r}")
        ids = ROLLOUTS[: recipe.runtime.concurrency]
        specs = [
            RolloutSpec(
                id=name,
                task=task,
                group_id=name,
                mode=RolloutMode.VALIDATION,
                sampling=recipe.validation_sampling,
                timeout_s=recipe.runtime.limit_s,
            )
            for name in ids
        ]
        await served.client.create_rollouts(specs)
        ended = await fetch_ended(served.client, ids)
        (trajectory,) = await parts.evaluator.reward(ended[:1])
        await served.client.set_scores([score_of(trajectory)])
        ignored = explain_ignored((await served.client.status()).policies)
        counted = [explain([trajectory], recipe) for explain in (explain_left_out, explain_read_answers)]
        notes = ignored, *counted, explain_malformed([trajectory]), *map(_of_another, ended[1:])
        show_phase("stopping")
    return [note for note in notes if note]


def _of_another(beside: Trajectory) -> str | None:
    """A sentence where the rollout beside the one that is shown did not end well."""
    from lightningrl.types import Outcome

    if beside.outcome is Outcome.SUCCEEDED:
        return None
    return f"a second rollout, at the same time in the same process, ended in {beside.outcome.value}: {beside.error}"


def _task(parts: Parts, wanted: str | None) -> Task:
    tasks = {task.id: task for task in (*parts.tasks.train, *parts.tasks.validation)}
    if wanted is None:
        return parts.tasks.train[0]
    if wanted not in tasks:
        raise ConfigError(
            f"no task has the id {wanted!r}; ids are: {', '.join(list(tasks)[:8])}{' …' if len(tasks) > 8 else ''}"
        )
    return tasks[wanted]
