"""`lightningrl train`: from a recipe to a run folder with weights, metrics and a curve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from lightningrl.cli.checks import build_checked
from lightningrl.cli.stopping import cancel_on_signals
from lightningrl.config import Recipe, load_recipe
from lightningrl.errors import ConfigError, LightningError, Stopped
from lightningrl.plugins import PluginManager, hookimpl, load_plugins
from lightningrl.training.parts import Parts
from lightningrl.training.progress import make_progress
from lightningrl.training.run_folder import RunFolder, default_run, newest_run
from lightningrl.types import Trajectory

__all__ = ["train_command"]


def train_command(source: Path | None, *, resume: bool, overwrite: bool, run: Path | None, runs: Path, settings: Mapping[str, Any]) -> None:
    console = Console()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)])
    plugins = load_plugins()
    if resume:
        folder, recipe, _ = RunFolder.resume(run or newest_run(runs), settings)
        try:
            _train(recipe, build_checked(recipe, plugins), plugins, folder, console, resume=True)
        finally:
            folder.close()
        return
    if source is None:
        raise ConfigError("no recipe given; write `lightningrl train RECIPE`, or `lightningrl train --resume` to go on with the newest run")
    recipe = load_recipe(source, settings)
    parts = build_checked(recipe, plugins)
    path = run or default_run(runs, recipe.name)
    folder = RunFolder.create(path, recipe, str(source.resolve()), settings, models=parts.models, overwrite=overwrite)
    try:
        _train(recipe, parts, plugins, folder, console, resume=False)
    except LightningError as error:
        is_begun = folder.latest() is not None or folder.has_rollouts()
        if not isinstance(error, Stopped) and not is_begun and str(folder.logs) not in str(error):
            folder.discard()  # and the sentence names no log in it
        raise
    finally:
        folder.close()


class _Watcher:
    """Shows rollouts to whoever looks on."""

    def __init__(self, show: Callable[[Trajectory], None]) -> None:
        self._show = show

    @hookimpl
    def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
        self._show(trajectory)


def _train(recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, console: Console, *, resume: bool) -> None:
    from lightningrl.training.session import train_run

    def announce(url: str, run_key: str) -> None:
        if recipe.runtime.workers == 0:
            join = f"LIGHTNINGRL_KEY={run_key} lightningrl work RECIPE --server {url}"
            console.print(f"no workers here; they join with:  {join}", highlight=False, soft_wrap=True)

    async def main() -> None:
        cancel_on_signals(lambda: console.print("stopping: what runs is ended, which takes some seconds", highlight=False))
        with make_progress(console, recipe.loop.minutes, is_resumed=resume) as progress:
            plugins.register(_Watcher(progress.rollout), distribution="lightningrl train")
            state = await train_run(recipe, parts, plugins, folder, progress, announce)
        shown = _relative(folder.path)
        console.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes", highlight=False)
        console.print(f"  curve    {shown / 'curve.png'}", highlight=False)
        console.print(f"  rollouts lightningrl rollouts list --run {shown}", highlight=False)
        for name, policy in recipe.all_policies.items():
            if policy.trainable:
                which = f" --policy {name}" if recipe.policies else ""
                console.print(f"  weights  lightningrl export FOLDER --run {shown}{which}", highlight=False)

    _describe(console, recipe, parts, folder, resume=resume)
    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        raise Stopped(f"stopped; nothing is lost: go on with `lightningrl train --resume --run {_relative(folder.path)}`") from None


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
