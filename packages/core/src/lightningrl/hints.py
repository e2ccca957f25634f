"""The extra that brings a missing package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["missing_hint"]

EXTRAS: Final[Mapping[str, frozenset[str]]] = {
    "plot": frozenset({"matplotlib"}),
    "server": frozenset(
        {
            "httptools",
            "jinja2",
            "jsonschema",
            "prometheus_client",
            "renderers",
            "sqlalchemy",
            "starlette",
            "tokenizers",
            "transformers",
        }
        | {"uvicorn", "uvloop", "websockets"}
    ),
}
"""Packages that each extra of the core brings, by the names of import."""


def missing_hint(module: str) -> str | None:
    """The command that installs a module a bare `lightningrl` lacks; None where no extra of ours brings it."""
    package = module.partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"{package!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"
    return None
