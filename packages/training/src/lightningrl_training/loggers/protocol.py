"""A sink of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["MetricLogger"]


@runtime_checkable
class MetricLogger(Protocol):
    """Keeps numbers by step. A step may be logged in several parts (training, then validation)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None:
        """Write what is pending. Closing twice does nothing."""
        ...
