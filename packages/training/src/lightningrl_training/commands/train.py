"""`lightningrl train`: from a recipe to a run folder with weights, metrics and a curve."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError, Interruption
from lightningrl.recipe import Recipe
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState, best_checkpoint
from lightningrl_training.commands.printing import Page, show_warnings
from lightningrl_training.serving import Address
from lightningrl_training.start import OpenRun, begin_run

__all__ = ["train_command"]


def train_command(
    source: Path | None, *, resume: bool, overwrite: bool, run: Path | None, runs: Path, settings: Mapping[str, Any]
) -> None:
    console, page = Console(), Page()
    show_warnings(console)
    if source is None and not resume:
        raise ConfigError(
            "no recipe given; write `lightningrl train RECIPE`, or `lightningrl train --resume` to go on with the "
            "newest run"
        )
    with begin_run(source, run=run, resume=resume, overwrite=overwrite, settings=settings, runs=runs) as opened:
        _describe(page, opened)
        try:
            state = asyncio.run(_train(console, opened))
        except asyncio.CancelledError:
            shown = shlex.quote(str(_relative(opened.folder.path)))
            raise Interruption(
                f"stopped; nothing is lost: go on with `lightningrl train --resume --run {shown}`"
            ) from None
        _summarize(page, opened, state)


async def _train(console: Console, opened: OpenRun) -> LoopState:
    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, soft_wrap=True)

    def announce(address: Address) -> None:
        say(f"look on: {address.view}")
        if opened.recipe.runtime.workers == 0:
            say(f"no workers here; they join with:  {address.join}")

    cancel_on_signals(lambda: say("stopping: what runs is ended, which takes some seconds"))
    return await opened.train(console, announce)


def _summarize(page: Page, opened: OpenRun, state: LoopState) -> None:
    recipe, shown = opened.recipe, _relative(opened.folder.path)
    typed = shlex.quote(str(shown))
    page.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes")
    if opened.folder.curve.is_file():
        page.print(f"  curve    {shown / 'curve.png'}")
    page.print(f"  look     lightningrl view {typed}")
    page.print(f"  rollouts lightningrl rollouts list --run {typed}")
    best = best_checkpoint(opened.folder.path)
    if best is not None:
        whose = f"after step {best.state.step}" if best.state.step else "the policy that it started from"
        page.print(f"  best     {whose}: validation {best.state.score:.3f}")
    for name, policy in recipe.all_policies.items():
        if policy.trainable:
            which = f" --policy {name}" if recipe.policies else ""
            page.print(f"  weights  lightningrl export FOLDER --run {typed}{which}")


def _describe(console: Console, opened: OpenRun) -> None:
    recipe, parts = opened.recipe, opened.parts
    unseen = parts.tasks.validation and not recipe.validation.every
    held_out = f"{len(parts.tasks.validation)} held out{' (validation.every = 0: not looked at)' if unseen else ''}"
    models = ", ".join(_shown_model(name, parts, recipe) for name in parts.models)
    console.print(
        f"[bold]{recipe.name}[/]: {'going on with' if opened.is_resumed else 'training'} {models}"
        f" on {len(parts.tasks.train)} tasks, {held_out}; "
        f"{recipe.loop.tasks_per_step} × {recipe.loop.group_size} rollouts a step, backend {recipe.backend}"
    )
    console.print(f"run folder {_relative(opened.folder.path)}")


def _shown_model(name: str, parts: Parts, recipe: Recipe) -> str:
    model = parts.models[name]
    shown = str(_relative(Path(model))) if Path(model).is_absolute() else model
    if len(parts.models) == 1:
        return shown
    return f"{name} ({shown}{'' if recipe.all_policies[name].trainable else ', frozen'})"


def _relative(path: Path) -> Path:
    """Path relative to here, where it lies below."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
