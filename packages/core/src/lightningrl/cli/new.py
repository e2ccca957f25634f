"""`lightningrl new`: copies of tested templates."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightningrl.scaffold import new_adapter

__all__ = ["new_adapter_command"]


def new_adapter_command(name: str, folder: Path) -> None:
    made = new_adapter(name, folder)
    Console().print(f"made {made}\nnext: fill in the hooks, then run its tests:  pip install -e {made} && pytest {made}", highlight=False)
