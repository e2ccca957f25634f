"""Work that an agent leaves behind when it returns: refused where its rollout is known, told of where nobody can
know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.types import OtherCallKind
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_runs.reader import RunQueries
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.explanations import explain_left_threads, explain_silence

AGENT = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
import httpx

URL = "https://api.openai.com/v1/chat/completions"
left = []
executor = ThreadPoolExecutor(1)
may_go_on, thread_may_end = asyncio.Event(), threading.Event()

async def ask(text):
    async with httpx.AsyncClient() as client:
        answer = await client.post(URL, json={"model": "m", "messages": [{"role": "user", "content": text}]})
        return answer.status_code

async def write_memory():
    await may_go_on.wait()
    return await ask("memory")

async def answer(task):
    if task == "leaves a task":
        left.append(asyncio.create_task(write_memory()))
    if task == "goes on":
        may_go_on.set()
        return [await left.pop(), await ask("own")]
    if task == "leaves a thread":
        threading.Thread(target=thread_may_end.wait, name="memory-writer", daemon=True).start()
        executor.submit(print).result()
    if task == "asks elsewhere":
        async with httpx.AsyncClient() as client:
            for path in ("/api/chat", "/v1/projects/gemini:generateContent", "/search"):
                try: await client.post("http://127.0.0.1:9" + path)
                except httpx.ConnectError: pass
    return "done"
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


async def run(server: ScriptedServer, folder: Path, *tasks: str) -> tuple[list[Any], str]:
    """The outputs of the tasks, which run one after the other in one worker, and its log."""
    (folder / "agent.py").write_text(AGENT)
    for number, task in enumerate(tasks):
        server.add_rollout(f"r{number}", task)
    async with WorkerPool(server.url, server.run_key, "agent.py:answer", workers=1, base_dir=folder, log_folder=folder):
        await server.wait_finished()
    outputs = [(server.result(f"r{number}") or {})["output"] for number in range(len(tasks))]
    return outputs, (folder / "worker-0.log").read_text()


async def test_a_task_that_outlives_its_rollout_is_refused_and_not_taken_for_the_next(
    server: ScriptedServer, tmp_path: Path
) -> None:
    (_, statuses), log = await run(server, tmp_path, "leaves a task", "goes on")
    assert statuses == [403, 200]
    assert [(call.rollout_id, "memory" in call.text) for call in server.calls] == [(None, True), ("r1", False)]
    assert (
        "belongs to no rollout and is refused (1 so far): rollout 'r0', which started the task or thread that makes it, is over"
        in log
    )


async def test_bare_threads_and_models_elsewhere_are_told_of_in_the_workers_log(
    server: ScriptedServer, tmp_path: Path
) -> None:
    _, log = await run(server, tmp_path, "leaves a thread", "asks elsewhere", "asks elsewhere")
    assert "rollout r0: 1 threads that it started still run (memory-writer);" in log
    assert log.count("threads that it started") == 1
    assert log.count("a model at '127.0.0.1' was called, which is neither recorded nor trained") == 1
    assert "runtime.base_urls" in log


async def test_hosts_that_an_agent_called_past_us_are_named_in_the_runs_sentence(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    async with live_gateway(tmp_path, attach=False) as control:
        specs = [make_spec(f"r{number}", "asks elsewhere") for number in range(2)]
        await control.store.create_rollouts(specs)
        async with WorkerPool(
            control.url, control.run_key, "agent.py:answer", workers=1, base_dir=tmp_path, log_folder=tmp_path
        ):
            await control.store.wait_finished([spec.id for spec in specs], PATIENCE_S)
        trajectories = await control.store.trajectories([spec.id for spec in specs])
    assert [[(call.kind, call.path) for call in one.other_calls] for one in trajectories] == [
        [(OtherCallKind.ELSEWHERE, "127.0.0.1")]
    ] * 2
    assert explain_silence(trajectories) == (
        "none of 2 rollouts made a model call that came here: the agent called models at '127.0.0.1' (2 rollouts); "
        "if the policy is to answer in their place, name them in runtime.base_urls"
    )


async def test_threads_that_outlive_their_rollout_are_in_its_record_the_metrics_and_the_systems_health(
    tmp_path: Path,
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    async with live_gateway(tmp_path, attach=False) as control:
        specs = [make_spec("r0", "leaves a thread"), make_spec("r1", "leaves nothing")]
        await control.store.create_rollouts(specs)
        async with WorkerPool(
            control.url, control.run_key, "agent.py:answer", workers=1, base_dir=tmp_path, log_folder=tmp_path
        ):
            await control.store.wait_finished([spec.id for spec in specs], PATIENCE_S)
        trajectories = await control.store.trajectories([spec.id for spec in specs])
        found = await RunQueries(control.store).health()
        shown = [(await control.store.rollout(spec.id)).attempts[0].left_threads for spec in specs]
    assert [one.left_threads for one in trajectories] == shown == [("memory-writer",), ()]
    assert [one.other_calls for one in trajectories] == [(), ()] and found.refusals == (), "a thread is no call"
    assert describe_rollouts(trajectories)["threads_left"] == 1.0
    assert "threads_left" not in describe_rollouts(trajectories[1:])
    assert [(one.name, one.count, one.rollout_id) for one in found.left_threads] == [("memory-writer", 1, "r0")]
    assert explain_left_threads(trajectories[1:]) is None
    assert explain_left_threads(trajectories) == (
        "1 of 2 rollouts left threads running ('memory-writer'); model calls that they make from now on are taken for those of the "
        "rollouts that follow: join them before the agent returns, or use ThreadPoolExecutor or asyncio.to_thread"
    )


@pytest.mark.parametrize("exclusive", [True, False])
def test_why_a_call_belongs_to_no_rollout_is_said(exclusive: bool) -> None:
    scope = RolloutScope(exclusive=exclusive)
    assert ("runtime.concurrency = 1" in scope.why_none()) is not exclusive

    async def scene() -> tuple[object, str]:
        over = asyncio.Event()

        async def stay() -> tuple[object, str]:
            await over.wait()
            with scope.entered(ActiveRollout(rollout_id="two", attempt=1, base_path="", key="")):
                pass
            return scope.current(), scope.why_none()

        with scope.entered(ActiveRollout(rollout_id="one", attempt=1, base_path="", key="")):
            task = asyncio.create_task(stay())
        over.set()
        return await task

    current, why = asyncio.run(scene())
    assert current is None
    assert why.startswith("rollout 'one', which started")
