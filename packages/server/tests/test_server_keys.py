"""Three kinds of key: the run's opens everything, a worker's leases and reports, an attempt's opens its own attempt."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from lightningrl.keys import worker_key
from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutSpec, RolloutState, Task
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.engines.socket import engine_route
from lightningrl_server.gateway.app import create_gateway
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import leased, make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer

RUN_KEY = "the-run-key"
WORKER_KEY = worker_key(RUN_KEY)
RUN_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/rollouts", {"rollouts": []}),
    ("GET", "/rollouts", None),
    ("GET", "/rollouts/a", None),
    ("POST", "/wait", {"rollout_ids": ["a"]}),
    ("POST", "/trajectories", {"rollout_ids": ["a"]}),
    ("POST", "/scores", {"scores": []}),
    ("POST", "/steps", {"step": 1, "rollout_ids": []}),
    ("GET", "/steps", None),
    ("DELETE", "/steps?after=0", None),
    ("POST", "/cancel", {"rollout_ids": ["a"]}),
    ("POST", "/interrupt", {"reason": "why not"}),
    ("GET", "/status", None),
]
ATTEMPT_ROUTES: list[tuple[str, Any]] = [
    ("/api/v1/rollouts/{}/attempts/{}/result", {"outcome": "succeeded"}),
    ("/api/v1/rollouts/{}/attempts/{}/rewards", {"rewards": {"x": 1}}),
    ("/api/v1/rollouts/{}/attempts/{}/v1/traces", {}),
    ("/api/v1/rollouts/{}/attempts/{}/v1/logs", {}),
    ("/rollouts/{}/attempts/{}/v1/rewards", {"rewards": {"x": 1}}),
    ("/rollouts/{}/attempts/{}/v1/tool_calls", {"tool_calls": []}),
]

MODEL_ROUTES = [
    f"/rollouts/{{}}/attempts/{{}}/{path}"
    for path in ("v1/chat/completions", "v1/messages", "messages", "v1/responses")
]
WORKER_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/workers/w-0/beat", {"pid": 1, "host": "h", "state": "ready"}),
    ("GET", "/api/v1/workers?prefix=w", None),
    ("POST", "/api/v1/workers/stop", {"prefix": "w"}),
    ("POST", "/api/v1/workers/interrupt", {"prefix": "w", "reason": "stopped"}),
]


class Scene:
    def __init__(self, store: SqlStore, http: httpx.AsyncClient) -> None:
        self.store, self.http = store, http

    async def send(self, method: str, path: str, body: Any, key: str) -> httpx.Response:
        return await self.http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})

    async def leased(self, rollout_id: str = "a") -> Lease:
        task = Task(id="t", input={"question": "?"}, answer="THE GOLD ANSWER")
        await self.store.create_rollouts([RolloutSpec(id=rollout_id, task=task, group_id="g")])
        return await leased(self.store)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    engines = EngineRegistry()
    gateway = create_gateway(store, engines, {"policy": PolicyRenderer(tiny_tokenizer())})
    app = create_app(store, engines, run_key=RUN_KEY, routes=gateway.routes)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield Scene(store, http)
    await store.close()


def test_the_worker_key_is_the_same_for_a_run_and_does_not_hold_its_key() -> None:
    assert worker_key("run") == worker_key("run") != worker_key("run2")
    assert "run" not in worker_key("run") and worker_key("run").startswith("worker-")


async def test_with_the_worker_key_a_worker_does_all_of_its_work(scene: Scene) -> None:
    await scene.store.create_rollouts([make_spec("a")])
    lease = await scene.send("POST", "/api/v1/leases", {"worker_id": "w"}, WORKER_KEY)
    assert (lease.status_code, lease.json()["rollout_id"]) == (200, "a")
    for path, body in sorted(ATTEMPT_ROUTES, key=lambda route: "result" in route[0]):
        answer = await scene.send("POST", path.format("a", 1), body, WORKER_KEY)
        assert answer.status_code in (200, 204), (path, answer.text)
    assert (await scene.store.rollout("a")).outcome is Outcome.SUCCEEDED
    for method, path, body in WORKER_ROUTES:
        assert (await scene.send(method, path, body, WORKER_KEY)).status_code == 200, path


@pytest.mark.parametrize(("method", "path", "body"), WORKER_ROUTES)
async def test_an_attempts_key_does_not_speak_for_workers(scene: Scene, method: str, path: str, body: Any) -> None:
    lease = await scene.leased()
    assert (await scene.send(method, path, body, lease.key)).status_code == 401


@pytest.mark.parametrize(("method", "path", "body"), RUN_ROUTES)
async def test_the_worker_key_opens_nothing_of_the_trainers(scene: Scene, method: str, path: str, body: Any) -> None:
    await scene.leased()
    answer = await scene.send(method, f"/api/v1{path}", body, WORKER_KEY)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"].startswith("a worker's key does not open '/api/v1/")
    assert (await scene.store.rollout("a")).state is RolloutState.RUNNING
    assert (await scene.send(method, f"/api/v1{path}", body, RUN_KEY)).status_code in (200, 204, 409)


@pytest.mark.parametrize("key", [WORKER_KEY, "wrong", RUN_KEY + "x"])
def test_only_the_run_key_opens_the_engine_link(tmp_path: Path, key: str) -> None:
    from starlette.applications import Starlette

    client = TestClient(Starlette(routes=[engine_route(EngineRegistry(), RUN_KEY)]))
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/api/v1/engines", headers={"authorization": f"Bearer {key}"}),
    ):
        raise AssertionError("the engine link was opened")


async def test_a_lease_holds_no_gold_answer(scene: Scene) -> None:
    task = Task(id="t", input={"question": "?"}, answer="THE GOLD ANSWER", metadata={"hint": "in sight"})
    await scene.store.create_rollouts([RolloutSpec(id="a", task=task, group_id="g")])
    answer = await scene.send("POST", "/api/v1/leases", {"worker_id": "w"}, WORKER_KEY)
    told = {"id": "t", "input": {"question": "?"}, "answer": None, "metadata": {"hint": "in sight"}}
    assert "GOLD" not in answer.text and answer.json()["task"] == told


@pytest.mark.parametrize(("path", "body"), ATTEMPT_ROUTES)
async def test_an_unknown_attempt_looks_like_somebody_elses(scene: Scene, path: str, body: Any) -> None:
    mine, _ = await scene.leased("a"), await scene.leased("b")
    for key in (mine.key, "wrong"):
        foreign = await scene.send("POST", path.format("b", 1), body, key)
        for rollout_id, number in (
            ("nobody", "1"),
            ("b", "7"),
            ("b", "0"),
            ("b", str(2**63)),
            ("b", "9" * 1500),
            ("b", "-1"),
            ("b", "x"),
        ):
            unknown = await scene.send("POST", path.format(rollout_id, number), body, key)
            expected = foreign.text.replace("'b'", f"'{rollout_id}'").replace("attempt 1 ", f"attempt {number[:20]} ")
            assert (unknown.status_code, unknown.text) == (foreign.status_code, expected) and unknown.status_code == 401


@pytest.mark.parametrize("path", [*(path for path, _ in ATTEMPT_ROUTES), *MODEL_ROUTES])
async def test_the_key_is_looked_at_before_the_body_is_read(scene: Scene, path: str) -> None:
    await scene.leased()
    read = 0

    async def content() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(10):
            read += 1
            yield b"x" * 1000

    for url in (path.format("a", 1), "/api/v1/leases", "/api/v1/rollouts", "/api/v1/trajectories"):
        answer = await scene.http.post(url, content=content(), headers={"authorization": "Bearer wrong"})
        assert answer.status_code == 401
    assert read == 0


@pytest.mark.parametrize("number", [str(2**63), "9" * 1500, "-1", "x", "0", "7"])
async def test_a_number_that_no_attempt_has_is_refused_with_a_sentence(scene: Scene, number: str) -> None:
    await scene.leased()
    for path, body in ATTEMPT_ROUTES:
        if path.endswith(("traces", "logs")):
            continue  # an empty export adds nothing, so nothing is looked up
        for key in (RUN_KEY, WORKER_KEY):
            answer = await scene.send("POST", path.format("a", number), body, key)
            assert answer.status_code == 404, (path, answer.text)
            assert f"rollout 'a' has no attempt {number[:20]}" in answer.json()["error"]["message"].replace(
                "attempt '", "attempt "
            )


@pytest.mark.parametrize("number", [str(2**63), str(-(2**63) - 1), "9" * 1500])
@pytest.mark.parametrize("query", ["/rollouts?offset={}", "/rollouts?step={}", "/rollouts?limit={}"])
async def test_a_query_number_that_no_database_holds_is_refused_with_a_sentence(
    scene: Scene, query: str, number: str
) -> None:
    answer = await scene.send("GET", "/api/v1" + query.format(number), None, RUN_KEY)
    assert answer.status_code == 400 and "see /openapi.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rollouts", {"rollouts": [{"id": "z", "group_id": "g", "task": {"id": "t", "input": 1}, "step": 2**63}]}),
        (
            "/rollouts",
            {"rollouts": [{"id": "z", "group_id": "g", "task": {"id": "t", "input": 1}, "max_attempts": 2**63}]},
        ),
        ("/steps", {"step": 2**63, "rollout_ids": []}),
        ("/scores", {"scores": [{"rollout_id": "a", "attempt": 2**63}]}),
    ],
)
async def test_a_number_in_a_body_that_no_database_holds_is_refused_with_a_sentence(
    scene: Scene, path: str, body: Any
) -> None:
    answer = await scene.send("POST", "/api/v1" + path, body, RUN_KEY)
    assert answer.status_code in (400, 404)
    assert re.search(
        r"see /openapi.json|max_attempts from 1 to|number steps up to|has no attempt", answer.json()["error"]["message"]
    )


async def test_an_endless_path_is_refused_before_anybody_parses_it(scene: Scene) -> None:
    answer = await scene.send("POST", "/rollouts/a/attempts/" + "9" * 5000 + "/v1/chat/completions", {}, "wrong")
    assert answer.status_code == 414 and "more than 2000" in answer.json()["error"]["message"]


async def test_a_body_of_a_few_numbers_cannot_be_large(scene: Scene) -> None:
    lease = await scene.leased()
    content = b'{"rewards": {' + b",".join(b'"r%d": 1' % number for number in range(50_000)) + b"}}"
    headers = {"authorization": f"Bearer {lease.key}", "content-type": "application/json"}
    answer = await scene.http.post(f"{lease.base_path}/rewards", content=content, headers=headers)
    assert answer.status_code == 413 and "larger than 262144 bytes" in answer.json()["error"]["message"]
