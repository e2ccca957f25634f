"""Results that are told twice, and tries that are not charged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.keys import process_key, worker_key
from lightningrl.types import Outcome, RolloutState, ToolStatus
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_credit.rewards import ToolStatusReward
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.queue_writes import MOST_FORGIVEN
from lightningrl_testing.store_conformance import leased, make_call, make_spec

RUN_KEY = "the-run-key"


class Overflowed:
    """A gateway's memory of one attempt whose prompt was too long."""

    def __init__(self) -> None:
        self.known = {("a", 1)}

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool:
        return (rollout_id, attempt) in self.known

    def forget(self, rollout_id: str, attempt: int) -> None:
        self.known.discard((rollout_id, attempt))


async def test_an_overflow_that_is_told_again_after_its_answer_was_lost_is_acknowledged(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a")])
    await leased(store)
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, memory=Overflowed())
    headers = {"authorization": f"Bearer {worker_key(RUN_KEY)}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", headers=headers) as http:
        for _ in range(2):
            body: Any = {"outcome": "agent_error", "error": "too long"}
            answer = await http.post("/api/v1/rollouts/a/attempts/1/result", json=body)
            assert (answer.status_code, answer.json()) == (200, {"state": "failed"})
        other = await http.post("/api/v1/rollouts/a/attempts/1/result", json={"outcome": "succeeded"})
        assert other.status_code == 409
    assert (await store.rollout("a")).outcome is Outcome.CONTEXT_OVERFLOW
    await store.close()


async def test_an_agent_error_is_not_told_again_as_another_outcome(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a")])
    await leased(store)
    await store.finish_attempt("a", 1, Outcome.AGENT_ERROR)
    with pytest.raises(AttemptOver):
        await store.finish_attempt("a", 1, Outcome.CONTEXT_OVERFLOW)
    await store.close()


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_a_rollout_whose_worker_always_comes_back_for_other_work_ends(tmp_path: Path, max_attempts: int) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a", max_attempts=max_attempts)])
    tries = 0
    while await store.lease("w1", 60.0, exclusive=True) is not None:
        tries += 1
        assert tries <= MOST_FORGIVEN + max_attempts
    kept = await store.rollout("a")
    assert (kept.state, kept.outcome, tries) == (
        RolloutState.FAILED,
        Outcome.INFRASTRUCTURE_ERROR,
        MOST_FORGIVEN + max_attempts,
    )
    assert kept.attempts[-1].error == "worker 'w1' asked for other work, so it does not run this attempt"
    await store.close()


async def test_tries_that_are_forgiven_take_nothing_from_those_that_a_rollout_has(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a", max_attempts=2)])
    for number in range(1, MOST_FORGIVEN + 1):
        assert (await leased(store)).attempt == number
        assert await store.interrupt("the run was restarted") == 1
    for number, state in ((MOST_FORGIVEN + 1, RolloutState.QUEUED), (MOST_FORGIVEN + 2, RolloutState.FAILED)):
        assert (await leased(store)).attempt == number
        assert await store.finish_attempt("a", number, Outcome.INFRASTRUCTURE_ERROR) is state
    await store.close()


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**4000])
async def test_an_attempts_number_that_no_database_holds_is_unknown(tmp_path: Path, number: int) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    assert await store.authorise("a", number, lease.key) is None
    assert isinstance(await store.refusal("a", number, lease.key), UnknownRecord)
    for work in (
        store.calls("a", number),
        store.heartbeat("a", number, 1.0),
        store.finish_attempt("a", number, Outcome.SUCCEEDED),
    ):
        with pytest.raises(UnknownRecord, match="rollout 'a' has no attempt"):
            await work
    await store.close()


# ---------------------------------------------------------------------- what an agent tells with the key that it has


@asynccontextmanager
async def running_attempt(tmp_path: Path) -> AsyncIterator[tuple[SqlStore, httpx.AsyncClient]]:
    """The store with one attempt of three, leased to the worker `w-0`, and an agent that has its key."""
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a", max_attempts=3)])
    lease = await store.lease("w-0", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("t0",)))
    transport = httpx.ASGITransport(create_app(store, EngineRegistry(), run_key=RUN_KEY))
    headers = {"authorization": f"Bearer {lease.key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as agent:
        yield store, agent
    await store.close()


RESULT = "/api/v1/rollouts/a/attempts/1/result"


async def test_a_second_result_with_another_output_is_refused_and_counted(tmp_path: Path) -> None:
    async with running_attempt(tmp_path) as (store, agent):
        forged, honest = ({"outcome": "succeeded", "output": said} for said in ("forged", "honest"))
        assert (await agent.post(RESULT, json=forged)).status_code == 200
        assert (await agent.post(RESULT, json=forged)).status_code == 200, "its answer may have been lost"
        refused = await agent.post(RESULT, json=honest)
        assert refused.status_code == 409
        assert "the result 'succeeded' with another output came too late" in refused.json()["error"]["message"]
        (trajectory,) = await store.trajectories(["a"])
        assert (trajectory.output, trajectory.results_refused) == ("forged", 1)
        assert describe_rollouts([trajectory])["results_refused"] == 1.0


async def test_an_infrastructure_error_that_an_agent_tells_buys_no_other_try(tmp_path: Path) -> None:
    async with running_attempt(tmp_path) as (store, agent):
        answer = await agent.post(RESULT, json={"outcome": "infrastructure_error", "error": "it went badly"})
        assert answer.json() == {"state": "failed"}
        kept = await store.rollout("a")
        assert (kept.outcome, len(kept.attempts)) == (Outcome.INFRASTRUCTURE_ERROR, 1)


@pytest.mark.parametrize("how", ["with its next lease", "while it stops"])
async def test_one_that_a_worker_tells_is_tried_again(tmp_path: Path, how: str) -> None:
    async with running_attempt(tmp_path) as (_, agent):
        key = process_key(worker_key(RUN_KEY), "w-0")
        body: dict[str, Any] = {"outcome": "infrastructure_error"}
        body |= (
            {"worker_key": key}
            if how == "while it stops"
            else {"then": {"worker_id": "w-0", "lease_s": 60.0, "key": key}}
        )
        assert (
            await agent.post(RESULT, json={**body, "worker_key": "process-w-0:forged", "then": None})
        ).status_code == 401
        assert (await agent.post(RESULT, json=body)).json()["state"] == "queued"


async def test_a_report_that_contradicts_the_honest_one_of_a_tool_changes_nothing_but_a_count(tmp_path: Path) -> None:
    async with running_attempt(tmp_path) as (store, agent):
        base = "/rollouts/a/attempts/1/v1/tool_calls"
        for status in ("ok", "error", "ok"):
            told = {"name": "f", "status": status, "tool_call_id": "t0"}
            assert (await agent.post(base, json={"tool_calls": [told]})).status_code == 204
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED, 1)
        (trajectory,) = await store.trajectories(["a"])
        assert [(tool.status, tool.contradicted) for tool in trajectory.tool_calls] == [(ToolStatus.ERROR, 2)]
        assert list(ToolStatusReward()(trajectory)) == [-0.1]
        assert describe_rollouts([trajectory])["tools_contradicted"] == 2.0
