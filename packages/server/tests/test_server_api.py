"""The control API over real HTTP, in a server process of its own: what it does, and what it says to bad input."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from processes import all_ended
from sizes import PATIENCE_S

from lightningrl import control_api as api
from lightningrl.errors import ServerError
from lightningrl.records import Lease, Score, WorkerState
from lightningrl.types import Outcome, RolloutState, SamplingSettings, ToolStatus, Transition
from lightningrl_client.control.client import ServerClient
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import ServerSettings
from lightningrl_server.store import SqlStore
from lightningrl_testing.loopback import serving
from lightningrl_testing.store_conformance import make_call, make_spec

RUN_KEY = "the-run-key"


class Scene:
    """A server on a port, its store at hand, a client with the run key and a bare one."""

    def __init__(self, url: str, store: SqlStore, client: ServerClient, http: httpx.AsyncClient) -> None:
        self.url = url
        self.store = store
        self.client = client
        self.http = http

    async def post(self, path: str, body: Any = None, key: str = RUN_KEY, **more: Any) -> httpx.Response:
        more = more if "content" in more else {"json": body, **more}
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        return await self.http.post(f"/api/v1{path}", headers=headers, **more)

    async def leased(self, rollout_id: str = "a", **fields: Any) -> Lease:
        await self.client.create_rollouts([make_spec(rollout_id, **fields)])
        lease = await self.client.lease("w", 60.0)
        assert lease is not None and lease.rollout_id == rollout_id
        return lease


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, max_body_bytes=200_000, longest_wait_s=5.0)
    async with (
        serving(app, ws="none") as url,
        ServerClient(url, RUN_KEY) as client,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        yield Scene(url, store, client, http)
    await store.close()


def sentence(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


async def is_still_running(scene: Scene) -> bool:
    """What the server answers to a worker's beat of the first attempt of `a`."""
    beat = api.WorkerBeat(pid=1, host="h", state=WorkerState.READY, running=[("a", 1)])
    return not (await scene.client.ask(api.BEAT, beat, wid="w")).over


# ---------------------------------------------------------------------- what it does


async def test_a_rollout_goes_all_the_way(scene: Scene) -> None:
    lease = await scene.leased(sampling=SamplingSettings(temperature=0.5))
    assert lease.task.answer is None
    first = make_call(lease, "c0", [1, 2], [3], tool_call_ids=("call_1",), span_id="00f067aa0ba902b7")
    await scene.store.append_calls([first, make_call(lease, "c1", [4], [5, 6], parent=first, agent="write")])
    assert await is_still_running(scene)
    await scene.client.ask(api.REWARDS, api.Rewards(rewards={"style": 0.5}, transition_id="c1"), rid="a", n=1)
    waiting = asyncio.create_task(scene.client.wait(["a"], 5.0))
    assert (
        await scene.client.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "SELECT 1"}, duration_s=0.1)
        is RolloutState.SUCCEEDED
    )
    assert await waiting == ("a",)
    (got,), (kept,) = await scene.client.trajectories(["a"]), await scene.store.trajectories(["a"])
    assert (got.output, got.task, got.outcome, got.duration_s) == (kept.output, kept.task, kept.outcome, 0.1)
    assert [one.prompt_ids.tolist() for one in got.transitions] == [[1, 2], [1, 2, 3, 4]]
    for one, same in zip(got.transitions, kept.transitions, strict=True):
        for name in Transition.__slots__:
            assert np.array_equal(getattr(one, name), getattr(same, name)), name
    await scene.client.set_scores(
        [
            Score(
                rollout_id="a",
                attempt=1,
                rewards={"match": 1.0},
                reward=1.0,
                advantages={"c0": np.ones(1, np.float32), "c1": None},
            )
        ]
    )
    await scene.client.mark_trained(1, ["a"], {"loss": 0.5, "odd": float("nan")})
    (step,) = await scene.client.steps()
    assert (step.step, step.rollout_ids, step.metrics) == (1, ("a",), {"loss": 0.5})
    shown = await scene.client.rollout("a")
    assert (shown.reward, shown.trained_step, shown.attempts[0].calls) == (1.0, 1, 2)
    assert [one.spec.id for one in await scene.client.list_rollouts()] == ["a"]
    assert await scene.client.rollback_steps(0) == 1
    status = await scene.client.status()
    assert (status.counts.states, status.counts.outcomes) == ({RolloutState.SUCCEEDED: 1}, {Outcome.SUCCEEDED: 1})
    assert (status.counts.calls, status.policies) == (2, [])


