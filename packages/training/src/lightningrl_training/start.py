"""Starts a run, or goes on with one: everything that can be refused in seconds is refused before its folder is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError, Interruption, LightningError
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import PluginManager, hookimpl, load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import recipe_path
from lightningrl_client.recipe_file import read_recipe
from lightningrl_runs.origin import newest_run
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.run_folder import RunFolder, default_run, explain_name

if TYPE_CHECKING:
    from rich.console import Console

    from lightningrl.protocols import StepReport
    from lightningrl_training.build import Parts
    from lightningrl_training.serving import Address

__all__ = ["OpenRun", "Source", "StepWatcher", "begin_run", "read_source"]

logger = logging.getLogger(__name__)

Source = str | Path | Recipe
"""A recipe, or the file or folder where one lies."""


def read_source(source: Source, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe less what is wrong with it, its name included, and a sentence for each."""
    recipe, wrong = read_recipe(source if isinstance(source, Recipe) else Path(source), settings)
    problem = explain_name(recipe.name)
    return recipe, wrong if problem is None else [*wrong, problem]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run that was checked, and whose folder is locked."""

    recipe: Recipe
    parts: Parts
    plugins: PluginManager
    folder: RunFolder
    is_resumed: bool

    async def train(self, console: Console, announce: Callable[[Address], None]) -> LoopState:
        """`announce` is called when workers can join and pages can be looked at."""
        from lightningrl_training.progress import make_progress
        from lightningrl_training.session import train_run

        with make_progress(console, self.recipe.loop.minutes, is_resumed=self.is_resumed) as progress:
            self.plugins.register(progress, distribution="lightningrl train")
            recipe, parts = self.recipe, self.parts
            if recipe.warm_start:
                from lightningrl_training.warm_start.stages import warm_start

                recipe, parts = await warm_start(recipe, parts, self.plugins, self.folder, progress)
            return await train_run(recipe, parts, self.plugins, self.folder, progress, announce)


@contextmanager
def begin_run(
    recipe: Source | None,
    *,
    run: str | Path | None,
    resume: bool,
    overwrite: bool,
    settings: Mapping[str, Any],
    runs: Path = Path("runs"),
) -> Iterator[OpenRun]:
    """Check what can be refused in seconds, then open the folder, which goes if new and the body fails at its start."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.memory_check import check_memory
    from lightningrl_training.tasks import explain_few_tasks
    from lightningrl_training.warm_start import explain_warm_start, is_tuned

    refuse_in_import("lightningrl.train")
    if resume and overwrite:
        raise ConfigError("--resume goes on with a run and --overwrite writes over it; give one of the two")
    plugins = load_plugins()
    source = Path(recipe) if isinstance(recipe, str) else recipe
    if resume:
        folder, whole = RunFolder.resume(Path(run) if run is not None else newest_run(runs), settings, source)
        try:
            missing = [] if is_tuned(folder.path) else explain_warm_start(whole)
            parts = build_checked(whole, plugins, will_work=True, wrong=missing)
            check_memory(whole, parts.models, plugins)
            folder.match_tasks(parts.tasks)
            folder.keep_settings(whole, settings)
            yield OpenRun(recipe=whole, parts=parts, plugins=plugins, folder=folder, is_resumed=True)
        finally:
            folder.close()
        return
    if source is None:
        raise ConfigError("no recipe given; name a recipe's file or folder")
    whole, wrong = read_source(source, settings)
    parts = build_checked(whole, plugins, will_work=True, wrong=[*wrong, *explain_warm_start(whole)])
    check_memory(whole, parts.models, plugins)
    if few := explain_few_tasks(whole, parts.tasks.train):
        logger.warning("%s", few)
    for why in (*parts.without_tools, *parts.tasks.notes):
        logger.warning("%s", why)
    path = Path(run) if run is not None else default_run(runs, whole.name)
    origin = str(recipe_path(source).resolve()) if isinstance(source, Path) else None
    folder = RunFolder.create(path, whole, origin, settings, models=parts.models, overwrite=overwrite)
    try:
        folder.match_tasks(parts.tasks)
        yield OpenRun(recipe=whole, parts=parts, plugins=plugins, folder=folder, is_resumed=False)
    except LightningError as error:
        is_begun = folder.latest() is not None or folder.has_rollouts() or (folder.path / "warm_start").is_dir()
        if not isinstance(error, Interruption) and not is_begun and str(folder.logs) not in str(error):
            folder.discard()  # and the sentence names no log in it
        raise
    finally:
        folder.close()


class StepWatcher:
    """Calls a function with each step's report."""

    def __init__(self, on_step: Callable[[StepReport], object]) -> None:
        self._on_step = on_step

    @hookimpl
    def lightningrl_step_finished(self, report: StepReport) -> None:
        self._on_step(report)
