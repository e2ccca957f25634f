"""Loggers that `lightningrl_loggers` brings by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lightningrl.plugins import Plugin
from lightningrl_training.loggers import services
from lightningrl_training.loggers.trackers import TensorBoardLogger, check_package

__all__ = ["logger_plugins"]


def logger_plugins() -> Iterator[Plugin]:
    for name, summary, factory in (
        ("mlflow", "MLflow, a server or a database in the run's folder", services.MlflowLogger),
        ("swanlab", "SwanLab, its cloud or files in the run's folder", services.SwanLabLogger),
        ("tensorboard", "event files in the run's folder, for TensorBoard", TensorBoardLogger),
        ("trackio", "trackio's local database and dashboard", services.TrackioLogger),
        ("wandb", "Weights & Biases", services.WandbLogger),
    ):
        check = partial(services.check_mlflow if name == "mlflow" else check_package, name)
        yield Plugin(name=name, summary=summary, factory=factory, check=check)
