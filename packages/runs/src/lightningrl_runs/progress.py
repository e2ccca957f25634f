"""Progress of a run: steps that are done, what is under way, and, while it is live, the time that is left.

left = steps that are missing × time of a step, by the newest ones − time since the last
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.types import RolloutMode
from lightningrl_runs.queries.rollout_counts import Cell

__all__ = ["RunProgress", "measure_progress"]

_NEWEST: Final = 20
"""Steps by which the time of a step is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """Steps of a run that are done, and its work under way."""

    steps: int
    """Training steps that are done."""
    total: int | None
    """Steps that its recipe asks for; None = it has no recipe."""
    phase: str
    """Work under way: the step, or the validation."""
    ended: int
    """Rollouts of it that have ended."""
    wanted: int
    """Rollouts that it asks for; 0 = not known."""
    seconds_left: float | None
    """Forecast; None = the run is over, or nothing says how long a step takes."""
    is_bound: bool
    """True where the forecast rests on a first step alone, which takes longer than others."""
    collecting: float = 0.5
    """Part of a step's time that its rollouts take; learning takes the rest."""

    @property
    def share(self) -> float:
        """Part of the steps that is done, from 0 to 1; rollouts of the one under way count as its first part."""
        if not self.total:
            return 0.0
        within = min(1.0, self.ended / self.wanted) if self.wanted and self.phase.startswith("step") else 0.0
        return min(1.0, (self.steps + self.collecting * within) / self.total)


def measure_progress(
    rows: Sequence[Mapping[str, Any]],
    cells: Sequence[Cell],
    recipe: Mapping[str, Any],
    *,
    is_live: bool,
    now: float | None = None,
) -> RunProgress:
    """Measure it. `rows`: all metrics by step; `cells`: all rollouts, counted; `recipe`: its values by dotted key."""
    trained = [row for row in rows if "rollouts" in row]
    done = max((int(row["step"]) for row in trained), default=0)
    total = recipe.get("loop.steps")
    steps = [cell for cell in cells if cell.mode is RolloutMode.TRAIN and cell.step == done + 1]
    checks = [cell for cell in cells if cell.mode is RolloutMode.VALIDATION and cell.step == done]
    if any(cell.outcome is None for cell in checks):
        phase, under_way = f"validation after step {done}", checks
        wanted = sum(cell.count for cell in checks)
    else:
        phase, under_way = f"step {done + 1}", steps
        wanted = recipe.get("loop.tasks_per_step", 0) * recipe.get("loop.group_size", 0)
    pace, is_bound = _pace(rows, trained)
    left = None
    if is_live and isinstance(total, int) and pace is not None and done < total:
        since = (time.time() if now is None else now) - float(rows[-1].get("time", 0.0)) if rows else 0.0
        left = (total - done) * pace - min(pace, max(0.0, since))
        if isinstance(limit := recipe.get("loop.minutes"), int | float) and trained:
            left = min(left, max(0.0, 60 * (limit - trained[-1].get("minutes", 0.0))))
    return RunProgress(
        steps=done,
        total=total if isinstance(total, int) else None,
        phase=phase,
        ended=sum(cell.count for cell in under_way if cell.outcome is not None),
        wanted=wanted,
        seconds_left=left,
        is_bound=is_bound,
        collecting=_collecting(trained) if is_live else 0.0,
    )


def _collecting(trained: Sequence[Mapping[str, Any]]) -> float:
    """Return the part of the newest step's time that its rollouts took; a half where nothing says it."""
    newest = trained[-1] if trained else {}
    whole = newest.get("seconds", 0.0)
    return min(1.0, newest["seconds_collect"] / whole) if whole and "seconds_collect" in newest else 0.5


def _pace(rows: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool]:
    """Return the seconds of a step, validation and checkpoints in them; and whether that is a first step's, which
    imports what all of them need."""
    # minutes 2.0 after step 1, 2.5 and 3.0 after the next two: (3.0 - 2.0) · 60 / 2 = 30 s a step
    minutes = [row["minutes"] for row in trained if "minutes" in row][-_NEWEST - 1 :]
    if len(minutes) > 1 and minutes[-1] > minutes[0]:
        return 60 * (minutes[-1] - minutes[0]) / (len(minutes) - 1), False
    forecast = next((row["forecast_step_seconds"] for row in rows if "forecast_step_seconds" in row), None)
    if forecast is not None:
        return float(forecast), False
    return (float(trained[-1]["seconds"]), True) if trained and "seconds" in trained[-1] else (None, False)
