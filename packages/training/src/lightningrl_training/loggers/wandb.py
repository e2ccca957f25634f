"""Metrics for Weights & Biases. `pip install wandb`; account, server and offline mode are set as wandb says (`WANDB_MODE=offline`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightningrl_training.loggers._optional import import_logger

__all__ = ["WandbLogger"]

STEP = "training_step"


class WandbLogger:
    """Logs against `training_step`, so that steps run again after a resume overwrite nothing and are not refused."""

    def __init__(self, *, run: str, folder: Path, config: Mapping[str, Any], project: str = "lightningrl") -> None:
        """Raises ConfigError when wandb is not installed."""
        wandb = import_logger("wandb", logger="wandb", package="wandb")
        (folder / "wandb").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=project, name=run, dir=str(folder), config=dict(config))
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
        self._run = None
