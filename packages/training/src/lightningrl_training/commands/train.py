"""`lightningrl train`: from a recipe to a run folder with weights, metrics and a curve."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from lightningrl.console import cancel_on_signals
from lightningrl.errors import ConfigError, Stopped
from lightningrl.recipe import Recipe
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import best_checkpoint
from lightningrl_training.serving import Address
from lightningrl_training.start import OpenRun, begin_run

__all__ = ["train_command"]


def train_command(
    source: Path | None, *, resume: bool, overwrite: bool, run: Path | None, runs: Path, settings: Mapping[str, Any]
) -> None:
    console = Console()
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    if source is None and not resume:
        raise ConfigError(
            "no recipe given; write `lightningrl train RECIPE`, or `lightningrl train --resume` to go on with the "
            "newest run"
        )
    with begin_run(source, run=run, resume=resume, overwrite=overwrite, settings=settings, runs=runs) as opened:
        _describe(console, opened)
        try:
            asyncio.run(_train(console, opened))
        except asyncio.CancelledError:
            shown = shlex.quote(str(_relative(opened.folder.path)))
            raise Stopped(f"stopped; nothing is lost: go on with `lightningrl train --resume --run {shown}`") from None


async def _train(console: Console, opened: OpenRun) -> None:
    recipe = opened.recipe

    def announce(address: Address) -> None:
        console.print(f"look on: {address.view}", highlight=False, soft_wrap=True)
        if recipe.runtime.workers == 0:
            console.print(f"no workers here; they join with:  {address.join}", highlight=False, soft_wrap=True)

    cancel_on_signals(lambda: console.print("stopping: what runs is ended, which takes some seconds", highlight=False))
    state = await opened.train(console, announce)
    shown = _relative(opened.folder.path)
    typed = shlex.quote(str(shown))
    console.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes", highlight=False)
    if opened.folder.curve.is_file():
        console.print(f"  curve    {shown / 'curve.png'}", highlight=False, soft_wrap=True)
    console.print(f"  look     lightningrl view {typed}", highlight=False, soft_wrap=True)
    console.print(f"  rollouts lightningrl rollouts list --run {typed}", highlight=False, soft_wrap=True)
    best = best_checkpoint(opened.folder.path)
    if best is not None:
        whose = f"after step {best.state.step}" if best.state.step else "the policy that it started from"
        console.print(f"  best     {whose}: validation {best.state.score:.3f}", highlight=False)
    for name, policy in recipe.all_policies.items():
        if policy.trainable:
            which = f" --policy {name}" if recipe.policies else ""
            console.print(f"  weights  lightningrl export FOLDER --run {typed}{which}", highlight=False, soft_wrap=True)


def _describe(console: Console, opened: OpenRun) -> None:
    recipe, parts = opened.recipe, opened.parts
    unseen = parts.tasks.validation and not recipe.validation.every
    held_out = f"{len(parts.tasks.validation)} held out{' (validation.every = 0: not looked at)' if unseen else ''}"
    models = ", ".join(_shown_model(name, parts, recipe) for name in parts.models)
    console.print(
        f"[bold]{recipe.name}[/]: {'going on with' if opened.is_resumed else 'training'} {models}"
        f" on {len(parts.tasks.train)} tasks, {held_out}; "
        f"{recipe.loop.tasks_per_step} × {recipe.loop.group_size} rollouts a step, backend {recipe.backend}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"run folder {_relative(opened.folder.path)}", highlight=False, soft_wrap=True)


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
