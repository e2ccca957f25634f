"""Who has which key: workers lease and report with one of their own, agents find no run key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.keys import process_key, worker_key
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_testing.store_conformance import make_spec

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


HOSTILE_AGENT = """
import gc, json, os, urllib.error, urllib.request
from lightningrl_client.runtime.settings import WorkerSettings

def turn_on_its_run(task):
    settings = next(one for one in gc.get_objects() if isinstance(one, WorkerSettings))
    supervisor = settings.worker_id.rpartition("-")[0]
    def post(path, body):
        request = urllib.request.Request(f"{settings.server_url}/api/v1{path}", json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {settings.worker_key}")
        try: return urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error: return error.code
    beat = {"pid": os.getpid(), "host": "h", "error": "the agent's own words"}
    said = [
        post(f"/workers/{name}/beat", {**beat, "state": state})
        for name in (settings.worker_id, supervisor, f"{supervisor}-1", "another")
        for state in ("failed", "lost")
    ]
    said.append(post("/workers/stop", {"prefix": ""}))
    said.append(post("/workers/interrupt", {"prefix": "", "reason": "mine"}))
    said.append(post(f"/workers/{supervisor}/beat", {**beat, "state": "ready"}))
    said.append(post("/leases", {"worker_id": f"{supervisor}-1"}))
    said.append(post("/rollouts/other/attempts/1/result", {"outcome": "succeeded", "output": "forged"}))
    said.append(post("/rollouts/other/attempts/1/rewards", {"rewards": {"forged": 1.0}}))
    return said
"""


async def test_an_agent_with_its_workers_key_ends_no_run_and_speaks_for_no_other_worker(
    server: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(HOSTILE_AGENT)
    other, _, _ = server.open_attempt("other")
    server.add_rollout("r0", "go")
    server.add_rollout("r1", "again")
    async with WorkerPool(
        server.url, server.run_key, "agent.py:turn_on_its_run", workers=1, base_dir=tmp_path, log_folder=tmp_path
    ) as pool:
        ending = asyncio.create_task(pool.wait())
        while not (server.result("r0") and server.result("r1")):
            await asyncio.sleep(0.05)
            assert not ending.done(), ending.exception()
        ending.cancel()
    assert [(server.result(f"r{number}") or {})["output"] for number in range(2)] == [[401] * 14] * 2
    assert other == 1 and server.result("other") is None


async def test_a_processes_key_beats_and_leases_as_that_worker_alone(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    await store.create_rollouts([make_spec("r"), make_spec("s"), make_spec("t")])
    transport = httpx.ASGITransport(create_app(store, EngineRegistry(), run_key="the-run-key"))
    key = process_key(worker_key("the-run-key"), "pool.0-1")
    headers = {"Authorization": f"Bearer {key}"}
    beat: dict[str, Any] = {"pid": 1, "host": "h", "state": "ready"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1", headers=headers) as http:
        mine = (await http.post("/leases", json={"worker_id": "pool.0-1/3"})).json()
        theirs = await store.lease("pool.0-2", 30.0)
        assert theirs is not None and (mine["rollout_id"], theirs.rollout_id) == ("r", "s")
        orders = await http.post("/workers/pool.0-1/beat", json={**beat, "running": [["r", 1], ["s", 1]]})
        assert orders.json()["over"] == [["s", 1]]  # a lease of another's is not kept
        assert (await http.post("/leases", json={"worker_id": "pool.0-2"})).status_code == 401
        then = {"worker_id": "pool.0-1", "key": key}
        own = {"Authorization": f"Bearer {mine['key']}"}
        for key in ("", "process-pool.0-1:0", process_key(worker_key("another"), "pool.0-1")):
            ended = await http.post(
                "/rollouts/r/attempts/1/result",
                json={"outcome": "succeeded", "then": {**then, "key": key}},
                headers=own,
            )
            assert ended.status_code == 401
        ended = await http.post(
            "/rollouts/r/attempts/1/result", json={"outcome": "succeeded", "then": then}, headers=own
        )
        assert (ended.status_code, ended.json()["lease"]["rollout_id"]) == (200, "t")
    await store.close()
