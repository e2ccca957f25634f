"""The run's memory: rollouts, attempts, calls, rewards, steps. Durable before acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightningrl_server.store.sql import SqlStore

__all__ = ["SqlStore"]


def __getattr__(name: str) -> Any:
    if name == "SqlStore":
        from lightningrl_server.store.sql import SqlStore

        return SqlStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
