"""Commands of traces and their options; the work of each lies in a module of its own, imported when it runs."""

from __future__ import annotations

from lightningrl.commands import describe_command
from lightningrl.plugins import Plugin
from lightningrl_traces.curation.command import curate

__all__ = ["COMMANDS"]

COMMANDS: tuple[Plugin, ...] = (describe_command(curate),)
