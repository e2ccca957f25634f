"""Registers training's commands, loggers and mutators of rewards."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands", "lightningrl_loggers", "lightningrl_reward_mutators"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_training.commands import COMMANDS

    yield from COMMANDS


@hookimpl
def lightningrl_loggers() -> Iterable[Plugin]:
    from functools import partial

    from lightningrl_training.loggers import services
    from lightningrl_training.loggers.trackers import TensorBoardLogger, check_package

    for name, summary, factory in (
        ("mlflow", "MLflow, a server or a database in the run's folder", services.MlflowLogger),
        ("swanlab", "SwanLab, its cloud or files in the run's folder", services.SwanLabLogger),
        ("tensorboard", "event files in the run's folder, for TensorBoard", TensorBoardLogger),
        ("trackio", "trackio's local database and dashboard", services.TrackioLogger),
        ("wandb", "Weights & Biases", services.WandbLogger),
    ):
        check = partial(services.check_mlflow if name == "mlflow" else check_package, name)
        yield Plugin(name=name, summary=summary, factory=factory, check=check)


@hookimpl
def lightningrl_reward_mutators() -> Iterable[Plugin]:
    from lightningrl_training.redteam.mutators import MUTATORS
    from lightningrl_training.redteam.trajectory_mutators import TRAJECTORY_MUTATORS

    for name, (summary, mutate) in (*MUTATORS.items(), *TRAJECTORY_MUTATORS.items()):
        yield Plugin(name=name, summary=summary, factory=lambda mutate=mutate: mutate)
