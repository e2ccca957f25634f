"""The loggers that a recipe names, made."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, gather
from lightningrl_training.loggers.protocol import MetricLogger
from lightningrl_training.loggers.tensorboard import TensorBoardLogger
from lightningrl_training.loggers.trackio import TrackioLogger
from lightningrl_training.loggers.wandb import WandbLogger

__all__ = ["build_loggers", "check_loggers"]

NAMES = ("tensorboard", "trackio", "wandb")


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError naming the loggers that do not exist or are not installed."""
    gather(*(partial(_check_logger, name) for name in names))


def _check_logger(name: str) -> None:
    if name not in NAMES:
        guess = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {guess[0]!r}?" if guess else f"there are: {', '.join(NAMES)}"
        raise ConfigError(f"no logger named {name!r}; {hint}")
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ConfigError(f"logger {name!r} is not installed; install it with `pip install 'lightningrl[{name}]'`, or remove it")


def build_loggers(names: Sequence[str], *, folder: Path, run: str, config: Mapping[str, Any]) -> list[MetricLogger]:
    """Loggers by name, beside `metrics.jsonl`. Raises ConfigError when one does not exist or is not installed.

    `folder` is the run's; `run` its name there; `config` what wandb and trackio show as settings.
    """
    check_loggers(names)
    makers: dict[str, Callable[[], MetricLogger]] = {
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard"),
        "trackio": lambda: TrackioLogger(run=run, config=config),
        "wandb": lambda: WandbLogger(run=run, folder=folder, config=config),
    }
    return [makers[name]() for name in dict.fromkeys(names)]
