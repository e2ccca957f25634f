"""Specification of looking at a store: rollouts, trajectories, totals."""

from __future__ import annotations

import asyncio

from sqlalchemy import text

from lightningrl.errors import StoreError
from lightningrl.types import Outcome, RolloutMode, RolloutState
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest
from lightningrl_testing.store_conformance.inputs import leased, listed, make_call, make_spec, started, trajectory_of

__all__ = ["LookConformance"]


class LookConformance:
    """Tests of `lightningrl_server.store.protocol.Look`."""

    async def test_rollouts_are_listed_newest_first_and_filtered(self, store: Store) -> None:
        await store.create_rollouts([make_spec(f"r{i}", step=i % 2) for i in range(6)])
        await leased(store)
        assert await listed(store) == ["r5", "r4", "r3", "r2", "r1", "r0"]
        assert await listed(store, step=2, limit=2) == ["r5", "r3"]
        assert await listed(store, state=RolloutState.RUNNING) == ["r0"]
        assert await listed(store, limit=2, offset=4) == ["r1", "r0"]
        await store.create_rollouts([make_spec("after 1", step=1, mode=RolloutMode.VALIDATION)])
        assert await listed(store, step=1) == ["after 1", "r4", "r2", "r0"]

    async def test_the_attempt_that_succeeded_decides(self, store: Store) -> None:
        first = await started(store, max_attempts=2)
        await store.append_call(make_call(first, "a/1/0", [1, 2], [3]))
        await store.finish_attempt("a", 1, Outcome.INFRASTRUCTURE_ERROR)
        second = await leased(store)
        await store.append_call(make_call(second, "a/2/0", [4, 5], [6]))
        await store.finish_attempt("a", 2, Outcome.SUCCEEDED)
        trajectory = await trajectory_of(store)
        assert (trajectory.attempt, [call.id for call in trajectory.transitions]) == (2, ["a/2/0"])

    async def test_a_trajectory_needs_an_ended_attempt(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        with pytest.raises(Conflict, match="'a' has no finished attempt"):
            await store.trajectories(["a"])
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.trajectories(["nope"])

    async def test_counts(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2]))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        await leased(store)
        counts = await store.counts()
        assert counts.states == {RolloutState.QUEUED: 1, RolloutState.RUNNING: 1, RolloutState.SUCCEEDED: 1}
        assert (counts.outcomes, counts.attempts, counts.calls, counts.late) == ({Outcome.SUCCEEDED: 1}, 2, 1, 0)

    async def test_a_query_of_ones_own_reads_what_was_acknowledged(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        ids = text("SELECT id FROM rollouts ORDER BY id")
        assert await store.read(lambda db: list(db.execute(ids).scalars())) == ["a", "b", "c"]

    async def test_a_closed_store_says_so(self, store: Store) -> None:
        waiting = asyncio.create_task(store.lease("w", 60.0, wait_s=30.0))
        await asyncio.sleep(0.02)
        await store.close()
        assert await waiting is None
        with pytest.raises(StoreError, match="is closed"):
            await store.create_rollouts([make_spec("a")])
