"""A store in trouble, a real server, a real worker: the database's trouble is asked again, and is never the agent's
failure."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.control_api import Result
from lightningrl.errors import ServerError
from lightningrl.types import Outcome
from lightningrl_client.control import repeats
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.store import call_log, queue_writes
from lightningrl_server.store.errors import StoreFull, StoreTrouble
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.store_conformance import make_spec

pytestmark = pytest.mark.slow

AGENT = """
from lightningrl import report_reward
def answer(task):
    if task == "report": report_reward("polite", 1.0)
    if task == "invent": report_reward("polite", 1.0, call="chatcmpl-that-never-was")
    return "done"
"""
CODES = {
    "busy": sqlite3.SQLITE_BUSY,
    "input or output": sqlite3.SQLITE_IOERR,
    "read-only": sqlite3.SQLITE_READONLY,
    "full": sqlite3.SQLITE_FULL,
}


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int, is_failing: Callable[[int], bool]) -> list[int]:
    """Have SQLite say `code` in the `n`-th call of the store's function `name`, where `is_failing(n)`; returns the
    number of calls."""
    module = call_log if name == "reward_rows" else queue_writes
    real: Callable[..., Any] = getattr(module, name)
    calls = [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if is_failing(calls[0]):
            error = sqlite3.OperationalError("the database's own trouble")
            error.sqlite_errorcode = code
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)
    return calls


async def run(control: LiveGateway, folder: Path, task: str, *, max_attempts: int = 1, patience_s: float = 60.0) -> Any:
    """The rollout, once it has ended."""
    (folder / "agent.py").write_text(AGENT)
    await control.store.create_rollouts([make_spec("r", task, max_attempts=max_attempts)])
    async with WorkerPool(
        control.url,
        control.run_key,
        "agent.py:answer",
        workers=1,
        base_dir=folder,
        log_folder=folder,
        patience_s=patience_s,
    ):
        assert await control.store.wait_finished(["r"], PATIENCE_S) == ("r",)
    return await control.store.rollout("r")


@pytest.mark.parametrize(
    ("task", "where", "trouble"),
    [("report", "reward_rows", "busy"), *(("say", "finish", trouble) for trouble in CODES)],
)
async def test_a_result_that_meets_passing_trouble_of_the_store_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, where: str, trouble: str
) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        calls = fail(monkeypatch, where, CODES[trouble], lambda number: number <= 2)
        rollout = await run(control, tmp_path, task)
        (trajectory,) = await control.store.trajectories(["r"])
    assert [(one.outcome, one.error) for one in rollout.attempts] == [(Outcome.SUCCEEDED, None)]
    assert trajectory.output == "done" and calls[0] == 3
    assert trajectory.reported == ({"polite": 1.0} if task == "report" else {})


async def test_a_report_that_the_store_never_keeps_is_no_failure_of_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        fail(monkeypatch, "reward_rows", sqlite3.SQLITE_IOERR, lambda _: True)
        rollout = await run(control, tmp_path, "report", patience_s=0.2)
    (attempt,) = rollout.attempts
    assert attempt.outcome is Outcome.INFRASTRUCTURE_ERROR
    assert "what the agent reported was not taken" in attempt.error and "with 503: the store" in attempt.error


async def test_a_store_that_stays_in_trouble_is_not_waited_for_as_long_as_a_server_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "NOT_NOW_S", 0.0)
    fail(monkeypatch, "finish", sqlite3.SQLITE_BUSY, lambda _: True)
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("r", "say")])
        lease = await control.store.lease("w", 60.0)
        assert lease is not None
        async with ServerClient(control.url, control.run_key, patience_s=100 * PATIENCE_S) as client:
            with pytest.raises(ServerError, match=r"the store .* is in use"):
                await client.finish_attempt("r", 1, Outcome.SUCCEEDED)
        worker = ControlClient(control.url, control.run_key, patience_s=100 * PATIENCE_S)
        with closing(worker), pytest.raises(ServerError, match=r"with 503: the store .* is in use"):
            await asyncio.to_thread(worker.report, lease, Result(outcome=Outcome.SUCCEEDED))


@pytest.mark.parametrize(("trouble", "kind"), [("busy", StoreTrouble), ("full", StoreFull)])
async def test_who_waits_for_rollouts_hears_of_a_store_that_keeps_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, kind: type[StoreTrouble]
) -> None:
    monkeypatch.setattr("lightningrl_server.store.writer._LONG_S", 0.0)
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("r", "say")])
        fail(monkeypatch, "_task", CODES[trouble], lambda number: number == 1)
        with pytest.raises(kind):
            await control.store.create_rollouts([make_spec("s", "say")])
        with pytest.raises(kind, match="the store"):
            await control.store.wait_finished(["r"], PATIENCE_S)
        assert await control.store.wait_finished(["r"], PATIENCE_S, 0) == (), "what is there already is told"
        await control.store.create_rollouts([make_spec("s", "say")])
        assert await control.store.wait_finished(["r"], 0.0) == (), "a commit ends the trouble"


async def test_a_result_that_the_store_never_keeps_ends_its_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        fail(monkeypatch, "finish", sqlite3.SQLITE_IOERR, lambda number: number <= 2)
        rollout = await run(control, tmp_path, "say", max_attempts=2, patience_s=0.0)
    assert Outcome.AGENT_ERROR not in [one.outcome for one in rollout.attempts]
    assert [rollout.attempts[0].outcome, rollout.attempts[-1].outcome] == [
        Outcome.INFRASTRUCTURE_ERROR,
        Outcome.SUCCEEDED,
    ]


async def test_a_report_of_a_call_that_never_was_stays_the_agents_failure(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        rollout = await run(control, tmp_path, "invent")
    assert [one.outcome for one in rollout.attempts] == [Outcome.AGENT_ERROR]


@pytest.mark.parametrize(
    ("trouble", "status"), [("busy", 503), ("input or output", 503), ("read-only", 503), ("full", 507)]
)
async def test_the_control_api_says_not_now_where_its_database_is_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, status: int
) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("r", "say")])
        lease = await control.store.lease("w", 60.0)
        assert lease is not None
        fail(monkeypatch, "finish", CODES[trouble], lambda _: True)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {control.run_key}"}) as http:
            answer = await http.post(
                f"{control.url}/api/v1/rollouts/r/attempts/1/result", json={"outcome": "succeeded"}
            )
    assert answer.status_code == status and answer.json()["error"]["code"] in ("store_error", "store_full")
