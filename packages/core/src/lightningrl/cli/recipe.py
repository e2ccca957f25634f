"""`lightningrl recipe show`: what a run would be, value by value, with where each is from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightningrl.config import load_recipe
from lightningrl.plugins import PluginManager, load_plugins

__all__ = ["show_command"]


def show_command(source: Path, *, settings: Mapping[str, Any]) -> None:
    recipe = load_recipe(source, settings)
    written = set(_written(load_recipe(source)))
    values = dict(_flat(json.loads(recipe.frozen_text())))
    values |= {key: value for key, value in _backend_defaults(recipe.backend, load_plugins()).items() if key not in values}
    table = Table(
        Column("key", no_wrap=True), Column("value", overflow="fold"), Column("from", no_wrap=True), box=None, padding=(0, 1, 0, 0)
    )
    for key in sorted(values, key=lambda key: ("." in key, key)):
        origin = "--set" if _is_in(key, settings) else source.name if _is_in(key, written) else "default"
        style = "dim" if origin == "default" else None
        table.add_row(escape(key), escape(json.dumps(values[key], ensure_ascii=False, default=str)), origin, style=style)
    Console().print(table)


def _is_in(key: str, keys: Any) -> bool:
    """Whether the key or a table around it is among `keys`."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield f"{prefix}{name}", value


def _written(model: pydantic.BaseModel, prefix: str = "") -> Iterator[str]:
    """Keys that the file sets."""
    for name in model.model_fields_set - {"folder"}:
        yield from _written_below(getattr(model, name), f"{prefix}{name}")


def _written_below(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from _written(value, f"{key}.")
    elif isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _written_below(below, f"{key}.{name}")
    else:
        yield key


def _backend_defaults(backend: str, plugins: PluginManager) -> dict[str, Any]:
    """What the trainer backend takes where the recipe says nothing; empty where it is not installed."""
    import inspect

    if backend not in plugins.trainers:
        return {}
    parameters = inspect.signature(plugins.trainers[backend].factory).parameters.values()
    hidden = {"policy", "name", "seed"}
    return {f"learner.{one.name}": one.default for one in parameters if one.default is not one.empty and one.name not in hidden}
