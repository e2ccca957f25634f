"""Long texts are read and tokenised beside the event loop, so that nobody waits for them; short ones on it, which is cheaper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["LONG", "Threads"]

T = TypeVar("T")

LONG = 16_384
"""Characters from which on a text is long: a slow machine tokenises as many in about 20 ms."""


class Threads:
    """Two threads of a gateway: more would only compete with its event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, "lightningrl-gateway")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which reads a text of `size` characters. Raises what it raises."""
        if size < LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Let go of the threads; what they are at is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
