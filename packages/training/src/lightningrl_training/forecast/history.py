"""Forecasts of past runs held against their outcomes: rank correlation, coverage, a table, a picture.

folders ─► forecast.json of each run below ─► pairs (forecast, gain) ─► Spearman, share of gains within the intervals
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from lightningrl_training.forecast.record import FORECAST, RunForecast

__all__ = ["Account", "PastRun", "make_account", "read_runs", "spearman"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """A run with its forecast and, where it has ended, its outcome."""

    folder: Path
    made: RunForecast

    @property
    def holds(self) -> bool | None:
        """True where the gain lies within the interval; None before the run's end."""
        if self.made.outcome is None:
            return None
        return self.made.forecast.low <= self.made.outcome.gain <= self.made.forecast.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Worth of forecasts, over runs that have ended."""

    runs: int
    spearman: float | None
    """Rank correlation of forecast and gain; None = fewer than three runs, or all alike."""
    coverage: float | None
    """Share of gains within their interval; None = no run has ended."""
    error: float | None
    """Median absolute error."""


def read_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Read the forecasts of run folders, given themselves or by a folder above, in order of their paths. Raises
    RunFolderError for a file that cannot be read."""
    return [PastRun(folder=place, made=made) for place in _places(folders) if (made := RunForecast.read(place))]


def make_account(runs: Sequence[PastRun]) -> Account:
    """Hold forecasts against outcomes."""
    pairs = [(run.made.forecast.gain, run.made.outcome.gain) for run in runs if run.made.outcome is not None]
    holds = [run.holds for run in runs if run.holds is not None]
    return Account(
        runs=len(pairs),
        spearman=spearman([forecast for forecast, _ in pairs], [gain for _, gain in pairs]),
        coverage=fmean(holds) if holds else None,
        error=median(abs(forecast - gain) for forecast, gain in pairs) if pairs else None,
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None for fewer than three values, or where all
    of one side are equal."""
    if len(first) < 3 or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    a, b = _ranks(first), _ranks(second)
    mean = (len(first) + 1) / 2
    together = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return float(together / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def _places(folders: Sequence[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for file in sorted(folder.rglob(FORECAST)):
            if file.parent not in seen:
                seen.add(file.parent)
                yield file.parent
