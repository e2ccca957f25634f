"""Metrics for TensorBoard. `pip install tensorboard`; neither torch nor TensorFlow is needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightningrl_training.loggers._optional import import_logger

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes event files into `folder`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when tensorboard is not installed."""
        summary = import_logger("tensorboard.summary", logger="tensorboard", package="tensorboard")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer: Any = summary.Writer(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
