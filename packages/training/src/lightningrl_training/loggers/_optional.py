"""Imports of what is not installed by default."""

from __future__ import annotations

import importlib
from types import ModuleType

from lightningrl.errors import ConfigError

__all__ = ["import_logger"]


def import_logger(module: str, *, logger: str, package: str) -> ModuleType:
    """The module. Raises ConfigError naming the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"logger {logger!r} cannot be imported ({error}); install it with `pip install {package}`, or remove it"
        ) from error
