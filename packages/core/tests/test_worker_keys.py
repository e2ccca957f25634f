"""Who has which key: workers lease and report with one of their own, agents find no run key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lightningrl.engines.registry import EngineRegistry
from lightningrl.keys import worker_key
from lightningrl.runtime.pool import WorkerPool
from lightningrl.server.app import create_app
from lightningrl.store import SqlStore
from lightningrl.testing.scripted_server import ScriptedServer
from lightningrl.testing.store_conformance import make_spec

SEARCHING_AGENT = """
import gc, os

def search(reversed_key):
    def is_key(value): return isinstance(value, str) and value[::-1] == reversed_key
    in_memory = any(is_key(value) for holder in gc.get_objects() for value in gc.get_referents(holder))
    return [in_memory, any(map(is_key, os.environ.values())), "LIGHTNINGRL_KEY" in os.environ]
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


@pytest.mark.parametrize("given", ["run key", "worker key"])
async def test_an_agent_that_searches_its_process_finds_no_run_key(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("LIGHTNINGRL_KEY", server.run_key)
    (tmp_path / "agent.py").write_text(SEARCHING_AGENT)
    server.add_rollout("r0", server.run_key[::-1])
    key = server.run_key if given == "run key" else worker_key(server.run_key)
    async with WorkerPool(server.url, key, "agent.py:search", workers=1, base_dir=tmp_path, log_folder=tmp_path):
        await server.wait_finished()
    assert (server.result("r0") or {})["output"] == [False, False, False]


async def test_a_workers_key_leases_and_reports_and_opens_nothing_else(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    await store.create_rollouts([make_spec("r")])
    transport = httpx.ASGITransport(create_app(store, EngineRegistry(), run_key="the-run-key"))
    headers = {"Authorization": f"Bearer {worker_key('the-run-key')}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1", headers=headers) as http:
        lease = await http.post("/leases", json={"worker_id": "w", "wait_s": 0, "lease_s": 30})
        attempt = f"/rollouts/r/attempts/{lease.json()['attempt']}"
        running = [["r", lease.json()["attempt"]]]
        beat = await http.post("/workers/w/beat", json={"pid": 1, "host": "h", "state": "ready", "running": running})
        result = await http.post(f"{attempt}/result", json={"outcome": "succeeded", "output": "42"})
        assert [answer.status_code for answer in (lease, beat, result)] == [200, 200, 200]
        for path in ("/trajectories", "/cancel"):
            assert (await http.post(path, json={"rollout_ids": ["r"]})).status_code == 401, path
        for path in ("/rollouts", "/rollouts/r", "/steps", "/status"):
            assert (await http.get(path)).status_code == 401, path
    await store.close()
