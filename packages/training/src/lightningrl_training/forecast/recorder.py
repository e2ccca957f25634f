"""Writes a run's forecast while it trains, from the rollouts of its first step or steps, and its outcome at the end.

group_credited ─► groups so far ─► step_finished, enough rollouts ─► Evidence ─► forecast.json
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightningrl.backends import Backend
from lightningrl.errors import LightningError
from lightningrl.plugins import hookimpl
from lightningrl.protocols import StepReport
from lightningrl.recipe import Recipe
from lightningrl.types import Advantages, RolloutMode, Trajectory, TrajectoryGroup
from lightningrl_credit.scoring import CreditedGroup, has_signal
from lightningrl_training.forecast.evidence import Answer, GreedyAnswers, gather, judge
from lightningrl_training.forecast.movement import Movement, measure_movement
from lightningrl_training.forecast.prediction import predict
from lightningrl_training.forecast.record import FORECAST, RunForecast, measure_outcome
from lightningrl_viewer.reading.metrics import read_metrics

__all__ = ["ENOUGH", "ForecastRecorder"]

logger = logging.getLogger(__name__)

ENOUGH: Final = 64
"""Rollouts that a forecast is made from, where the first steps have as many."""
PART: Final = 5
"""Steps that may lend their rollouts: one part in so many of the run's, at least one."""


class ForecastRecorder:
    """Watches a run, as a plugin. It costs the run one forward pass of at most 64 calls."""

    def __init__(self, recipe: Recipe, folder: Path, backends: Mapping[str, Backend], *, step: int) -> None:
        """`backends`: by policy. `step`: of the checkpoint that the run goes on from; a forecast is made
        from the first steps alone."""
        self._recipe = recipe
        self._folder = folder
        self._backends = backends
        self._is_watching = step == 0
        self._groups: list[CreditedGroup] = []
        self._validated: list[Answer] = []
        """Greedy answers before the first step."""
        self._moving: asyncio.Task[Movement | None] | None = None

    @hookimpl
    def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
        is_first = trajectory.mode is RolloutMode.VALIDATION and trajectory.step == 0
        if self._is_watching and is_first and self._recipe.validation_sampling.temperature == 0:
            self._validated += judge([trajectory], *self._recipe.reward_bounds)

    @hookimpl
    def lightningrl_group_credited(self, group: TrajectoryGroup, advantages: Advantages) -> None:
        if self._is_watching:
            signal = has_signal(group, advantages)
            self._groups.append(CreditedGroup(group=group, advantages=advantages, has_signal=signal))

    @hookimpl
    def lightningrl_step_finished(self, report: StepReport) -> None:
        if not self._is_watching:
            return
        if self._moving is None:
            groups = tuple(self._groups)
            measuring = asyncio.to_thread(measure_movement, self._backends, groups, self._recipe)
            self._moving = asyncio.create_task(measuring)
        rollouts = sum(len(group.group.trajectories) for group in self._groups)
        if rollouts >= ENOUGH or report.step >= max(1, self._recipe.loop.steps // PART):
            self._is_watching = False
            self._moving.add_done_callback(lambda moving: self._write(moving, report.step))

    async def aclose(self) -> None:
        """Write the outcome beside the forecast, at the run's end."""
        if self._moving is not None:
            await asyncio.wait({self._moving})
            await asyncio.sleep(0)  # the callback's turn
        metrics = self._folder / "metrics.jsonl"
        try:
            made = RunForecast.read(self._folder)
            if made is None or not metrics.is_file():
                return
            outcome = measure_outcome(read_metrics(metrics), made.evidence.reward, self._recipe.reward_bounds)
            made.model_copy(update={"outcome": outcome}).write(self._folder)
        except (LightningError, OSError) as error:  # of the forecast alone: the run has ended well
            logger.warning("the run's outcome is not written into %r: %s", FORECAST, error)

    def _write(self, moving: asyncio.Task[Movement | None], step: int) -> None:
        try:
            movement = None if moving.cancelled() or moving.exception() is not None else moving.result()
            greedy = GreedyAnswers.measure(self._validated)
            evidence = gather(self._recipe, self._groups, movement=movement, greedy=greedy)
            self._groups = []
            if evidence is not None:
                RunForecast(after_step=step, evidence=evidence, forecast=predict(evidence)).write(self._folder)
        except (LightningError, OSError) as error:  # of the forecast alone: the run goes on
            logger.warning("the run's forecast is not written into %r: %s", FORECAST, error)
