"""LightningRL adapter for LangChain and LangGraph. LangChain is imported when the adapter is, so that listing plugins
stays light."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightningrl_langchain.adapter import LangChainAdapter

__all__ = ["LangChainAdapter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lightningrl_langchain import adapter

        return getattr(adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