async def test_a_worker_waits_for_the_next_rollout(scene: Scene) -> None:
    waiting = asyncio.create_task(scene.client.lease("w", 60.0, wait_s=PATIENCE_S))
    await asyncio.sleep(0.1)
    await scene.client.create_rollouts([make_spec("a")])
    lease = await waiting
    assert lease is not None and lease.base_path == "/rollouts/a/attempts/1/v1"
    assert await scene.client.lease("w", 60.0, wait_s=0.05) is None


async def test_a_worker_that_went_away_while_waiting_gets_no_rollout(scene: Scene) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await scene.post("/leases", {"worker_id": "gone", "wait_s": 5.0, "lease_s": 600.0}, timeout=0.2)
    await scene.client.create_rollouts([make_spec("a")])
    lease = await scene.client.lease(
        "w", 60.0, wait_s=PATIENCE_S
    )  # at once, or when the server gives up on the one that went
    assert lease is not None and (lease.rollout_id, lease.attempt) == ("a", 1)


async def test_a_cancelled_rollout_tells_its_worker(scene: Scene) -> None:
    lease = await scene.leased()
    assert await scene.client.cancel(["a"]) == 1
    assert not await is_still_running(scene)
    async with ServerClient(scene.url, lease.key) as worker:
        with pytest.raises(ServerError, match=r"attempt 1 of rollout 'a' is over \(cancelled\)"):
            await worker.finish_attempt("a", 1, Outcome.SUCCEEDED)


async def test_a_repeated_result_is_acknowledged(scene: Scene) -> None:
    lease = await scene.leased()
    async with ServerClient(scene.url, lease.key) as worker:
        assert await worker.finish_attempt("a", 1, Outcome.SUCCEEDED, 1) is RolloutState.SUCCEEDED
        assert await worker.finish_attempt("a", 1, Outcome.SUCCEEDED, 1) is RolloutState.SUCCEEDED
    assert (await scene.client.trajectories(["a"]))[0].output == 1


async def test_interrupted_rollouts_are_queued_again(scene: Scene) -> None:
    await scene.leased()
    assert await scene.client.interrupt("restarted") == 1
    again = await scene.client.lease("w", 60.0)
    assert again is not None and again.attempt == 2


@pytest.mark.parametrize("zipped", [False, True])
async def test_tool_spans_become_tool_calls(scene: Scene, zipped: bool) -> None:
    lease = await scene.leased()
    await scene.store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("call_1",)))
    await scene.store.append_call(make_call(lease, "c1", [1], [2], span_id="aa" * 8))
    body = make_export(
        ("run", "11" * 8, "", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}),
        ("chat", "aa" * 8, "11" * 8, {"gen_ai.operation.name": "chat"}),
        (
            "execute_tool sql",
            "22" * 8,
            "11" * 8,
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "sql",
                "gen_ai.tool.call.id": "call_1",
                "gen_ai.tool.call.arguments": '{"q": 1}',
                "gen_ai.tool.call.result": "rows",
                "lightningrl.tool.status": "ok",
            },
        ),
        ("other", "33" * 8, "aa" * 8, {"gen_ai.operation.name": "execute_tool", "error.type": "ValueError"}),
    )
    headers = {"content-type": "application/x-protobuf", **({"content-encoding": "gzip"} if zipped else {})}
    for _ in range(2):
        content = gzip.compress(body) if zipped else body
        answer = await scene.post("/rollouts/a/attempts/1/v1/traces", key=lease.key, content=content, headers=headers)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-protobuf"
    await scene.client.finish_attempt("a", 1, Outcome.SUCCEEDED)
    (trajectory,) = await scene.client.trajectories(["a"])
    first, second = trajectory.tool_calls
    assert (first.name, first.arguments, first.result, first.status, first.transition_id) == (
        "sql",
        '{"q": 1}',
        "rows",
        ToolStatus.OK,
        "c0",
    )
    assert (first.agent, first.duration_s) == ("planner", 0.5)
    assert (second.name, second.error_type, second.transition_id, second.status) == (
        "other",
        "ValueError",
        "c1",
        ToolStatus.ERROR,
    )
    assert [one.agent for one in trajectory.transitions] == [None, "planner"]


async def test_the_api_describes_itself(scene: Scene) -> None:
    schema = (await scene.http.get("/openapi.json")).json()
    assert {
        "/api/v1/leases",
        "/api/v1/wait",
        "/api/v1/trajectories",
        "/api/v1/rollouts/{rid}/attempts/{n}/v1/traces",
    } <= set(schema["paths"])
    assert all(operation["summary"] for path in schema["paths"].values() for operation in path.values())
    assert (await scene.http.get("/health")).json() == {"ok": True}


