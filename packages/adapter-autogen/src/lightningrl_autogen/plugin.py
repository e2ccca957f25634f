"""Plugin of this distribution: the `autogen` adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


def build_adapter() -> Any:
    """The adapter; AutoGen is imported here and not before."""
    from lightningrl_autogen.adapter import AutoGenAdapter

    return AutoGenAdapter()


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="autogen",
        summary="AutoGen: roles, spans and tools of agents and teams, on runtimes of any kind",
        factory=build_adapter,
    )
