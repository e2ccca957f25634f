"""The logger of TensorBoard, and what loggers of other packages have in common."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lightningrl.errors import ConfigError

__all__ = ["TensorBoardLogger", "Tracker", "check_package", "import_package"]

EXTRAS: Final = frozenset({"tensorboard", "trackio", "wandb"})
"""Loggers with an extra; what the others need does not go with all of our other extras."""


class Tracker:
    """The common part: `close`, which may be called again."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._ending = ExitStack()
        self._ending.callback(end)

    def close(self) -> None:
        self._ending.close()


class TensorBoardLogger(Tracker):
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


def check_package(name: str, _recipe: object) -> None:
    """Raise ConfigError where the logger's package is not installed."""
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        package = f"'lightningrl[{name}]'" if name in EXTRAS else name
        raise ConfigError(f"logger {name!r} is not installed; install it with `pip install {package}`, or remove it")


def import_package(name: str, module: str | None = None) -> ModuleType:
    """Import a logger's package, or a module of it. Raises ConfigError naming the package to install."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise ConfigError(
            f"logger {name!r} cannot be imported ({error}); install it with `pip install {name}`, or remove it"
        ) from error
