"""`WholePath.run` waits for the rollouts, however short the server's own waits are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sizes import PATIENCE_S

from lightningrl.types import Outcome
from lightningrl_client.control.client import ServerClient
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.loopback import serving
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import RUN_KEY, WholePath


async def test_a_rollout_that_takes_longer_than_the_servers_longest_wait_is_waited_for(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    waits = 0
    wait_finished = store.wait_finished

    async def counted(rollout_ids: list[str], wait_s: float, min_finished: int | None) -> object:
        nonlocal waits
        waits += 1
        if waits == 3:
            (lease,) = [await store.lease("worker", 60.0, 60.0)]
            assert lease is not None
            await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, "late")
        return await wait_finished(rollout_ids, wait_s, min_finished)

    store.wait_finished = counted  # type: ignore[method-assign, assignment]
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, longest_wait_s=0.01)
    try:
        async with serving(app) as url, ServerClient(url, RUN_KEY) as client, asyncio.timeout(PATIENCE_S):
            path = WholePath(engine=ScriptedEngine(tiny_tokenizer()), client=client, url=url, folder=tmp_path)
            trajectory = await path.run_one("r", "x")
    finally:
        await store.close()
    assert (trajectory.output, waits) == ("late", 3)
