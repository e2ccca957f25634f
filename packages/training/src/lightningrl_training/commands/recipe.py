"""`lightningrl recipe show`: what a run would be, value by value, with where each is from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Column

from lightningrl.console import escape
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.commands.printing import Page, make_table
from lightningrl_viewer.reading.recipe import list_recipe_keys, written_keys

__all__ = ["show_command"]


def show_command(source: Path, *, settings: Mapping[str, Any]) -> None:
    written = set(written_keys(load_recipe(source)))
    keys = list_recipe_keys(load_recipe(source, settings), settings=settings, written=written, plugins=load_plugins())
    table = make_table(
        Column("key", no_wrap=True), Column("value", overflow="fold"), Column("from", no_wrap=True), gap=1
    )
    for shown in keys:
        whence = source.name if shown.origin == "recipe" else shown.origin
        value = json.dumps(shown.value, ensure_ascii=False, default=str)
        table.add_row(escape(shown.key), escape(value), whence, style="dim" if whence == "default" else None)
    Page().table(table)
