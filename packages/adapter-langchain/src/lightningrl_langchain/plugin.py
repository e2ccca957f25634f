"""Plugin of this distribution: the `langchain` adapter. LangChain is imported when it is made, and not before."""

from __future__ import annotations

from collections.abc import Iterable

import lightningrl_langchain
from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="langchain",
        summary="LangChain and LangGraph: roles, spans and tools of graphs and agents",
        factory=lambda: lightningrl_langchain.LangChainAdapter(),
    )
