"""Results that are told twice, and tries that are not charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.engines.registry import EngineRegistry
from lightningrl.keys import worker_key
from lightningrl.server.app import create_app
from lightningrl.store import SqlStore
from lightningrl.store.errors import AttemptOver, UnknownRecord
from lightningrl.store.writes import MOST_FORGIVEN
from lightningrl.testing.store_conformance import leased, make_spec
from lightningrl.types import Outcome, RolloutState

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
    assert (kept.state, kept.outcome, tries) == (RolloutState.FAILED, Outcome.INFRASTRUCTURE_ERROR, MOST_FORGIVEN + max_attempts)
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
    for work in (store.calls("a", number), store.heartbeat("a", number, 1.0), store.finish_attempt("a", number, Outcome.SUCCEEDED)):
        with pytest.raises(UnknownRecord, match="rollout 'a' has no attempt"):
            await work
    await store.close()
