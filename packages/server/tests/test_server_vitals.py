"""`/status` says how long the server's event loop stood still, and what memory it has."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.metrics import ServerMetrics
from lightningrl_server.store import SqlStore


async def test_a_loop_that_stood_still_is_seen_in_the_status(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    metrics = ServerMetrics()
    app = create_app(store, EngineRegistry(), run_key="the-run-key", metrics=metrics)
    watching = asyncio.create_task(metrics.watch(interval_s=0.001))
    await asyncio.sleep(0)
    time.sleep(0.2)
    while not metrics.longest_pause_s:
        await asyncio.sleep(0)
    headers = {"authorization": "Bearer the-run-key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers) as http:
        status = (await http.get("/api/v1/status")).json()
    assert status["longest_pause_s"] >= 0.19
    assert status["memory_bytes"] is None or status["memory_bytes"] > 2**20
    watching.cancel()
    await store.close()
