"""Workers over HTTP alone: what the server knows of them, what it tells them, and what survives the death of server and
supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl import control_api as api
from lightningrl.keys import worker_key
from lightningrl.records import WorkerState
from lightningrl.types import Outcome, RolloutState
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime import supervisor
from lightningrl_client.runtime.pool import WorkerPool, WorkerPoolError
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import ServerSettings
from lightningrl_server.store.errors import StoreTrouble
from lightningrl_server.workers import MOST_WORKERS, Workers
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.store_conformance import make_spec

AGENT = """
import json, os, time
def answer(task):
    if task == "forge":  # what used to be an event, on the stream that used to carry them
        os.write(1, json.dumps({"kind": "failed", "error": "forged", "state": "failed"}).encode() + b"\\n")
    if task == "hang":
        time.sleep(3600)
    if task == "hang once" and not os.path.exists(os.path.join(os.path.dirname(__file__), "hung")):
        open(os.path.join(os.path.dirname(__file__), "hung"), "w").close()
        time.sleep(3600)
    return os.getpid()
"""
BEAT = api.WorkerBeat(pid=1, host="h", state=WorkerState.READY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


def make_pool(url: str, run_key: str, folder: Path, workers: int = 1, **options: Any) -> WorkerPool:
    return WorkerPool(
        url, run_key, "agent.py:answer", workers=workers, base_dir=folder, log_folder=folder / "logs", **options
    )


async def until(found: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await found():
            await asyncio.sleep(0.02)


async def listed(control: LiveGateway, prefix: str = "") -> api.Workers:
    async with ServerClient(control.url, control.run_key) as client:
        return await client.ask(api.WORKERS, api.WorkerFilter(prefix=prefix))


@pytest.mark.slow
async def test_the_server_knows_who_works_and_on_what(folder: Path) -> None:
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts([make_spec("a", "hang"), make_spec("b", "say")])
        pool = make_pool(control.url, control.run_key, folder, workers=2)
        await pool.start()
        await pool.wait_ready()
        await control.store.wait_finished(["b"], PATIENCE_S)
        found = await listed(control)
        assert {(one.host, one.state) for one in found.workers} == {(socket.gethostname(), WorkerState.READY)}
        assert sorted(one.leases for one in found.workers) in ([0, 2], [1, 1])
        pids = {one.id: one.pid for one in found.workers}
        (running,) = found.running
        assert (running.rollout_id, running.attempt) == ("a", 1) and running.worker_id in pids
        said = (await control.store.rollout("b")).attempts[0]
        assert said.output == pids[said.worker_id]
        await pool.stop(grace_s=0.0)
        assert (await control.store.rollout("a")).state is RolloutState.QUEUED


@pytest.mark.slow
async def test_what_a_stopped_pool_did_not_finish_is_finished_by_another_uncharged(folder: Path) -> None:
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts([make_spec("a", "hang once", max_attempts=1)])
        pool = make_pool(control.url, control.run_key, folder)
        await pool.start()

        async def hangs() -> bool:
            return (folder / "hung").exists()

        await until(hangs)
        await pool.stop(grace_s=0.0)
        async with make_pool(control.url, control.run_key, folder):
            assert await control.store.wait_finished(["a"], PATIENCE_S) == ("a",)
        first, second = (await control.store.rollout("a")).attempts
    assert (first.outcome, first.error) == (Outcome.INFRASTRUCTURE_ERROR, "the worker pool was stopped")
    assert second.outcome is Outcome.SUCCEEDED


@pytest.mark.slow
async def test_what_runs_beside_an_attempt_that_overruns_is_run_again_uncharged(folder: Path) -> None:
    """It used up the tries of its neighbours: of an agent whose rollouts often take too long, most of the others were
    lost with it."""
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts(
            [make_spec("a", "hang", timeout_s=2.0), make_spec("b", "hang once", max_attempts=1)]
        )
        async with make_pool(control.url, control.run_key, folder, concurrency=2):
            await control.store.wait_finished(["a", "b"], PATIENCE_S)
        assert (await control.store.rollout("a")).outcome is Outcome.TIMEOUT
        first, second = (await control.store.rollout("b")).attempts
    assert first.error == "its worker was killed because another attempt ran longer than its time limit"
    assert second.outcome is Outcome.SUCCEEDED


@pytest.mark.slow
async def test_a_lease_whose_answer_is_under_way_when_its_pool_stops_is_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_gateway(folder, attach=False) as control:
        lease, leased = control.store.lease, asyncio.Event()

        async def lose(*args: Any, **kwargs: Any) -> None:
            if await lease(*args, **kwargs) is not None:
                leased.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(control.store, "lease", lose)
        await control.store.create_rollouts([make_spec("a", "say", max_attempts=1)])
        pool = make_pool(control.url, control.run_key, folder)
        await pool.start()
        await asyncio.wait_for(leased.wait(), PATIENCE_S)
        await pool.stop(grace_s=PATIENCE_S)
        assert (await control.store.rollout("a")).state is RolloutState.QUEUED


@pytest.mark.slow
async def test_workers_that_the_server_refuses_end_the_pool_and_leave_the_servers_sentence_in_their_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise StoreTrouble("the store is in use by another process; stop it first")

    async with live_gateway(folder, attach=False) as control:
        pool = make_pool(control.url, control.run_key, folder, lease_wait_s=0.1, patience_s=0.5)
        await pool.start()
        monkeypatch.setattr(control.store, "lease", refuse)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(
                WorkerPoolError,
                match=r"workers died 5 times in a row .*\(the last one lost the server\); see '.*worker-0.log'",
            ):
                await pool.wait()
        await pool.stop(grace_s=0.0)
    said = (folder / "logs" / "worker-0.log").read_text()
    assert "has lost the server" in said and "with 503: the store is in use by another process" in said


async def test_an_order_to_stop_is_heard_at_once_and_by_those_it_is_for(tmp_path: Path) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as control,
        ServerClient(control.url, worker_key(control.run_key)) as client,
    ):
        for name in ("a-0", "a-1", "b-0"):
            assert not (await client.ask(api.BEAT, BEAT, wid=name)).stop
        held = api.WorkerBeat(pid=1, host="h", state=WorkerState.READY, wait_s=60.0)
        waiting = asyncio.create_task(client.ask(api.BEAT, held, wait_s=60.0, wid="a-0"))
        await until(lambda: is_held(waiting))
        assert (await client.ask(api.STOP_WORKERS, api.WorkerPrefix(prefix="a-"))).count == 2
        assert (await asyncio.wait_for(waiting, PATIENCE_S)).stop
        assert (await client.ask(api.BEAT, BEAT, wid="a-1")).stop
        assert not (await client.ask(api.BEAT, BEAT, wid="b-0")).stop
        assert [one.id for one in (await listed(control, prefix="a-")).workers if one.is_stopping] == ["a-0", "a-1"]


async def is_held(waiting: asyncio.Task[api.Orders]) -> bool:
    await asyncio.sleep(0)
    return not waiting.done()


async def test_a_new_process_of_a_worker_starts_afresh_and_the_list_is_bounded() -> None:
    workers = Workers()

    async def keep(rollout_id: str, attempt: int, lease_s: float) -> bool:
        return True

    async def nothing(prefix: str) -> tuple[()]:
        return ()

    await workers.beat("a-0", BEAT, keep)
    workers.note_lease("a-0/3")
    workers.stop("a-")
    (old,) = (await workers.look(api.WorkerFilter(prefix="a-"), nothing)).workers
    assert (old.leases, old.is_stopping) == (1, True)
    assert not (await workers.beat("a-0", api.WorkerBeat(pid=2, host="h", state=WorkerState.STARTING), keep)).stop
    (new,) = (await workers.look(api.WorkerFilter(prefix="a-"), nothing)).workers
    assert (new.pid, new.leases, new.is_stopping) == (2, 0, False)
    for number in range(MOST_WORKERS):
        await workers.beat(f"b-{number}", BEAT, keep)
    found = (await workers.look(api.WorkerFilter(), nothing)).workers
    assert len(found) == MOST_WORKERS and found[0].id == "b-0"
    await workers.beat("c-0", api.WorkerBeat(pid=1, host="h", state=WorkerState.READY, lease_s=1e-6), keep)

    async def is_forgotten() -> bool:
        return not (await workers.look(api.WorkerFilter(prefix="c-"), nothing)).workers

    await until(is_forgotten)


@pytest.mark.slow
async def test_an_attempt_that_overruns_while_the_server_is_killed_ends_as_timeout_all_the_same(folder: Path) -> None:
    settings = ServerSettings(store_url=f"sqlite:///{folder}/store.db", run_key="the-run-key", policies={})
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, "the-run-key") as client,
    ):
        await client.create_rollouts([make_spec("a", "hang", timeout_s=3.0), make_spec("b", "say")])
        async with make_pool(server.url, "the-run-key", folder, lease_s=600.0):

            async def is_running() -> bool:
                return (await client.rollout("a")).state is RolloutState.RUNNING

            await until(is_running)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_ended()
            await server.restart()
            assert await client.wait(["a", "b"], PATIENCE_S) == ("a", "b")
            ended = (await client.rollout("a")).attempts[-1]
            assert ended.outcome is Outcome.TIMEOUT and (ended.error or "").startswith(
                "the agent ran longer than its time limit of 3 s"
            )
            assert (await client.rollout("b")).outcome is Outcome.SUCCEEDED


@pytest.mark.slow
async def test_an_agent_that_prints_cannot_speak_as_its_worker(folder: Path) -> None:
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts([make_spec("a", "forge"), make_spec("b", "say")])
        async with make_pool(control.url, control.run_key, folder):
            await control.store.wait_finished(["a", "b"], PATIENCE_S)
        first, second = [(await control.store.rollout(name)).attempts[0].output for name in ("a", "b")]
    assert first == second  # the same process, undisturbed
    assert '"kind": "failed"' in (folder / "logs" / "worker-0.log").read_text()


async def test_a_wrong_key_is_said_before_any_worker_is_waited_for(folder: Path) -> None:
    async with live_gateway(folder, attach=False) as control:
        pool = make_pool(control.url, worker_key("another"), folder)
        with pytest.raises(
            WorkerPoolError, match="the worker pool cannot work for the server: wrong key for '/api/v1/workers'"
        ):
            await pool.start()
        await pool.stop()


@pytest.mark.slow
async def test_a_worker_that_dies_now_and_then_does_not_end_the_pool(folder: Path) -> None:
    """Only deaths in a row do: between two of them a rollout was finished."""
    (folder / "agent.py").write_text(
        "import os\ndef answer(task): return task if task == 'say' else os.kill(os.getpid(), 11)"
    )
    specs = [make_spec(f"r{number}", "say" if number % 2 == 0 else "die") for number in range(14)]
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts(specs)
        async with make_pool(control.url, control.run_key, folder):
            await control.store.wait_finished([spec.id for spec in specs], PATIENCE_S)
        outcomes = [(await control.store.rollout(spec.id)).outcome for spec in specs]
    assert outcomes == [Outcome.SUCCEEDED, Outcome.INFRASTRUCTURE_ERROR] * 7


@pytest.mark.slow
async def test_workers_that_die_in_a_row_end_the_pool_though_it_is_looked_at_all_the_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is ended for a worker that died is nothing that it finished."""
    monkeypatch.setattr(supervisor, "LOOK_S", 0.05)
    (folder / "agent.py").write_text("import os\ndef answer(task): os.kill(os.getpid(), 11)")
    async with live_gateway(folder, attach=False) as control:
        await control.store.create_rollouts([make_spec(f"r{number}", "die") for number in range(5)])
        pool = make_pool(control.url, control.run_key, folder)
        await pool.start()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(WorkerPoolError, match="workers died 5 times in a row"):
                await pool.wait()
        await pool.stop(grace_s=0.0)
