"""`lightningrl plugins`: what is installed, from which distribution."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightningrl.plugins import Plugin, load_plugins

__all__ = ["plugins_command"]


def plugins_command() -> None:
    manager = load_plugins()
    table = Table(
        Column("kind", no_wrap=True),
        Column("name", no_wrap=True),
        Column("what it is", ratio=1),
        title="Installed plugins",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        expand=True,
    )
    kinds = {
        "adapter": manager.adapters,
        "trainer backend": manager.trainers,
        "reward": manager.rewards,
        "intermediate reward": manager.intermediate_rewards,
        "credit assigner": manager.credit_assigners,
        "credit need": manager.records("lightningrl_credit_needs"),
        "worker launcher": manager.worker_launchers,
        "dialect": manager.dialects,
        "pages": manager.pages,
    }
    for kind, records in kinds.items():
        for record in records.values():
            table.add_row(kind, record.name, Text.assemble(_summary(record), (f"  from {record.distribution}", "dim")))
    Console().print(table)


def _summary(plugin: Plugin) -> str:
    """What it is, and for a backend what it declares that it can do."""
    return plugin.summary if plugin.capabilities is None else f"{plugin.summary} (declares: {plugin.capabilities})"
