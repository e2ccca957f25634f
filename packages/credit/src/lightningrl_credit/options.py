"""Options of credit assigners, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightningrl.errors import ConfigError

__all__ = ["check_gamma", "options_of_kind"]


def check_gamma(name: str, gamma: float) -> None:
    """Raise ConfigError for what is no discount."""
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"{name} {gamma!r} is not between 0 and 1; try 0.95")


def options_of_kind(use: str, key: str, kind: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Select the given (not None) options of one kind of an assigner. Raises ConfigError for options of another."""
    if kind not in options:
        raise ConfigError(f"credit assigner {use!r}: {key} {kind!r} is none of {', '.join(map(repr, options))}")
    given = {name: {key: value for key, value in some.items() if value is not None} for name, some in options.items()}
    if unread := [name for other, some in given.items() if other != kind for name in some]:
        raise ConfigError(
            f"credit assigner {use!r} with {key} = {kind!r} does not read {', '.join(unread)}; leave it out"
        )
    return given[kind]
