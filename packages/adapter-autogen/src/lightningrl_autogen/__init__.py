"""LightningRL adapter for AutoGen (AgentChat and Core). AutoGen is imported when the adapter is, so that listing
plugins stays light."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightningrl_autogen.adapter import AutoGenAdapter

__all__ = ["AutoGenAdapter"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lightningrl_autogen import adapter

        return getattr(adapter, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