# ---------------------------------------------------------------------- what it says to bad input


async def test_wrong_keys(scene: Scene) -> None:
    lease = await scene.leased()
    await scene.leased("b")
    answer = await scene.post("/leases", {"worker_id": "w"}, key="wrong")
    assert (
        answer.status_code == 401
        and sentence(answer) == "wrong key for '/api/v1/leases'; send the run key as 'Authorization: Bearer …'"
    )
    assert (await scene.post("/leases", {"worker_id": "w"}, key=lease.key)).status_code == 401
    other = await scene.post("/rollouts/b/attempts/1/result", {"outcome": "succeeded"}, key=lease.key)
    assert (
        other.status_code == 401
        and sentence(other) == "wrong key for attempt 1 of rollout 'b'; use the key of its lease"
    )
    nothing = await scene.http.post("/api/v1/leases", json={"worker_id": "w"})
    assert nothing.status_code == 401 and "needs a key" in sentence(nothing)
    assert (await scene.store.rollout("b")).state is RolloutState.RUNNING


async def test_a_reused_rollout_id(scene: Scene) -> None:
    assert await scene.client.create_rollouts([make_spec("a")]) == 1
    assert await scene.client.create_rollouts([make_spec("a")]) == 0
    with pytest.raises(ServerError, match="rollout id 'a' is already used with another task; choose a new id"):
        await scene.client.create_rollouts([make_spec("a", question="else")])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"worker_id": ', "the body: it is not JSON"),
        (b"[]", "the body"),
        (b'{"worker_id": "w", "wait": 3}', "the body: Object contains unknown field `wait`"),
        (b'{"worker_id": "w", "wait_s": -3}', "Expected `float` >= 0.0 - at `$.wait_s`"),
        (b"\xff\xfe", "the body: it is not JSON"),
    ],
)
async def test_bodies_that_cannot_be_read(scene: Scene, content: bytes, says: str) -> None:
    answer = await scene.post("/leases", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and says in sentence(answer)


async def test_rollouts_that_cannot_be(scene: Scene) -> None:
    with pytest.raises(ServerError, match=r"rollout id 'a/b' must be 1 to 200 of"):
        await scene.client.create_rollouts([make_spec("a/b")])
    with pytest.raises(ServerError, match="'a' needs max_attempts"):
        await scene.client.create_rollouts([make_spec("a", max_attempts=0)])
    with pytest.raises(ServerError, match="no rollout 'nope'"):
        await scene.client.rollout("nope")


async def test_oversized_bodies(scene: Scene) -> None:
    answer = await scene.post("/rollouts", content=b"x" * 200_001)
    assert (
        answer.status_code == 413
        and sentence(answer) == "the request body is larger than 200000 bytes; send less at a time"
    )

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x" * 1000

    answer = await scene.post("/rollouts", content=endless())
    assert answer.status_code == 413
    lease = await scene.leased()
    bomb = gzip.compress(b"\0" * 5_000_000)
    answer = await scene.post(
        "/rollouts/a/attempts/1/v1/traces", key=lease.key, content=bomb, headers={"content-encoding": "gzip"}
    )
    assert answer.status_code == 413 and "larger than 200000 bytes when unpacked" in sentence(answer)


async def test_spans_that_are_none(scene: Scene) -> None:
    lease = await scene.leased()
    for headers, status, says in (
        ({}, 400, "no OTLP"),
        ({"content-encoding": "gzip"}, 400, "not compressed as it says"),
        ({"content-encoding": "br"}, 415, "compressed as 'br'"),
    ):
        answer = await scene.post(
            "/rollouts/a/attempts/1/v1/traces", key=lease.key, content=b"\xff\xff\xff", headers=headers
        )
        assert answer.status_code == status and says in sentence(answer)


async def test_a_finished_attempt_takes_nothing_more(scene: Scene) -> None:
    lease = await scene.leased()
    await scene.client.finish_attempt("a", 1, Outcome.TIMEOUT)
    answer = await scene.post("/rollouts/a/attempts/1/v1/traces", key=lease.key, content=make_export())
    assert answer.status_code == 409 and "attempt 1 of rollout 'a' is over (timeout)" in sentence(answer)
    answer = await scene.post("/rollouts/a/attempts/1/result", {"outcome": "succeeded"})
    assert answer.status_code == 409 and "the result 'succeeded' came too late" in sentence(answer)
    assert (await scene.client.status()).counts.late == 2


async def test_a_rollout_trained_twice(scene: Scene) -> None:
    await scene.client.create_rollouts([make_spec("a")])
    await scene.client.mark_trained(1, ["a"], {})
    answer = await scene.post("/steps", {"step": 2, "rollout_ids": ["a"], "metrics": {}})
    assert (
        answer.status_code == 409 and sentence(answer) == "rollout 'a' was trained in step 1; a rollout is trained once"
    )


async def test_paths_that_are_none(scene: Scene) -> None:
    answer = await scene.http.get("/api/v1/nothing")
    assert answer.status_code == 404 and sentence(answer) == "there is nothing at '/api/v1/nothing'; see /openapi.json"
    answer = await scene.http.get("/api/v1/leases")
    assert answer.status_code == 405 and "does not take GET" in sentence(answer)


async def test_a_full_disk(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db", pragmas={"max_page_count": 60})
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY)
    headers = {"authorization": f"Bearer {RUN_KEY}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers) as http:
        spec = {"id": "a", "group_id": "g", "task": {"id": "t", "input": os.urandom(200_000).hex()}}
        answer = await http.post("/api/v1/rollouts", json={"rollouts": [spec]})
        assert answer.status_code == 507 and "no room on the disk for the store" in sentence(answer)
        spec["task"] = {"id": "t", "input": "small"}
        assert (await http.post("/api/v1/rollouts", json={"rollouts": [spec]})).json() == {"count": 1}
    await store.close()


# ---------------------------------------------------------------------- the process


def settings(tmp_path: Path, **fields: Any) -> ServerSettings:
    return ServerSettings(store_url=f"sqlite:///{tmp_path}/store.db", run_key=RUN_KEY, **fields)


async def test_a_killed_server_comes_back_on_its_port_and_forgets_nothing(tmp_path: Path) -> None:
    async with ServerProcess(settings(tmp_path), log_path=tmp_path / "logs" / "server.log") as server:
        assert stat.S_IMODE((tmp_path / "logs" / "server.log").stat().st_mode) == 0o600
        async with ServerClient(server.url, RUN_KEY) as client:
            await client.create_rollouts([make_spec("a")])
            lease = await client.lease("w", 60.0)
            assert lease is not None and server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            assert await server.wait_ended() == -signal.SIGKILL
            finishing = asyncio.create_task(client.finish_attempt("a", 1, Outcome.SUCCEEDED, 42))
            url = server.url
            await server.restart()
            assert server.url == url and await finishing is RolloutState.SUCCEEDED
            assert (await client.trajectories(["a"]))[0].output == 42
        await server.stop()
        assert await server.wait_ended() == 0


async def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ServerProcess(settings(tmp_path, port=port), log_path=tmp_path / "server.log")
        with pytest.raises(
            ServerError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; stop what uses the port"
        ):
            await server.start()
    assert await server.wait_ended() == 1


async def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ServerError, match="no readable SQLite database"):
        await ServerProcess(settings(tmp_path), log_path=tmp_path / "server.log").start()


async def test_the_server_goes_when_its_parent_goes(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from lightningrl_server.launcher import ServerProcess\n"
        "from lightningrl_server.settings import ServerSettings\n"
        "async def main():\n"
        "    server = ServerProcess(ServerSettings.model_validate_json(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(100_000)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, settings(tmp_path).model_dump_json()], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    (tmp_path / "pid").write_text(await asyncio.to_thread(parent.stdout.readline))
    async with all_ended(tmp_path / "pid"):
        parent.kill()
        parent.wait()
        parent.stdout.close()
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.close()


def test_the_server_imports_no_machine_learning() -> None:
    code = (
        "import sys, lightningrl_server.process, lightningrl_server.app, lightningrl_server.store.sql, lightningrl_server.gateway.app\n"
        "import lightningrl_server.rendering.renderer\n"
        "print(sorted({'torch', 'langchain', 'verl', 'ray', 'vllm'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def make_export(*spans: tuple[str, str, str, dict[str, str]]) -> bytes:
    """An OTLP export of (name, span id, parent span id, attributes), half a second each."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for index, (name, span_id, parent, attributes) in enumerate(spans):
        span = scope.spans.add(
            name=name, span_id=bytes.fromhex(span_id), parent_span_id=bytes.fromhex(parent), trace_id=b"\1" * 16
        )
        span.start_time_unix_nano = 10**18 + index
        span.end_time_unix_nano = span.start_time_unix_nano + 500_000_000
        for key, value in attributes.items():
            span.attributes.add(key=key).value.string_value = value
    return bytes(request.SerializeToString())
