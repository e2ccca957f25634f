"""`lightningrl train`: from a recipe to a run folder with weights, metrics and a curve."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from lightningrl.config import Recipe, load_recipe
from lightningrl.errors import ConfigError, LightningError
from lightningrl.loggers.build import check_loggers
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.runtime.launcher import check_launcher
from lightningrl.training.parts import Parts
from lightningrl.training.progress import make_progress
from lightningrl.training.run_folder import RunFolder, default_run, newest_run

__all__ = ["train_command"]


def train_command(source: Path | None, *, resume: bool, run: Path | None, runs: Path, settings: Mapping[str, Any]) -> None:
    console = Console()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])
    plugins = load_plugins()
    if resume:
        folder, recipe, _ = RunFolder.resume(run or newest_run(runs), settings)
    elif source is None:
        raise ConfigError("no recipe given; write `lightningrl train RECIPE`, or `lightningrl train --resume` to go on with the newest run")
    else:
        recipe = load_recipe(source, settings)
        folder = None
    check_loggers(recipe.loggers)
    check_launcher(recipe.runtime, plugins)
    parts = Parts.build(recipe, plugins)
    if folder is None:
        assert source is not None
        folder = RunFolder.create(run or default_run(runs, recipe.name), recipe, str(source.resolve()), settings, models=parts.models)
    _describe(console, recipe, parts, folder, resume=resume)
    try:
        _run(recipe, parts, plugins, folder, console)
    finally:
        folder.close()


def _run(recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, console: Console) -> None:
    from lightningrl.training.session import train_run

    def announce(url: str, run_key: str) -> None:
        if recipe.runtime.workers == 0:
            join = f"LIGHTNINGRL_KEY={run_key} lightningrl work RECIPE --server {url}"
            console.print(f"no workers here; they join with:  {join}", highlight=False, soft_wrap=True)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with make_progress(console, recipe.loop.minutes) as progress:
            state = await train_run(recipe, parts, plugins, folder, progress, announce)
        shown = _relative(folder.path)
        console.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes", highlight=False)
        console.print(f"  curve    {shown / 'curve.png'}", highlight=False)
        console.print(f"  rollouts lightningrl rollouts list --run {shown}", highlight=False)
        for name, policy in recipe.all_policies.items():
            if policy.trainable:
                which = f" --policy {name}" if recipe.policies else ""
                console.print(f"  weights  lightningrl export FOLDER --run {shown}{which}", highlight=False)

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise LightningError(f"stopped; nothing is lost: go on with `lightningrl train --resume --run {_relative(folder.path)}`") from None


def _describe(console: Console, recipe: Recipe, parts: Parts, folder: RunFolder, *, resume: bool) -> None:
    unseen = parts.tasks.validation and not recipe.validation.every
    held_out = f"{len(parts.tasks.validation)} held out{' (validation.every = 0: not looked at)' if unseen else ''}"
    models = ", ".join(_shown_model(name, parts, recipe) for name in parts.models)
    console.print(
        f"[bold]{recipe.name}[/]: {'going on with' if resume else 'training'} {models}"
        f" on {len(parts.tasks.train)} tasks, {held_out}; "
        f"{recipe.loop.tasks_per_step} × {recipe.loop.group_size} rollouts a step, backend {recipe.backend}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"run folder {_relative(folder.path)}", highlight=False, soft_wrap=True)


def _shown_model(name: str, parts: Parts, recipe: Recipe) -> str:
    model = parts.models[name]
    shown = str(_relative(Path(model))) if Path(model).is_absolute() else model
    if len(parts.models) == 1:
        return shown
    return f"{name} ({shown}{'' if recipe.all_policies[name].trainable else ', frozen'})"


def _relative(path: Path) -> Path:
    """As a person would write it from here."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
