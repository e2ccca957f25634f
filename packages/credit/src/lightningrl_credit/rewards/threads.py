"""Sync functions in daemon threads: one that never returns blocks neither the loop nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["DaemonThreads"]


class DaemonThreads:
    """At most `limit` functions at work at a time. One whose caller has given up no longer counts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, function: Callable[[], Any], *, on_start: Callable[[], None], name: str) -> Any:
        """Run `function()` and return or raise what it does. `on_start` is called when its turn comes."""
        loop = asyncio.get_running_loop()
        async with self.places():
            on_start()
            done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
            context = contextvars.copy_context()

            def work() -> None:
                try:
                    outcome: tuple[Any, BaseException | None] = (context.run(function), None)
                except BaseException as error:  # noqa: BLE001 — handed to the caller, who is on another thread
                    outcome = (None, error)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, done, outcome)

            threading.Thread(target=work, daemon=True, name=f"reward-{name}").start()
            value, error = await done
        if error is not None:
            raise error
        return value

    def places(self) -> asyncio.Semaphore:
        """Semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._limit))
        return self._places[1]


def _settle(done: asyncio.Future[tuple[Any, BaseException | None]], outcome: tuple[Any, BaseException | None]) -> None:
    if not done.done():
        done.set_result(outcome)
