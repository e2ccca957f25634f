"""Specification of a store's queue: orders, leases, results, waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from lightningrl.errors import StoreError
from lightningrl.records import DIVERGED_CODE, Lease, RunningAttempt
from lightningrl.types import (
    BranchPoint,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutMode,
    RolloutState,
    SamplingSettings,
    ToolCall,
    ToolStatus,
)
from lightningrl_server.records import AttemptEnd, SpanRecord, ToolCallRecord
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest
from lightningrl_testing.store_conformance.inputs import leased, listed, make_call, make_spec, started, trajectory_of

__all__ = ["QueueConformance"]


class QueueConformance:
    """Tests of `lightningrl_server.store.protocol.Queue`."""

    async def test_creating_twice_creates_once(self, store: Store) -> None:
        assert await store.create_rollouts([make_spec("a"), make_spec("b")]) == 2
        assert await store.create_rollouts([make_spec("b"), make_spec("c")]) == 1
        assert await store.create_rollouts([]) == 0

    async def test_an_id_reused_for_another_task_is_refused_whole(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        with pytest.raises(Conflict, match=r"'a'.*another task"):
            await store.create_rollouts([make_spec("new"), make_spec("a", question="else")])
        with pytest.raises(UnknownRecord, match="'new'"):
            await store.rollout("new")

    async def test_a_task_that_is_not_json_is_refused_with_its_name(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"task 't' of rollout 'a' is not JSON"):
            await store.create_rollouts([make_spec("a", question=object())])

    async def test_a_rollout_comes_back_as_it_was_ordered(self, store: Store) -> None:
        sampling = SamplingSettings(temperature=0.0, stop=("x",))
        spec = make_spec("a", sampling=sampling, mode=RolloutMode.VALIDATION, step=7, max_attempts=3)
        await store.create_rollouts([spec])
        record = await store.rollout("a")
        assert (record.spec, record.state, record.outcome, record.attempts) == (spec, RolloutState.QUEUED, None, ())

    async def test_rollouts_are_leased_in_order_of_creation_whatever_their_mode(self, store: Store) -> None:
        await store.create_rollouts([make_spec("b"), make_spec("a", mode=RolloutMode.VALIDATION), make_spec("c")])
        assert [(await leased(store)).rollout_id for _ in range(3)] == ["b", "a", "c"]
        assert await store.lease("w", 60.0) is None

    async def test_a_lease_shows_the_task_without_its_answer(self, store: Store) -> None:
        lease = await started(store, timeout_s=12.0)
        assert (lease.task.input, lease.task.answer, lease.timeout_s, lease.attempt) == ("6 * 7?", None, 12.0, 1)
        assert lease.base_path == "/rollouts/a/attempts/1/v1"

    async def test_a_waiting_worker_gets_a_rollout_the_moment_it_is_created(self, store: Store) -> None:
        waiting = asyncio.create_task(store.lease("w", 60.0, wait_s=1e6))
        await asyncio.sleep(0.05)
        await store.create_rollouts([make_spec("a")])
        lease = await waiting
        assert lease is not None and lease.rollout_id == "a"

    async def test_no_rollout_goes_to_two_workers(self, store: Store) -> None:
        waiting = [asyncio.create_task(store.lease(f"w{i}", 60.0, wait_s=60.0)) for i in range(20)]
        await asyncio.sleep(0.01)
        await store.create_rollouts([make_spec(f"r{i}") for i in range(10)])
        leases = [await lease for _, lease in zip(range(10), asyncio.as_completed(waiting), strict=False)]
        assert await store.lease("w", 60.0) is None
        for task in waiting:
            task.cancel()
        assert sorted(lease.rollout_id for lease in leases if lease is not None) == sorted(f"r{i}" for i in range(10))

    async def test_a_lease_nobody_received_is_undone(self, store: Store) -> None:
        lease = await started(store)
        await store.release("a", 1)
        assert await store.authorise("a", 1, lease.key) is None
        again = await leased(store)
        assert (again.rollout_id, again.attempt) == ("a", 1)

    async def test_an_expired_lease_ends_the_attempt_and_queues_the_rollout_again(self, store: Store) -> None:
        await started(store, lease_s=0.05, max_attempts=2)
        again = await store.lease("w2", 60.0, wait_s=900.0)
        assert again is not None and (again.rollout_id, again.attempt) == ("a", 2)
        first = (await store.rollout("a")).attempts[0]
        assert first.outcome is Outcome.INFRASTRUCTURE_ERROR and "lease expired" in (first.error or "")
        assert not await store.heartbeat("a", 1, 60.0)

    async def test_the_last_expired_lease_fails_the_rollout_without_anybody_asking(self, store: Store) -> None:
        await started(store, lease_s=0.05)
        assert await store.wait_finished(["a"], 900.0) == ("a",)
        assert (await store.rollout("a")).outcome is Outcome.INFRASTRUCTURE_ERROR

    async def test_heartbeats_keep_a_lease(self, store: Store) -> None:
        await started(store, lease_s=2.0)
        assert await store.heartbeat("a", 1, 3600.0)
        await asyncio.sleep(2.1)  # beyond the first lease
        assert (await store.rollout("a")).state is RolloutState.RUNNING

    async def test_what_workers_run_is_listed_by_the_beginning_of_their_id(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name, timeout_s=7.0) for name in "abc"])
        for worker in ("p-0", "p-1", "P-2"):
            await store.lease(worker, 60.0)
        await store.finish_attempt("b", 1, Outcome.SUCCEEDED)
        assert await store.running("p-") == (RunningAttempt(rollout_id="a", attempt=1, worker_id="p-0", timeout_s=7.0),)
        assert {attempt.worker_id for attempt in await store.running("")} == {"p-0", "P-2"}

    async def test_interrupted_attempts_are_not_charged(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        for number in (1, 2, 3):
            assert (await leased(store)).attempt == number
            assert await store.interrupt("the run was restarted") == 1
        await leased(store)
        assert await store.finish_attempt("a", 4, Outcome.SUCCEEDED) is RolloutState.SUCCEEDED

    async def test_those_of_workers_are_interrupted_by_the_beginning_of_their_id(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        for worker in ("p-0", "q-0", "P-1"):
            await store.lease(worker, 60.0)
        assert await store.interrupt("the worker pool was stopped", "p-") == 1
        states = [RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.RUNNING]
        assert [(await store.rollout(name)).state for name in "abc"] == states

    async def test_a_worker_that_asks_again_never_received_its_lease(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b")])
        assert await store.lease("w/0", 60.0, exclusive=True) is not None  # the answer is lost: the server was killed
        assert await store.lease("w/1", 60.0, exclusive=True) is not None
        again = await store.lease("w/0", 60.0, exclusive=True)
        assert again is not None and (again.rollout_id, again.attempt) == ("a", 2)
        assert (await store.rollout("b")).state is RolloutState.RUNNING
        assert await store.heartbeat("a", 1, 60.0) is False

    async def test_the_first_result_wins_and_repeats_are_acknowledged(self, store: Store) -> None:
        await started(store)
        state = await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "x"}, duration_s=1.5)
        assert state is RolloutState.SUCCEEDED
        assert await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "x"}) is RolloutState.SUCCEEDED
        with pytest.raises(AttemptOver, match="attempt 1 of rollout 'a' is over"):
            await store.finish_attempt("a", 1, Outcome.TIMEOUT)
        with pytest.raises(AttemptOver, match="the result 'succeeded' with another output came too late"):
            await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "y"})
        trajectory = await trajectory_of(store)
        assert (trajectory.output, trajectory.duration_s, trajectory.task.answer) == ({"sql": "x"}, 1.5, 42)
        assert trajectory.results_refused == (await store.rollout("a")).attempts[0].results_refused == 2
        assert (await store.counts()).late == 2

    async def test_a_failure_of_the_infrastructure_that_the_agent_alone_tells_is_not_tried_again(
        self, store: Store
    ) -> None:
        await started(store, max_attempts=3)
        end = AttemptEnd(outcome=Outcome.INFRASTRUCTURE_ERROR, may_go_again=False)
        assert await store.finish_and_lease("a", 1, end, None) == (RolloutState.FAILED, None)

    async def test_a_result_with_all_that_is_told_of_it_takes_the_next_lease_and_repeated_takes_none(
        self, store: Store
    ) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        lease = await store.lease("w", 60.0, exclusive=True)
        assert lease is not None
        await store.append_call(make_call(lease, "c0", [1], [2], span_id="s0"))
        call = ToolCall(id="t0", name="sql", status=ToolStatus.OK)
        tool = ToolCallRecord(tool_call=call, span_id="s1", parent_span_id="s0")
        end = AttemptEnd(
            outcome=Outcome.SUCCEEDED,
            output="done",
            tool_calls=[tool],
            spans=[SpanRecord(span_id="s0", agent="writer")],
            other_calls=[OtherCall(kind=OtherCallKind.ELSEWHERE, path="api.example.com")],
            left_threads=["writer", "\ud800"],
            rewards={None: {"whole": 1.0}, "c0": {"style": 0.5}},
        )
        state, after = await store.finish_and_lease("a", 1, end, "w", 60.0)
        assert state is RolloutState.SUCCEEDED and after is not None and (after.rollout_id, after.attempt) == ("b", 1)
        assert await store.finish_and_lease("a", 1, end, "w", 60.0) == (RolloutState.SUCCEEDED, None)
        assert [(attempt.rollout_id, attempt.worker_id) for attempt in await store.running("w")] == [("b", "w")]
        (trajectory,) = await store.trajectories(["a"])
        assert (trajectory.output, dict(trajectory.reported)) == ("done", {"whole": 1.0})
        assert [tool_call.id for tool_call in trajectory.tool_calls] == ["t0"]
        assert [(call.agent, dict(call.reported)) for call in trajectory.transitions] == [("writer", {"style": 0.5})]
        assert [call.path for call in await store.other_calls("a", 1)] == ["api.example.com"]
        assert trajectory.left_threads == (await store.rollout("a")).attempts[0].left_threads == ("writer", "\ufffd")

    async def test_a_result_that_comes_too_late_leaves_no_trace_and_takes_no_lease(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b")])
        await leased(store)
        await store.cancel(["a"])
        tool = ToolCallRecord(tool_call=ToolCall(id="t0", name="sql", status=ToolStatus.OK), span_id="s1")
        end = AttemptEnd(outcome=Outcome.SUCCEEDED, tool_calls=[tool], rewards={None: {"whole": 1.0}})
        with pytest.raises(AttemptOver):
            await store.finish_and_lease("a", 1, end, "w", 60.0)
        with pytest.raises(UnknownRecord):
            await store.finish_and_lease("a", 2, end, "w", 60.0)
        (trajectory,) = await store.trajectories(["a"])
        assert (trajectory.outcome, trajectory.tool_calls, dict(trajectory.reported)) == (Outcome.CANCELLED, (), {})
        assert (await store.rollout("b")).state is RolloutState.QUEUED

    @pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.AGENT_ERROR])
    async def test_a_branch_that_ends_before_it_has_repeated_its_calls_has_diverged(
        self, store: Store, outcome: Outcome
    ) -> None:
        async def repeat(lease: Lease, name: str, calls: int) -> None:
            for number in range(calls):
                was: Any = {"replayed_from": f"c{number}", "trainable": False}
                await store.append_call(make_call(lease, f"{name}{number}", [1, number], [2], **was))

        lease = await started(store)
        await store.append_calls([make_call(lease, f"c{number}", [1, number], [2]) for number in range(2)])
        point = BranchPoint(rollout_id="a", attempt=1, calls=2)
        with pytest.raises(Conflict, match="still runs"):
            await store.create_rollouts([make_spec("early", branch=point)])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        for name, repeated in (("short", 1), ("whole", 2)):
            await store.create_rollouts([make_spec(name, mode=RolloutMode.BRANCH, branch=point)])
            await repeat(await leased(store), name, repeated)
            await store.finish_attempt(name, 1, outcome)
        await store.create_rollouts([make_spec("told", mode=RolloutMode.BRANCH, branch=point)])
        again = await leased(store)
        # It asks what nobody recorded, and then, of a server that has forgotten it, what somebody did.
        refused = OtherCall(
            kind=OtherCallKind.REFUSED, path="chat/completions", code=DIVERGED_CODE, message="its prompt differs"
        )
        await store.append_other_calls("told", 1, [refused])
        await repeat(again, "told", 2)
        await store.finish_attempt("told", 1, outcome)
        (trajectory,) = await store.trajectories(["told"])
        assert (trajectory.outcome, trajectory.error) == (Outcome.DIVERGED, "its prompt differs")
        short, whole = await store.trajectories(["short", "whole"])
        assert (short.outcome, whole.outcome) == (Outcome.DIVERGED, outcome)
        assert "ended 1 calls before the branch point" in str(short.error)
        assert (whole.branch, [call.replayed_from for call in whole.transitions]) == (point, ["c0", "c1"])
        assert await store.finish_attempt("short", 1, outcome) is RolloutState.FAILED, "the worker says it again"

    async def test_a_branch_point_that_is_none_is_refused(self, store: Store) -> None:
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2]))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        for point, error in (
            (BranchPoint(rollout_id="a", attempt=1, calls=2), Conflict),
            (BranchPoint(rollout_id="a", attempt=2, calls=0), UnknownRecord),
            (BranchPoint(rollout_id="b", attempt=1, calls=0), UnknownRecord),
        ):
            with pytest.raises(error):
                await store.create_rollouts([make_spec("new", branch=point)])
        assert await listed(store) == ["a"]

    @pytest.mark.parametrize(
        "outcome", [Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.CANCELLED]
    )
    async def test_what_the_policy_did_is_not_retried(self, store: Store, outcome: Outcome) -> None:
        await started(store, max_attempts=3)
        assert await store.finish_attempt("a", 1, outcome, error="because") is RolloutState.FAILED
        trajectory = await trajectory_of(store)
        assert (trajectory.outcome, trajectory.error, trajectory.transitions) == (outcome, "because", ())

    async def test_infrastructure_errors_are_retried_while_attempts_are_left(self, store: Store) -> None:
        await started(store, max_attempts=2)
        assert await store.finish_attempt("a", 1, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.QUEUED
        await leased(store)
        assert await store.finish_attempt("a", 2, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.FAILED

    async def test_failed_rollouts_are_run_again_with_as_many_attempts_as_at_first(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=2), make_spec("b")])
        for outcome in (Outcome.INFRASTRUCTURE_ERROR, Outcome.INFRASTRUCTURE_ERROR, Outcome.SUCCEEDED):
            lease = await leased(store)
            await store.finish_attempt(lease.rollout_id, lease.attempt, outcome, error="x")
        assert await store.retry(["a", "b"], 7.0) == 1, "what succeeded stays"
        assert await store.wait_finished(["a", "b"], 0.0) == ("b",)
        again = await leased(store)
        assert (again.rollout_id, again.attempt, again.timeout_s) == ("a", 3, 7.0)
        assert await store.finish_attempt("a", 3, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.QUEUED
        last = await leased(store)
        assert await store.finish_attempt("a", last.attempt, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.FAILED
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.retry(["nope"], 7.0)

    async def test_cancelled_rollouts_stop(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b"), make_spec("c")])
        await leased(store)
        assert await store.cancel(["a", "b"]) == 2
        assert not await store.heartbeat("a", 1, 60.0)
        assert [ended.outcome for ended in await store.trajectories(["a", "b"])] == [Outcome.CANCELLED] * 2
        assert (await leased(store)).rollout_id == "c"
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.cancel(["nope"])

    async def test_waiting_ends_with_enough_finished_rollouts_or_with_the_time(self, store: Store) -> None:
        await store.create_rollouts([make_spec(f"r{i}") for i in range(3)])
        assert await store.wait_finished(["r0", "r1"], 0.05) == ()
        waiting = asyncio.create_task(store.wait_finished(["r2", "r1", "r0"], 10.0, min_finished=2))
        for index in range(2):
            await leased(store)
            await store.finish_attempt(f"r{index}", 1, Outcome.SUCCEEDED)
        assert await waiting == ("r1", "r0")
        assert await store.wait_finished(["r0"], 0.0) == ("r0",)
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.wait_finished(["nope"], 1.0)
