"""A real control API on a loopback port, with a real SQLite store; no gateway, no engine.

async with live_control(folder) as control:
    await control.store.create_rollouts([make_spec("r")])
    ControlClient(control.url, control.run_key).lease(worker_id="w", wait_s=0, lease_s=30)     (in a thread)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.store.protocol import Store

__all__ = ["LiveControl", "live_control"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveControl:
    """A running control API."""

    url: str
    run_key: str
    store: Store


@asynccontextmanager
async def live_control(folder: Path, *, max_body_bytes: int = 32 * 2**20) -> AsyncIterator[LiveControl]:
    """`folder` takes the store."""
    import uvicorn

    from lightningrl.gateway.engines import EngineRegistry
    from lightningrl.server.app import create_app
    from lightningrl.store import SqlStore

    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    app = create_app(store, EngineRegistry(), run_key="the-run-key", max_body_bytes=max_body_bytes)
    config: Any = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server._serve([listener]))  # `serve` would take over the test's signal handlers
    try:
        while not server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.005)
        yield LiveControl(url=f"http://127.0.0.1:{listener.getsockname()[1]}", run_key="the-run-key", store=store)
    finally:
        server.should_exit = True
        await serving
        listener.close()
        await store.close()
