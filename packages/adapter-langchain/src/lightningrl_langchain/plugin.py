"""Plugin of this distribution: the `langchain` adapter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


def build_adapter() -> Any:
    """The adapter; LangChain is imported here and not before."""
    from lightningrl_langchain.adapter import LangChainAdapter

    return LangChainAdapter()


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="langchain",
        summary="LangChain and LangGraph: roles, spans and tools of graphs and agents",
        factory=build_adapter,
    )
