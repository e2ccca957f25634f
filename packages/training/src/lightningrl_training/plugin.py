"""Registers training's commands, loggers and mutators of rewards."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands", "lightningrl_loggers", "lightningrl_reward_mutators"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_training.commands import declarations, study_declarations

    yield from (*declarations.COMMANDS, *study_declarations.COMMANDS)


@hookimpl
def lightningrl_loggers() -> Iterable[Plugin]:
    from lightningrl_training.loggers.catalogue import logger_plugins

    yield from logger_plugins()


@hookimpl
def lightningrl_reward_mutators() -> Iterable[Plugin]:
    from lightningrl_training.redteam.mutators import MUTATORS
    from lightningrl_training.redteam.trajectory_mutators import TRAJECTORY_MUTATORS

    for name, (summary, mutate) in (*MUTATORS.items(), *TRAJECTORY_MUTATORS.items()):
        yield Plugin(name=name, summary=summary, factory=lambda mutate=mutate: mutate)
