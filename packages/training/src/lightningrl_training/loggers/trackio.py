"""Metrics for trackio, the local-first dashboard. `pip install trackio`, then `trackio show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightningrl_training.loggers._optional import import_logger

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """Keeps metrics in trackio's local database."""

    def __init__(self, *, run: str, config: Mapping[str, Any], project: str = "lightningrl") -> None:
        """Raises ConfigError when trackio is not installed."""
        trackio = import_logger("trackio", logger="trackio", package="trackio")
        self._run: Any = trackio.init(project=project, name=run, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        self._run = None
