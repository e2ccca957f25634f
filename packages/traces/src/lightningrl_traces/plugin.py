"""Registers the commands of traces and the importers of their formats."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands"]


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_traces.commands import COMMANDS

    yield from COMMANDS
