"""Agents that no other process can import: closures that run in threads here, with the leases, redirection and outcomes
of any other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.errors import LightningError
from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutState
from lightningrl_client.attribution.redirect import installed_redirection
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.runtime import in_process
from lightningrl_client.runtime.in_process import ThreadLauncher, ThreadWorker
from lightningrl_client.runtime.pool import WorkerPool, WorkerPoolError
from lightningrl_testing.scripted_server import ScriptedServer

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
URL = "https://api.openai.com/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """Ends what hangs."""
    event = threading.Event()
    yield event
    event.set()


def pool(server: ScriptedServer, agent: Callable[[Any], Any], **options: Any) -> WorkerPool:
    return WorkerPool(server.url, server.run_key, "cell", launcher=ThreadLauncher(agent), **options)


def outcomes(server: ScriptedServer, count: int) -> list[str]:
    return [(server.result(f"r{number}") or {})["outcome"] for number in range(count)]


async def test_what_an_agent_fails_with_is_data_and_others_go_on(
    server: ScriptedServer, let_go: threading.Event
) -> None:
    late: list[BaseException] = []
    left: list[threading.Thread] = []

    def agent(task: str) -> Any:
        if task == "raise":
            raise RuntimeError("on fire")
        if task == "leave":
            raise SystemExit(3)
        if task == "garbage":
            return object()
        if task == "hang":
            left.append(threading.current_thread())
            let_go.wait()
        try:
            return httpx.post(URL, json=BODY).raise_for_status().json()["choices"][0]["message"]["content"]
        except httpx.HTTPError as error:
            late.append(error)
            raise

    for number, task in enumerate(["hang", "raise", "leave", "garbage", "ask"]):
        server.add_rollout(f"r{number}", task, timeout_s=1.0 if task == "hang" else PATIENCE_S)
    async with pool(server, agent, workers=1) as working:
        assert working.describe() == "1 worker in this process"
        await server.wait_finished()
        assert outcomes(server, 5) == ["timeout", "agent_error", "agent_error", "agent_error", "succeeded"]
        assert "its thread was left to itself" in (server.result("r0") or {})["error"]
        assert [call.rollout_id for call in server.calls] == ["r4"]
        let_go.set()
    await asyncio.to_thread(left[0].join, PATIENCE_S)
    assert isinstance(late[0], httpx.HTTPStatusError), (
        "what a rollout asks after its end is refused; it reaches no provider"
    )
    assert [(call.rollout_id, call.status < 400) for call in server.calls] == [("r4", True), (None, False)]
    assert installed_redirection() is None
    assert outcomes(server, 1) == ["timeout"], "the first result counts"


async def test_an_async_agent_that_blocks_its_loop_holds_nobody_up_for_long(
    server: ScriptedServer, let_go: threading.Event
) -> None:
    client = httpx.AsyncClient()

    async def agent(task: str) -> str:
        if task == "wait":
            await asyncio.Event().wait()
        if task == "block":
            let_go.wait()
        return str((await client.post(URL, json=BODY)).raise_for_status().json()["choices"][0]["message"]["content"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightningrl_client.runtime.worker.ASYNC_GRACE_S", 0.5)
        for number, task in enumerate(["wait", "block", "ask", "ask"]):
            server.add_rollout(f"r{number}", task, timeout_s=1.0 if number < 2 else PATIENCE_S)
        async with pool(server, agent, workers=1):
            await server.wait_finished()
        assert outcomes(server, 4) == ["timeout", "timeout", "succeeded", "succeeded"]


async def test_too_many_that_do_not_stop_end_the_pool_with_the_remedy(
    server: ScriptedServer, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "MOST_LEFT", 2)
    for number in range(3):
        server.add_rollout(f"r{number}", "hang", timeout_s=0.5)
    working = pool(server, lambda task: let_go.wait(), workers=1)
    await working.start()
    with pytest.raises(WorkerPoolError, match=r"2 rollouts did not stop .* put the agent into a file"):
        await asyncio.wait_for(working.wait(), PATIENCE_S)
    await working.stop(grace_s=0.0)


async def test_stopping_gives_back_what_runs_and_restores_the_process(
    server: ScriptedServer, let_go: threading.Event
) -> None:
    before = dict(os.environ)
    server.add_rollout("r0", "hang")
    working = pool(server, lambda task: let_go.wait(), workers=2)
    await working.start()
    while not server.open:
        await asyncio.sleep(0.01)
    redirection = installed_redirection()
    assert redirection is not None
    assert redirection.redirect(URL, b"{}") is None, "a reward's own call goes where it wants"
    await working.stop(grace_s=0.0)
    assert outcomes(server, 1) == ["infrastructure_error"]
    assert dict(os.environ) == before
    let_go.set()
    while installed_redirection() is not None:
        await asyncio.sleep(0.01)
    async with pool(server, lambda task: "done"):
        await server.wait_finished()
    assert [attempt.outcome for attempt in server.attempts("r0")] == [Outcome.INFRASTRUCTURE_ERROR, Outcome.SUCCEEDED]


async def test_a_lease_of_which_nothing_runs_yet_is_given_back_with_the_pool(
    server: ScriptedServer, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_attempt = ThreadWorker._run_attempt
    monkeypatch.setattr(ThreadWorker, "_run_attempt", lambda *args: let_go.wait() and run_attempt(*args))
    server.add_rollout("r0", "ask")
    working = pool(server, lambda task: "done", workers=1)
    await working.start()
    while not server.open:
        await asyncio.sleep(0.01)
    await working.stop(grace_s=0.0)
    assert server.state("r0") is RolloutState.QUEUED


async def test_a_lease_that_came_when_its_worker_was_stopped_is_run_and_reported(
    server: ScriptedServer, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, stop, has_come = ControlClient.lease, ThreadWorker.stop, threading.Event()

    def lease_then_wait(*args: Any, **kwargs: Any) -> Lease | None:
        found = lease(*args, **kwargs)
        has_come.set()
        let_go.wait()
        return found

    def stop_then_go_on(worker: ThreadWorker) -> None:
        stop(worker)
        let_go.set()

    monkeypatch.setattr(ControlClient, "lease", lease_then_wait)
    monkeypatch.setattr(ThreadWorker, "stop", stop_then_go_on)
    server.add_rollout("r0", "ask")
    working = pool(server, lambda task: "done", workers=1)
    await working.start()
    await asyncio.to_thread(has_come.wait)
    await working.stop(grace_s=PATIENCE_S)
    assert outcomes(server, 1) == ["succeeded"]


async def test_what_ends_after_the_pool_and_its_server_have_gone_waits_for_nobody(let_go: threading.Event) -> None:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        server.add_rollout("r0", "hang")
        working = pool(server, lambda task: let_go.wait(), workers=1, patience_s=1e6)
        await working.start()
        while not server.open:
            await asyncio.sleep(0.01)
        await working.stop(grace_s=0.0)
    let_go.set()
    async with asyncio.timeout(PATIENCE_S):
        while installed_redirection() is not None:  # it is taken back where the last attempt ends
            await asyncio.sleep(0.01)


async def test_rollouts_at_once_are_told_apart(server: ScriptedServer) -> None:
    together = threading.Barrier(4)

    def agent(task: str) -> str:
        together.wait(PATIENCE_S)
        httpx.post(URL, json={**BODY, "messages": [{"role": "user", "content": task}]}).raise_for_status()
        return task

    for number in range(8):
        server.add_rollout(f"r{number}", f"task {number}")
    async with pool(server, agent, workers=2, concurrency=2):
        await server.wait_finished()
    assert {call.rollout_id: call.body["messages"][0]["content"] for call in server.calls} == {
        f"r{n}": f"task {n}" for n in range(8)
    }


async def test_what_cannot_be_opened_leaves_the_process_as_it_was(server: ScriptedServer) -> None:
    workers = pool(server, lambda task: task, adapters=("nowhere",))
    with pytest.raises(LightningError, match="nowhere"):
        await workers.start()
    assert installed_redirection() is None
    await workers.stop()
