"""A run's session: its world is built, the loop trains in it, and what is measured is kept, also of a run that fails.

train_run ─► Parts (refuses bad recipes) ─► serve_policy ─► Trainer.run ─► curve.png
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack

from lightningrl.backends import Describer
from lightningrl.keys import view_key
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl_client.control.client import ServerClient
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.loop import Trainer
from lightningrl_training.progress import Progress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.run_log import RunLog
from lightningrl_training.serving import Address, RunningServices, serve_policy, server_settings
from lightningrl_training.step_forecast import give_time
from lightningrl_training.steps_telemetry import StepSpans, open_spans
from lightningrl_viewer.reading.metrics import read_metrics

__all__ = ["train_run"]

logger = logging.getLogger(__name__)

Announce = Callable[[Address], None]


async def train_run(
    recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, progress: Progress, announce: Announce
) -> LoopState:
    """Train to the recipe's end in `folder`, from its newest checkpoint if it has one. Draws the curve, also of a run
    that fails.

    `announce` is called when workers can join.
    """
    saved, runtime = folder.latest(), recipe.runtime
    state = saved.state if saved else LoopState(step=0, seconds=0.0, rollouts=0)
    rows = read_metrics(folder.metrics) if saved and folder.metrics.is_file() else []
    log = RunLog(folder, recipe, plugins, resume_after=state.step if saved else -1)
    stack = ExitStack()
    try:
        settings = server_settings(recipe, parts, folder.store_url, host=runtime.server_host, port=runtime.server_port)
        settings = settings.model_copy(update={"folder": folder.path.resolve()})
        folder.write_view_key(view_key(settings.run_key))
        spans = stack.enter_context(open_spans(recipe.telemetry, os.environ, run=folder.path.name))
        async with serve_policy(
            settings,
            parts,
            folder.logs,
            saved.folder if saved else None,
            spans=spans,
            workers=recipe,
            servers=runtime.servers,
            starting=lambda what: progress.phase(what, 0, 0),
        ) as services:
            announce(Address(url=services.server.url, run_key=settings.run_key))
            log.client = services.client
            made = max((*(int(row["step"]) for row in rows), state.step))
            await _warn_of_lost_steps(services.client, folder, made=made, learned=state.step)
            for name, backend in services.backends.items():
                if settings.policies[name].trainable and isinstance(backend, Describer):
                    progress.say(f"{name}: {await asyncio.to_thread(backend.describe)}")
            trainer = _make_trainer(recipe, parts, plugins, folder, progress, services, log, state, spans)
            reached = await trainer.run()
            await log.finish()
            return reached
    finally:
        log.close_loggers()
        await asyncio.to_thread(stack.close)
        await log.draw_last()


def _make_trainer(
    recipe: Recipe,
    parts: Parts,
    plugins: PluginManager,
    folder: RunFolder,
    progress: Progress,
    services: RunningServices,
    log: RunLog,
    state: LoopState,
    spans: StepSpans,
) -> Trainer:
    parts.scorer.load(state.credit)
    return Trainer(
        recipe=give_time(recipe, services.policies.speed),
        tasks=parts.tasks,
        folder=folder,
        control=services.client,
        policies=services.policies,
        evaluator=parts.evaluator,
        scorer=parts.scorer,
        plugins=plugins,
        progress=progress,
        log=log.log,
        state=state,
        start_workers=services.start_workers,
        spans=spans,
    )


async def _warn_of_lost_steps(client: ServerClient, folder: RunFolder, *, made: int, learned: int) -> None:
    """Warn of steps that the ledger lacks. A step is there before it is anywhere else in the folder: one that is not
    has been taken away with what else was there."""
    lost = set(range(1, made + 1)) - {record.step for record in await client.steps()}
    if lost:
        logger.warning(
            "the store %r has lost its records of %d of %d steps (%d to %d): it or its write-ahead log was deleted "
            "or cut short; the weights keep what they learned up to step %d, and no step is trained twice; to have "
            "the records, put the files back and resume again",
            folder.store_url.removeprefix("sqlite:///"),
            len(lost),
            made,
            min(lost),
            max(lost),
            learned,
        )
