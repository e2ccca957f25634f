"""Metrics for TensorBoard, trackio and Weights & Biases, which `lightningrl_loggers` brings by these names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.plugins import Plugin

__all__ = ["TensorBoardLogger", "TrackioLogger", "WandbLogger", "logger_plugins"]

PROJECT = "lightningrl"
STEP = "training_step"


class _Tracker:
    """The common part: `close`, which may be called again."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._ending = ExitStack()
        self._ending.callback(end)

    def close(self) -> None:
        self._ending.close()


class TensorBoardLogger(_Tracker):
    """Writes event files into the run's folder `tensorboard`; neither torch nor TensorFlow is needed."""

    def __init__(self, *, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError when tensorboard cannot be imported."""
        summary = import_package("tensorboard", "tensorboard.summary")
        (folder / "tensorboard").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._writer: Any = summary.Writer(str(folder / "tensorboard"))
        super().__init__(self._writer.close)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()


class TrackioLogger(_Tracker):
    """Keeps metrics in trackio's local database; `trackio show` opens it."""

    def __init__(self, *, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError when trackio cannot be imported."""
        trackio = import_package("trackio")
        self._run: Any = trackio.init(project=PROJECT, name=run, config=dict(config), resume="allow", embed=False)
        super().__init__(self._run.finish)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)


class WandbLogger(_Tracker):
    """Logs to Weights & Biases against `training_step`, so that steps run again after a resume overwrite nothing and
    are not refused. Account, server and offline mode are set as wandb says (`WANDB_MODE=offline`)."""

    def __init__(self, *, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        """Raises ConfigError when wandb cannot be imported."""
        wandb = import_package("wandb")
        (folder / "wandb").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=PROJECT, name=run, dir=str(folder), config=dict(config))
        self._run.define_metric("*", step_metric=STEP)
        super().__init__(self._run.finish)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})


def logger_plugins() -> Iterator[Plugin]:
    for name, summary, factory in (
        ("tensorboard", "event files in the run's folder, for TensorBoard", TensorBoardLogger),
        ("trackio", "trackio's local database and dashboard", TrackioLogger),
        ("wandb", "Weights & Biases", WandbLogger),
    ):
        yield Plugin(name=name, summary=summary, factory=factory, check=partial(check_package, name))


def check_package(name: str, _recipe: object) -> None:
    """Raise ConfigError where the logger's package is not installed."""
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"logger {name!r} is not installed; install it with `pip install 'lightningrl[{name}]'`, or remove it"
        )


def import_package(name: str, module: str | None = None) -> ModuleType:
    """Import a logger's package, or a module of it. Raises ConfigError naming the package to install."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise ConfigError(
            f"logger {name!r} cannot be imported ({error}); install it with `pip install {name}`, or remove it"
        ) from error
