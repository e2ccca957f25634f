"""Servers and worker pools, watched: a server that dies is started again, a pool that gives up ends the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lightningrl.errors import ServerError
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.launcher import ServerProcess

__all__ = ["PoolStarter", "watch"]

logger = logging.getLogger(__name__)

MOST_STARTS = 5
"""Tries to start the server again before the run fails."""
RESTART_PAUSE_S = 0.5


class PoolStarter:
    """Starts the pools once. Where one fails, its watcher says so."""

    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        self._pools = pools
        self._starting: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        if not self._starting:
            self._starting = [asyncio.create_task(pool.start()) for pool in self._pools]
            for task in self._starting:
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen

    async def ready(self) -> None:
        """Start the pools; returns once the first worker is ready."""
        self.begin()
        if self._starting:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def watch(servers: Sequence[ServerProcess], pools: Sequence[WorkerPool]) -> AsyncIterator[None]:
    """Restart a server when it dies; end the body when a pool gives up."""
    body = asyncio.current_task()
    assert body is not None
    failure: list[BaseException] = []

    async def wait_for(ending: Awaitable[Any]) -> None:
        try:
            await ending
        except Exception as error:  # noqa: BLE001  handed to the body, which raises it
            failure.append(error)
            body.cancel()

    endings = (*map(_keep_alive, servers), *(pool.wait() for pool in pools))
    watchers = [asyncio.create_task(wait_for(ending)) for ending in endings]
    try:
        yield
    except asyncio.CancelledError:
        if failure:
            body.uncancel()
            raise failure[0] from None
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def _keep_alive(server: ServerProcess) -> None:
    """Start it again whenever it ends; give up when it does not come up `MOST_STARTS` times in a row."""
    while True:
        status = await server.wait_ended()
        logger.warning("the server ended with status %s; starting it again at %s", status, server.url)
        for left in reversed(range(MOST_STARTS)):
            try:
                await server.restart()
                break
            except ServerError as error:
                if not left:
                    raise
                logger.warning("%s; trying again", error)
                await asyncio.sleep(RESTART_PAUSE_S)
