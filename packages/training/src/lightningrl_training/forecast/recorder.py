"""Writes a run's forecast while it trains, from the rollouts of its first step or steps, and its outcome at the end.

group_credited ─► groups so far ─► step_finished, enough rollouts, another step ─► Evidence ─► forecast.json
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
from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit.scoring import CreditedGroup, has_signal
from lightningrl_training.forecast.evidence import gather
from lightningrl_training.forecast.movement import Movement, at_full_rate
from lightningrl_training.forecast.prediction import predict
from lightningrl_training.forecast.record import FORECAST, RunForecast, measure_outcome
from lightningrl_viewer.reading.metrics import read_metrics

__all__ = ["ENOUGH", "ForecastRecorder"]

logger = logging.getLogger(__name__)

ENOUGH: Final = 64
"""Rollouts that a forecast is made from, where the first steps have as many."""
PART: Final = 5
"""Steps that may lend their rollouts: one part in so many of the run's, at least two, the second for what it moves."""


class ForecastRecorder:
    """Watches a run, as a plugin. It costs the run two forward passes of at most 64 calls."""

    def __init__(self, recipe: Recipe, folder: Path, backends: Mapping[str, Backend], *, step: int) -> None:
        """`backends`: by policy. `step`: of the checkpoint that the run goes on from; a forecast is made
        from the first steps alone."""
        self._recipe = recipe
        self._folder = folder
        self._backends = backends
        self._is_watching = step == 0
        self._has_enough = False
        self._groups: list[CreditedGroup] = []
        self._movement: Movement | None = None
        self._measured: list[float | None] = []
        """Nats by which the first step moved its rollouts, and the second the same ones."""
        self._measuring: asyncio.Task[None] | None = None

    @hookimpl
    def lightningrl_group_credited(self, group: TrajectoryGroup, advantages: Advantages) -> None:
        if self._is_watching and not self._has_enough:
            signal = has_signal(group, advantages)
            self._groups.append(CreditedGroup(group=group, advantages=advantages, has_signal=signal))

    @hookimpl
    def lightningrl_step_finished(self, report: StepReport) -> None:
        if not self._is_watching:
            return
        if self._movement is None:
            self._movement = Movement(self._backends, tuple(self._groups))
        if report.step <= 2:
            self._measuring = asyncio.create_task(self._measure(self._movement, self._measuring))
        self._has_enough = sum(len(group.group.trajectories) for group in self._groups) >= ENOUGH
        steps = self._recipe.loop.steps
        if report.step >= min(steps, max(2, steps // PART)) or (report.step >= 2 and self._has_enough):
            self._is_watching = False
            if self._measuring is not None:
                self._measuring.add_done_callback(lambda _: self._write(report.step))

    async def aclose(self) -> None:
        """Write the outcome beside the forecast, at the run's end."""
        if self._measuring is not None:
            await asyncio.wait({self._measuring})
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

    async def _measure(self, movement: Movement, before: asyncio.Task[None] | None) -> None:
        """Add what the last step moved, in another thread."""
        if before is not None:
            await asyncio.wait({before})
        try:
            self._measured.append(await asyncio.to_thread(movement.measure))
        except Exception:  # noqa: BLE001  the boundary to a backend: its movement is not known, and the run goes on
            self._measured.append(None)

    def _write(self, step: int) -> None:
        moved, carried = [*self._measured, None, None][:2]
        try:
            evidence = gather(
                self._recipe,
                self._groups,
                moved=at_full_rate(moved, self._recipe),
                carried=at_full_rate(carried, self._recipe, step=2),
            )
            self._groups = []
            if evidence is not None:
                RunForecast(after_step=step, evidence=evidence, forecast=predict(evidence)).write(self._folder)
        except (LightningError, OSError) as error:  # of the forecast alone: the run goes on
            logger.warning("the run's forecast is not written into %r: %s", FORECAST, error)
