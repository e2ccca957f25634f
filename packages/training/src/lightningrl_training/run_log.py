"""The log of a run while it trains: every measurement into its loggers, the curve drawn anew, ignored fields named
once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from lightningrl.errors import LightningError
from lightningrl.plugins import PluginManager
from lightningrl.protocols import MetricLogger
from lightningrl.recipe import Recipe
from lightningrl_client.control.client import ServerClient
from lightningrl_training.explanations import explain_ignored
from lightningrl_training.loggers import JsonlLogger, draw_curve
from lightningrl_training.run_folder import RunFolder

__all__ = ["RunLog"]

logger = logging.getLogger(__name__)


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
                self._loggers.append(plugin.build(folder=folder.path, run=folder.path.name, config=config))

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
