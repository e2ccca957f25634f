"""An ASGI app on a loopback port, up and gone at once: uvicorn without polls, which cost each test a third of a second.

async with serving(app) as url: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn

__all__ = ["LoopbackServer", "serving"]

_GRACE_S: Final = 1.0
"""Seconds that answers under way may take at the end."""


class LoopbackServer(uvicorn.Server):
    """Ends within milliseconds of `should_exit`."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110  also set from other threads
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.force_exit else _GRACE_S):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  uvicorn's state
                    await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve on the running loop and yield the app's URL. `options` are uvicorn's."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = LoopbackServer(
        uvicorn.Config(app, **{"log_level": "warning", "access_log": False, "lifespan": "off", **options})
    )
    running = asyncio.create_task(server._serve([listener]))  # `serve` would take over the test's signal handlers
    try:
        while not server.started:
            if running.done():
                running.result()
            await asyncio.sleep(0.002)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        listener.close()
