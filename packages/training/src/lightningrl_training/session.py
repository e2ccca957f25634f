"""A run's session: its world is built, the loop trains in it, and what is measured is kept, also of a run that fails.

train_run ─► Parts (refuses bad recipes) ─► serve_policy ─► Trainer.run ─► curve.png
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from lightningrl.backends import Describer
from lightningrl.errors import LightningError
from lightningrl.keys import view_key
from lightningrl.plugins import PluginManager
from lightningrl.protocols import MetricLogger
from lightningrl.recipe import Recipe
from lightningrl_client.control.client import ServerClient
from lightningrl_runs.metrics import read_metrics
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.explanations import explain_ignored
from lightningrl_training.loggers import JsonlLogger, draw_curve
from lightningrl_training.loop import Trainer
from lightningrl_training.progress import Progress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.serving import Address, give_time, serve_policy, server_settings
from lightningrl_training.steps_telemetry import open_spans

__all__ = ["train_run"]

logger = logging.getLogger(__name__)

Announce = Callable[[Address], None]


async def train_run(
    recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, progress: Progress, announce: Announce
) -> LoopState:
    """Train to the recipe's end in `folder`, from its newest checkpoint if it has one. Draws the curve, failed or not.
    `announce` is called when workers can join."""
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
            parts.scorer.load(state.credit)
            trainer = Trainer(
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
                read_memory=services.read_memory,
                spans=spans,
            )
            reached = await trainer.run()
            await log.finish()
            return reached
    finally:
        log.close_loggers()
        await asyncio.to_thread(stack.close)
        await log.draw_last()


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


class RunLog:
    """Takes what is measured of a run. Close it, also when the run failed."""

    def __init__(self, folder: RunFolder, recipe: Recipe, plugins: PluginManager, *, resume_after: int) -> None:
        """`resume_after`: the step of the checkpoint that the run goes on from; -1 for a new run."""
        self.client: ServerClient | None = None
        """The run's server, once it is up."""
        self._folder = folder
        self._recipe = recipe
        self._loggers: list[MetricLogger] = [JsonlLogger(folder.metrics, resume_after=resume_after)]
        self._looking: asyncio.Task[None] | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._warned = ""
        config = json.loads(recipe.frozen_text())
        with folder.making(*recipe.loggers):
            for name in dict.fromkeys(recipe.loggers):
                plugin = plugins.find("lightningrl_loggers", name)
                options = recipe.logger_options.get(name, {})
                self._loggers.append(plugin.build(folder=folder.path, run=folder.path.name, config=config, **options))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._loggers:
            each.log(step, metrics)
        if self._looking is None and self.client is not None:
            self._looking = asyncio.create_task(self._name_ignored(self.client))
        is_point = any(name.startswith("validation/") for name in metrics)
        if is_point and (self._drawing is None or self._drawing.done()):  # else the next drawing has the point
            self._drawing = asyncio.create_task(asyncio.to_thread(self._draw))

    async def finish(self) -> None:
        """Return once ignored fields are named."""
        if self._looking is not None:
            await self._looking

    def close_loggers(self) -> None:
        for each in self._loggers:
            each.close()

    async def draw_last(self) -> None:
        """Draw the curve a last time."""
        if self._drawing is not None:
            await asyncio.wait({self._drawing})
        await asyncio.to_thread(self._draw)

    async def _name_ignored(self, client: ServerClient) -> None:
        """Name the fields of the agent's calls that nobody reads."""
        try:
            sentence = explain_ignored((await client.status()).policies)
        except LightningError as error:  # the run goes on without it
            sentence = f"nobody can say which fields of the agent's calls are read: {error}"
        if sentence:
            logger.warning("%s", sentence)

    def _draw(self) -> None:
        metrics, temperature = self._folder.metrics, self._recipe.validation_sampling.temperature
        try:
            if metrics.is_file():
                draw_curve(metrics, self._folder.curve, title=self._recipe.name, validation_temperature=temperature)
        except LightningError as error:
            if str(error) != self._warned:
                logger.warning("%s", error)
            self._warned = str(error)
