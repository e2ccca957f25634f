"""Who counts what the gateway does; told of each call, so it has to be quick."""

from __future__ import annotations

from typing import Protocol

__all__ = ["CallWatch"]


class CallWatch(Protocol):
    """`lightningrl_server.metrics.ServerMetrics` is one."""

    def answered(self, policy: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        """A call was sampled and recorded."""
        ...

    def refused(self, code: str) -> None:
        """A call was not answered with a completion."""
        ...
