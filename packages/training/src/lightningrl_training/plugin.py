"""Registers training's commands."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_training.commands import declarations, study_declarations

    yield from (*declarations.COMMANDS, *study_declarations.COMMANDS)
