"""Registers training's commands and loggers."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands", "lightningrl_loggers"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_training.commands import declarations, study_declarations

    yield from (*declarations.COMMANDS, *study_declarations.COMMANDS)


@hookimpl
def lightningrl_loggers() -> Iterable[Plugin]:
    from lightningrl_training.loggers.catalogue import logger_plugins

    yield from logger_plugins()
