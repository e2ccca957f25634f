"""A real control API on a loopback port, with a real SQLite store; no gateway, no engine.

async with live_control(folder) as control:
    await control.store.create_rollouts([make_spec("r")])
    ControlClient(control.url, control.run_key).lease(worker_id="w", wait_s=0, lease_s=30)     (in a thread)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lightningrl.store.protocol import Store
from lightningrl.testing.loopback import serving

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
    from lightningrl.engines.registry import EngineRegistry
    from lightningrl.server.app import create_app
    from lightningrl.store import SqlStore

    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    app = create_app(store, EngineRegistry(), run_key="the-run-key", max_body_bytes=max_body_bytes)
    try:
        async with serving(app, ws="none") as url:
            yield LiveControl(url=url, run_key="the-run-key", store=store)
    finally:
        await store.close()
