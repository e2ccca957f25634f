"""`forecast.json` of a run folder: the forecast that was made early in the run, and what became of it.

{"after_step": 1, "evidence": {…}, "forecast": {"gain": 0.21, "low": 0.05, "high": 0.4}, "outcome": {"gain": 0.18, …}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lightningrl.errors import RunFolderError
from lightningrl_training.forecast.evidence import Evidence
from lightningrl_training.forecast.prediction import GainForecast
from lightningrl_viewer.belongings import write_durably

__all__ = ["FORECAST", "Outcome", "RunForecast", "measure_outcome"]

FORECAST: Final = "forecast.json"
LAST: Final = 4
"""The last steps, one part in so many of all, whose rewards are a run's end: one step's tasks are a small sample."""


class Outcome(BaseModel):
    """End of a run, in rewards scaled to [0, 1]."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    steps: int
    """Steps that the run has taken."""
    before: float
    """Mean reward of the rollouts that the forecast was made from."""
    after: float
    """Mean reward of the last quarter of the steps."""

    @property
    def gain(self) -> float:
        """Gain in mean reward."""
        return self.after - self.before


class RunForecast(BaseModel):
    """A run's forecast and, where it has ended, its outcome."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    after_step: int
    """The step after which it was made: its rollouts are of the steps up to it."""
    evidence: Evidence
    forecast: GainForecast
    outcome: Outcome | None = None

    def write(self, run: Path) -> None:
        """Write it into the run's folder. Raises OSError."""
        write_durably(run / FORECAST, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, run: Path) -> RunForecast | None:
        """Read that of a run's folder; None where it has none. Raises RunFolderError where it cannot be read."""
        try:
            return cls.model_validate_json((run / FORECAST).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            raise RunFolderError(f"{str(run / FORECAST)!r} cannot be read: {first}; remove the file") from error


def measure_outcome(rows: Sequence[Mapping[str, float]], before: float, bounds: tuple[float, float]) -> Outcome | None:
    """Measure the outcome from a run's metrics. `before`: scaled mean reward at the beginning; `bounds`: least and most
    of a reward. None where no step had a reward."""
    low, high = bounds
    rewards = {int(row["step"]): float(row["reward"]) for row in rows if "reward" in row and row["step"] > 0}
    if not rewards:
        return None
    steps = max(rewards)
    last = [reward for step, reward in rewards.items() if step > steps - max(1, round(steps / LAST))]
    after = min(1.0, max(0.0, (fmean(last) - low) / (high - low)))
    return Outcome(steps=steps, before=before, after=after)
