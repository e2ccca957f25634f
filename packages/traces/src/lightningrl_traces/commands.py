"""Commands of traces and their options; the work of each lies in a module of its own, imported when it runs."""

from __future__ import annotations

from lightningrl.plugins import Plugin

__all__ = ["COMMANDS"]

COMMANDS: tuple[Plugin, ...] = ()
