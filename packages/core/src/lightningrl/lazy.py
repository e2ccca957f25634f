"""Packages whose public names stand in their `__init__.pyi`, each imported when it is first used."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["lazy_names", "read_homes"]


def read_homes(init: str) -> dict[str, str]:
    """Public names of a package with the module that defines each, as the stub beside its `__init__.py` lists them."""
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_names(package: str, init: str) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package, from its stub."""
    homes = read_homes(init)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get, sorted(homes)
