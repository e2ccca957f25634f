"""The stages of a warm start, one after the other; each goes on where a killed process left it.

teacher ─► rows ─► tuning ─► the policy that the run starts from
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from lightningrl.errors import ConfigError, Interruption, LightningError
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl_client.recipe_file import with_settings
from lightningrl_traces.curation.curation import curate
from lightningrl_traces.curation.rules import Rules
from lightningrl_training.build import Parts
from lightningrl_training.progress import Progress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tuning.loss_curve import draw_losses
from lightningrl_training.tuning.session import build_backend, make_renderer, read_data, tune_policy
from lightningrl_training.tuning.settings import TuneSettings
from lightningrl_training.warm_start import is_tuned
from lightningrl_training.warm_start.folders import open_stage
from lightningrl_training.warm_start.settings import WarmStart, read_warm_start
from lightningrl_training.warm_start.teacher import ask_teacher

__all__ = ["warm_start"]

logger = logging.getLogger(__name__)

_LINES = 10
"""Updates that are told of, but for the last."""


async def warm_start(
    recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, progress: Progress
) -> tuple[Recipe, Parts]:
    """Tune the recipe's policy on what its `[warm_start]` names, unless that was done. Returns the recipe whose policy
    is the tuned one, with its parts. Raises LightningError."""
    place, name = folder.path / "warm_start", recipe.policy.name
    if not is_tuned(folder.path):
        place.mkdir(mode=0o700, exist_ok=True)
        settings = read_warm_start(recipe)
        rows = await _make_rows(settings, place, progress)
        await _tune(recipe, plugins, parts.models[name], rows, place / "tuning", progress)
    policy = (place / "tuning" / "policy").resolve()
    tuned = with_settings(recipe, {"policy.model": str(policy)})
    folder.place_policy(name, policy)
    return tuned, await asyncio.to_thread(Parts.build, tuned, plugins)


async def _make_rows(settings: WarmStart, place: Path, progress: Progress) -> Path:
    """The folder of rows: the one that is there, or the one that is curated."""
    rows = place / "rows"
    if settings.rows is not None or rows.is_dir():
        return settings.rows or rows
    run = settings.run or await ask_teacher(settings, place / "teacher", progress)
    _remove_drafts(place)
    progress.phase("curating", 0, 0)
    try:
        report = await curate([run], rows, Rules(min_reward=settings.threshold))
    except ConfigError as error:
        where = shlex.quote(str(run))
        raise ConfigError(
            f"warm_start: {error}; lower warm_start.threshold, or look at `lightningrl rollouts list --run {where}`"
        ) from None
    count = report.total(settings.tuning.method)
    progress.say(f"warm start: {count} rows for {settings.tuning.method}, of {report.rollouts_read} rollouts")
    return rows


def _remove_drafts(place: Path) -> None:
    """Remove what killed curations left."""
    for draft in place.glob(".rows.*"):
        shutil.rmtree(draft, ignore_errors=True)


async def _tune(recipe: Recipe, plugins: PluginManager, model: str, rows: Path, path: Path, progress: Progress) -> None:
    """Tune in a thread, which ends after the update that is under way where this task is cancelled."""
    stage = with_settings(recipe, {"tune.data": str(rows), "store_url": None, "runtime.servers": 1, "warm_start": {}})
    folder, stop = open_stage(path, stage, {recipe.policy.name: model}), threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(_take_updates, stage, plugins, model, folder, progress, stop))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({work})
        work.exception()  # it was told to stop
        raise
    finally:
        folder.close()


def _take_updates(
    recipe: Recipe, plugins: PluginManager, model: str, folder: RunFolder, progress: Progress, stop: threading.Event
) -> None:
    progress.phase("loading the policy to tune", 0, 0)
    (folder.path / "tune").mkdir(exist_ok=True)
    settings, renderer = TuneSettings.read(recipe.tune, recipe.folder), make_renderer(recipe, model)
    data = read_data(settings, renderer)
    steps = data.steps(settings)
    progress.say(f"tuning: {settings.method} on {len(data.training)} rows, {steps} updates; run folder {folder.path}")
    for reason, count in data.left_out.most_common():
        progress.say(f"left out: {count} × {reason}")

    def show(step: int, of: int, metrics: Mapping[str, float]) -> None:
        progress.phase("tuning", step, of)
        if metrics and (step == of or step * _LINES // of > (step - 1) * _LINES // of):
            losses = [f"{name} {metrics[name]:.4g}" for name in ("learn/loss", "validation/loss") if name in metrics]
            progress.say(f"tuning: update {step}/{of}: {', '.join(losses)}")
        if stop.is_set():
            raise Interruption("tuning was stopped")

    backend = build_backend(recipe, plugins, model, settings, data)
    try:
        tune_policy(recipe, folder, backend, data, settings, renderer, show)
    finally:
        backend.close()
    try:
        draw_losses(folder.metrics, folder.curve, title=f"{recipe.name}: {settings.method}")
    except LightningError as error:
        logger.warning("%s", error)
