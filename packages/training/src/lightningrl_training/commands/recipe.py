"""`lightningrl recipe show`: what a run would be, value by value, with where each is from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_viewer.reading.recipe import list_recipe_keys, written_keys

__all__ = ["show_command"]


def show_command(source: Path, *, settings: Mapping[str, Any]) -> None:
    written = set(written_keys(load_recipe(source)))
    keys = list_recipe_keys(load_recipe(source, settings), settings=settings, written=written, plugins=load_plugins())
    table = Table(
        Column("key", no_wrap=True),
        Column("value", overflow="fold"),
        Column("from", no_wrap=True),
        box=None,
        padding=(0, 1, 0, 0),
    )
    for key in keys:
        origin = source.name if key.origin == "recipe" else key.origin
        style = "dim" if origin == "default" else None
        table.add_row(
            escape(key.key), escape(json.dumps(key.value, ensure_ascii=False, default=str)), origin, style=style
        )
    Console().print(table)
