"""The specification of a store: subclass `StoreConformance`, give it a `store` fixture, and its tests are yours.

class TestMyStore(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import text

from lightningrl.errors import StoreError
from lightningrl.records import (
    DIALOGUE,
    DIVERGED_CODE,
    AttemptEnd,
    CallRecord,
    Lease,
    RolloutFilter,
    RunningAttempt,
    Score,
    SpanRecord,
    ToolCallRecord,
)
from lightningrl.types import (
    BranchPoint,
    Evidence,
    FinishReason,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutMode,
    RolloutSpec,
    RolloutState,
    SamplingSettings,
    Task,
    ToolCall,
    ToolStatus,
    Transition,
)
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest

__all__ = ["StoreConformance", "make_call", "make_spec"]


def make_spec(rollout_id: str = "r1", question: Any = "6 * 7?", **fields: Any) -> RolloutSpec:
    """A rollout on one question, in group `g`."""
    return RolloutSpec(id=rollout_id, task=Task(id="t", input=question, answer=42), group_id="g", **fields)


def make_call(
    lease: Lease,
    call_id: str,
    new: Sequence[int],
    completion: Sequence[int],
    *,
    parent: CallRecord | None = None,
    call_key: str | None = None,
    history_key: str | None = None,
    **fields: Any,
) -> CallRecord:
    """A call of `lease`'s attempt whose prompt is the tokens of `parent` and `new`; logprobs are -1/token."""
    before = () if parent is None else (*parent.transition.prompt_ids.tolist(), *parent.transition.completion_ids.tolist())
    values: dict[str, Any] = {"policy": "main", "policy_version": 3, "finish_reason": FinishReason.STOP}
    values |= {"parent_id": None if parent is None else parent.transition.id, **fields}
    transition = Transition(
        id=call_id,
        prompt_ids=np.array([*before, *new], np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array([-1.0 / max(token, 1) for token in completion], np.float32),
        **values,
    )
    return CallRecord(
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        call_key=call_key or f"key-{call_id}",
        transition=transition,
        history_key=history_key,
    )


async def leased(store: Store, lease_s: float = 60.0) -> Lease:
    lease = await store.lease("w1", lease_s)
    assert lease is not None
    return lease


class StoreConformance:
    """What every store does. A deviation is `xfail(reason=…)`."""

    # ------------------------------------------------------------------ rollouts

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
        spec = make_spec("a", sampling=SamplingSettings(temperature=0.0, stop=("x",)), mode=RolloutMode.VALIDATION, step=7, max_attempts=3)
        await store.create_rollouts([spec])
        record = await store.rollout("a")
        assert (record.spec, record.state, record.outcome, record.attempts) == (spec, RolloutState.QUEUED, None, ())

    async def test_rollouts_are_listed_newest_first_and_filtered(self, store: Store) -> None:
        await store.create_rollouts([make_spec(f"r{i}", step=i % 2) for i in range(6)])
        await leased(store)
        assert [one.spec.id for one in await store.list_rollouts()] == ["r5", "r4", "r3", "r2", "r1", "r0"]
        assert [one.spec.id for one in await store.list_rollouts(RolloutFilter(step=2, limit=2))] == ["r5", "r3"]
        assert [one.spec.id for one in await store.list_rollouts(RolloutFilter(state=RolloutState.RUNNING))] == ["r0"]
        assert [one.spec.id for one in await store.list_rollouts(RolloutFilter(limit=2, offset=4))] == ["r1", "r0"]
        await store.create_rollouts([make_spec("after 1", step=1, mode=RolloutMode.VALIDATION)])
        assert [one.spec.id for one in await store.list_rollouts(RolloutFilter(step=1))] == ["after 1", "r4", "r2", "r0"]

    # ------------------------------------------------------------------ leases

    async def test_rollouts_are_leased_in_order_of_creation_whatever_their_mode(self, store: Store) -> None:
        await store.create_rollouts([make_spec("b"), make_spec("a", mode=RolloutMode.VALIDATION), make_spec("c")])
        assert [(await leased(store)).rollout_id for _ in range(3)] == ["b", "a", "c"]
        assert await store.lease("w", 60.0) is None

    async def test_a_lease_shows_the_task_without_its_answer(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", timeout_s=12.0)])
        lease = await leased(store)
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
        leases = [await one for _, one in zip(range(10), asyncio.as_completed(waiting), strict=False)]
        assert await store.lease("w", 60.0) is None
        for one in waiting:
            one.cancel()
        assert sorted(lease.rollout_id for lease in leases if lease is not None) == sorted(f"r{i}" for i in range(10))

    async def test_a_lease_nobody_received_is_undone(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.release("a", 1)
        assert await store.authorise("a", 1, lease.key) is None
        again = await leased(store)
        assert (again.rollout_id, again.attempt) == ("a", 1)

    async def test_an_expired_lease_ends_the_attempt_and_queues_the_rollout_again(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=2)])
        await leased(store, lease_s=0.05)
        again = await store.lease("w2", 60.0, wait_s=900.0)
        assert again is not None and (again.rollout_id, again.attempt) == ("a", 2)
        first = (await store.rollout("a")).attempts[0]
        assert first.outcome is Outcome.INFRASTRUCTURE_ERROR and "lease expired" in (first.error or "")
        assert not await store.heartbeat("a", 1, 60.0)

    async def test_the_last_expired_lease_fails_the_rollout_without_anybody_asking(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store, lease_s=0.05)
        assert await store.wait_finished(["a"], 900.0) == ("a",)
        assert (await store.rollout("a")).outcome is Outcome.INFRASTRUCTURE_ERROR

    async def test_heartbeats_keep_a_lease(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store, lease_s=2.0)
        assert await store.heartbeat("a", 1, 3600.0)
        await asyncio.sleep(2.1)  # beyond the first lease
        assert (await store.rollout("a")).state is RolloutState.RUNNING

    async def test_what_workers_run_is_listed_by_the_beginning_of_their_id(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name, timeout_s=7.0) for name in "abc"])
        for worker in ("p-0", "p-1", "P-2"):
            await store.lease(worker, 60.0)
        await store.finish_attempt("b", 1, Outcome.SUCCEEDED)
        assert await store.running("p-") == (RunningAttempt(rollout_id="a", attempt=1, worker_id="p-0", timeout_s=7.0),)
        assert {one.worker_id for one in await store.running("")} == {"p-0", "P-2"}

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
        assert [(await store.rollout(name)).state for name in "abc"] == [RolloutState.QUEUED, RolloutState.RUNNING, RolloutState.RUNNING]

    async def test_a_worker_that_asks_again_never_received_its_lease(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b")])
        assert await store.lease("w/0", 60.0, exclusive=True) is not None  # the answer is lost: the server was killed
        assert await store.lease("w/1", 60.0, exclusive=True) is not None
        again = await store.lease("w/0", 60.0, exclusive=True)
        assert again is not None and (again.rollout_id, again.attempt) == ("a", 2)
        assert (await store.rollout("b")).state is RolloutState.RUNNING
        assert await store.heartbeat("a", 1, 60.0) is False

    # ------------------------------------------------------------------ results

    async def test_the_first_result_wins_and_repeats_are_acknowledged(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store)
        assert await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "x"}, duration_s=1.5) is RolloutState.SUCCEEDED
        assert await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "x"}) is RolloutState.SUCCEEDED
        with pytest.raises(AttemptOver, match="attempt 1 of rollout 'a' is over"):
            await store.finish_attempt("a", 1, Outcome.TIMEOUT)
        with pytest.raises(AttemptOver, match="the result 'succeeded' with another output came too late"):
            await store.finish_attempt("a", 1, Outcome.SUCCEEDED, {"sql": "y"})
        trajectory = (await store.trajectories(["a"]))[0]
        assert (trajectory.output, trajectory.duration_s, trajectory.task.answer) == ({"sql": "x"}, 1.5, 42)
        assert trajectory.results_refused == (await store.rollout("a")).attempts[0].results_refused == 2
        assert (await store.counts()).late == 2

    async def test_a_failure_of_the_infrastructure_that_the_agent_alone_tells_is_not_tried_again(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=3)])
        await leased(store)
        end = AttemptEnd(outcome=Outcome.INFRASTRUCTURE_ERROR, may_go_again=False)
        assert await store.finish_and_lease("a", 1, end, None) == (RolloutState.FAILED, None)

    async def test_a_result_with_all_that_is_told_of_it_takes_the_next_lease_and_repeated_takes_none(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        lease = await store.lease("w", 60.0, exclusive=True)
        assert lease is not None
        await store.append_call(make_call(lease, "c0", [1], [2], span_id="s0"))
        tool = ToolCallRecord(tool_call=ToolCall(id="t0", name="sql", status=ToolStatus.OK), span_id="s1", parent_span_id="s0")
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
        assert [(one.rollout_id, one.worker_id) for one in await store.running("w")] == [("b", "w")]
        (told,) = await store.trajectories(["a"])
        assert (told.output, [one.id for one in told.tool_calls], dict(told.reported)) == ("done", ["t0"], {"whole": 1.0})
        assert [(call.agent, dict(call.reported)) for call in told.transitions] == [("writer", {"style": 0.5})]
        assert [call.path for call in await store.other_calls("a", 1)] == ["api.example.com"]
        assert told.left_threads == (await store.rollout("a")).attempts[0].left_threads == ("writer", "\ufffd")

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
        (told,) = await store.trajectories(["a"])
        assert (told.outcome, told.tool_calls, dict(told.reported)) == (Outcome.CANCELLED, (), {})
        assert (await store.rollout("b")).state is RolloutState.QUEUED

    @pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.AGENT_ERROR])
    async def test_a_branch_that_ends_before_it_has_repeated_its_calls_has_diverged(self, store: Store, outcome: Outcome) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_calls([make_call(lease, f"c{number}", [1, number], [2]) for number in range(2)])
        point = BranchPoint(rollout_id="a", attempt=1, calls=2)
        with pytest.raises(Conflict, match="still runs"):
            await store.create_rollouts([make_spec("early", branch=point)])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        for name, repeated in (("short", 1), ("whole", 2)):
            await store.create_rollouts([make_spec(name, mode=RolloutMode.BRANCH, branch=point)])
            again = await leased(store)
            for number in range(repeated):
                await store.append_call(make_call(again, f"{name}{number}", [1, number], [2], replayed_from=f"c{number}", trainable=False))
            await store.finish_attempt(name, 1, outcome)
        await store.create_rollouts([make_spec("told", mode=RolloutMode.BRANCH, branch=point)])
        again = await leased(store)  # it asked what nobody recorded, and then, of a server that knew no more of it, what somebody did
        refused = OtherCall(kind=OtherCallKind.REFUSED, path="chat/completions", code=DIVERGED_CODE, message="its prompt differs")
        await store.append_other_calls("told", 1, [refused])
        for number in range(2):
            await store.append_call(make_call(again, f"told{number}", [1, number], [2], replayed_from=f"c{number}", trainable=False))
        await store.finish_attempt("told", 1, outcome)
        (told,) = await store.trajectories(["told"])
        assert (told.outcome, told.error) == (Outcome.DIVERGED, "its prompt differs")
        short, whole = await store.trajectories(["short", "whole"])
        assert (short.outcome, whole.outcome) == (Outcome.DIVERGED, outcome)
        assert "ended 1 calls before the branch point" in str(short.error)
        assert (whole.branch, [call.replayed_from for call in whole.transitions]) == (point, ["c0", "c1"])
        assert await store.finish_attempt("short", 1, outcome) is RolloutState.FAILED, "the worker says it again"

    async def test_a_branch_point_that_is_none_is_refused(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2]))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        for point, error in (
            (BranchPoint(rollout_id="a", attempt=1, calls=2), Conflict),
            (BranchPoint(rollout_id="a", attempt=2, calls=0), UnknownRecord),
            (BranchPoint(rollout_id="b", attempt=1, calls=0), UnknownRecord),
        ):
            with pytest.raises(error):
                await store.create_rollouts([make_spec("new", branch=point)])
        assert [record.spec.id for record in await store.list_rollouts()] == ["a"]

    @pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.CANCELLED])
    async def test_what_the_policy_did_is_not_retried(self, store: Store, outcome: Outcome) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=3)])
        await leased(store)
        assert await store.finish_attempt("a", 1, outcome, error="because") is RolloutState.FAILED
        trajectory = (await store.trajectories(["a"]))[0]
        assert (trajectory.outcome, trajectory.error, trajectory.transitions) == (outcome, "because", ())

    async def test_infrastructure_errors_are_retried_while_attempts_are_left(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=2)])
        await leased(store)
        assert await store.finish_attempt("a", 1, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.QUEUED
        await leased(store)
        assert await store.finish_attempt("a", 2, Outcome.INFRASTRUCTURE_ERROR) is RolloutState.FAILED

    async def test_the_attempt_that_succeeded_decides(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", max_attempts=2)])
        first = await leased(store)
        await store.append_call(make_call(first, "a/1/0", [1, 2], [3]))
        await store.finish_attempt("a", 1, Outcome.INFRASTRUCTURE_ERROR)
        second = await leased(store)
        await store.append_call(make_call(second, "a/2/0", [4, 5], [6]))
        await store.finish_attempt("a", 2, Outcome.SUCCEEDED)
        trajectory = (await store.trajectories(["a"]))[0]
        assert (trajectory.attempt, [one.id for one in trajectory.transitions]) == (2, ["a/2/0"])

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
        assert [one.outcome for one in await store.trajectories(["a", "b"])] == [Outcome.CANCELLED] * 2
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

    # ------------------------------------------------------------------ calls

    async def test_prompts_come_back_token_for_token(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        first = make_call(lease, "c0", [1, 2, 70_000], [3, 20_000_000])
        left, right = make_call(lease, "c1", [5], [6, 7], parent=first), make_call(lease, "c2", [8, 9], [10], parent=first)
        alone = make_call(lease, "c4", [12], [13], is_break=True)
        for call in (first, left, right, make_call(lease, "c3", [], [11], parent=left), alone):
            await store.append_call(call)
        await store.append_call(make_call(lease, "c5", [14], [15], parent=right))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        transitions = (await store.trajectories(["a"]))[0].transitions
        root = [1, 2, 70_000, 3, 20_000_000]
        assert [one.prompt_ids.tolist() for one in transitions] == [
            [1, 2, 70_000],
            [*root, 5],
            [*root, 8, 9],
            [*root, 5, 6, 7],
            [12],
            [*root, 8, 9, 10, 14],
        ]
        assert [one.completion_ids.tolist() for one in transitions] == [[3, 20_000_000], [6, 7], [10], [11], [13], [15]]
        assert [one.parent_id for one in transitions] == [None, "c0", "c0", "c1", None, "c2"]
        assert [one.is_break for one in transitions] == [False, False, False, False, True, False]
        assert all(one.prompt_ids.dtype == np.int32 and one.completion_ids.dtype == np.int32 for one in transitions)
        assert (await store.counts()).breaks == 1

    async def test_what_a_call_was_offered_comes_back_with_it(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b")])
        offered = ['{"search":{"type":"object"}}', "", '{"now":null}', '{"search":{"type":"object"}}', '{"long":"' + "ü" * 50_000 + '"}']
        for name in ("a", "b"):
            lease = await leased(store)
            for index, tools in enumerate(offered):
                await store.append_call(make_call(lease, f"c{index}", [1], [2], offered=tools))
            assert [call.transition.offered for call in await store.calls(name, 1)] == offered
            await store.finish_attempt(name, 1, Outcome.SUCCEEDED)
        for trajectory in await store.trajectories(["a", "b"]):
            assert [call.offered for call in trajectory.transitions] == offered

    async def test_logprobs_come_back_bit_for_bit(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        record = make_call(await leased(store), "c0", [1], [3, 7, 11])
        await store.append_call(record)
        kept = (await store.calls("a", 1))[0].transition
        assert kept.logprobs.dtype == np.float32 and kept.logprobs.tobytes() == record.transition.logprobs.tobytes()

    async def test_everything_a_call_says_comes_back(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        said: dict[str, Any] = {
            "agent": "write",
            "span_id": "00f067aa0ba902b7",
            "tool_call_ids": ("call_1", "call_2"),
            "trainable": False,
            "started_at": 12.5,
            "duration_s": 0.25,
            "policy_version": 9,
            "policy": "other",
            "finish_reason": FinishReason.LENGTH,
            "sampling": SamplingSettings(temperature=0.7, top_k=5, stop=("\n",), stop_token_ids=(2, 3), seed=1),
        }
        await store.append_call(make_call(await leased(store), "c0", [1], [2], history_key="h", **said))
        (stored,) = await store.calls("a", 1)
        assert (stored.call_key, stored.history_key) == ("key-c0", "h")
        assert {name: getattr(stored.transition, name) for name in said} == said

    async def test_a_retried_call_is_kept_once_and_its_first_answer_returns(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        assert await store.append_call(make_call(lease, "c0", [1], [2], call_key="k")) is None
        again = await store.append_call(make_call(lease, "c9", [1], [5], call_key="k"))
        assert again is not None and (again.transition.id, again.transition.completion_ids.tolist()) == ("c0", [2])
        assert len(await store.calls("a", 1)) == 1

    async def test_a_prompt_that_does_not_hold_its_parent_is_refused(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1, 2], [3]))
        with pytest.raises(StoreError, match=r"call 'c1': its prompt of 2 tokens does not hold the 3 of its parent"):
            await store.append_call(make_call(lease, "c1", [1, 2], [4], parent_id="c0"))

    async def test_the_choices_of_one_call_are_kept_together_or_not_at_all(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.append_calls([make_call(lease, "c0", [1], [2]), make_call(lease, "c1", [1], [3], parent_id="nope")])
        assert await store.calls("a", 1) == ()
        first = make_call(lease, "c0", [1], [2])
        assert await store.append_calls([first, make_call(lease, "c1", [4], [3], parent=first)]) == (None, None)
        assert [one.transition.prompt_ids.tolist() for one in await store.calls("a", 1)] == [[1], [1, 2, 4]]

    async def test_one_refused_call_does_not_hinder_the_others(self, store: Store) -> None:
        await store.create_rollouts([make_spec(f"r{i}") for i in range(8)])
        leases = [await leased(store) for _ in range(8)]
        good = [store.append_call(make_call(lease, f"{lease.rollout_id}/0", [1], [2])) for lease in leases]
        bad = [store.append_call(make_call(lease, f"{lease.rollout_id}/x", [1], [2], parent_id="nope")) for lease in leases]
        results = await asyncio.gather(*[one for pair in zip(good, bad, strict=True) for one in pair], return_exceptions=True)
        assert results[::2] == [None] * 8 and all(isinstance(one, UnknownRecord) for one in results[1::2])
        assert (await store.counts()).calls == 8

    async def test_a_transition_id_is_used_once(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2]))
        with pytest.raises(Conflict, match="'c0'"):
            await store.append_call(make_call(lease, "c0", [1], [2], call_key="other"))

    async def test_the_ids_of_calls_and_tool_calls_are_known(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        assert not await store.call_ids("a", 1) and not await store.tool_call_ids("a", 1)
        await store.append_calls([make_call(lease, f"c{number}", [1], [2]) for number in range(3)])
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=ToolCall(id="x", name="y"))])
        assert await store.call_ids("a", 1) == frozenset({"c0", "c1", "c2"})
        assert await store.tool_call_ids("a", 1) == frozenset({"x"})
        with pytest.raises(UnknownRecord):
            await store.call_ids("a", 2)

    @pytest.mark.parametrize("odd", ["\0", "\ud800"])
    async def test_what_a_call_is_known_by_may_hold_what_no_database_keeps_and_so_may_a_tasks_id(self, store: Store, odd: str) -> None:
        spec = replace(make_spec("a"), task=Task(id="t\0", input="?"))
        await store.create_rollouts([spec])
        assert (await store.create_rollouts([spec])) == 0, "the same again"
        lease = await leased(store)
        call = make_call(lease, "c0", [1], [2], call_key=f"k{odd}", history_key=f"h{odd}")
        assert await store.append_call(call) is None
        again = await store.append_call(replace(call, transition=replace(call.transition, id="c1")))
        assert again is not None and again.transition.id == "c0"
        (found,) = await store.list_rollouts(RolloutFilter(task_id="t\0"))
        assert found.spec == spec

    async def test_a_text_with_nul_in_it_is_kept_with_a_replacement_character(self, store: Store) -> None:
        """Such as a policy or a user's reward may write; PostgreSQL has no NUL in its texts."""
        await store.create_rollouts([make_spec("a")])
        await leased(store)
        tool_call = ToolCall(id="x\0", name="n\0", arguments="\0", result="\0", agent="g\0", error_type="\0")
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=tool_call)])
        await store.append_other_calls("a", 1, [OtherCall(kind=OtherCallKind.ELSEWHERE, path="p\0", model="m\0", code="\0", message="\0")])
        await store.finish_attempt("a", 1, Outcome.AGENT_ERROR, {"k\0": "\0"}, error="e\0")
        await store.set_scores([Score(rollout_id="a", attempt=1, unrewarded="style: ValueError: \0")])
        (kept,) = await store.trajectories(["a"])
        (call,), (other,) = kept.tool_calls, kept.other_calls
        assert (call.id, call.name, call.agent, call.error_type) == ("x\ufffd", "n\ufffd", "g\ufffd", "\ufffd")
        assert (other.path, other.model, other.code, kept.unrewarded) == ("p\ufffd", "m\ufffd", "\ufffd", "style: ValueError: \ufffd")
        assert (call.arguments, call.result, other.message, kept.output, kept.error) == ("\0", "\0", "\0", {"k\0": "\0"}, "e\0")

    async def test_text_that_utf_8_cannot_carry_is_kept_with_replacement_characters(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store)
        tool_call = ToolCall(id="x", name="n\ud800", arguments="\ud800", result="\udfff" * 300, agent="\ud800", error_type="\ud800")
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=tool_call, span_id="\ud800")])
        await store.add_rewards("a", 1, {"r\ud800": 1.0})
        await store.finish_attempt("a", 1, Outcome.AGENT_ERROR, {"k\ud800": ["\ud800"]}, error="e\ud800", duration_s=float("inf"))
        (kept,) = await store.trajectories(["a"])
        assert (kept.output, kept.error, kept.reported, kept.duration_s) == ({"k\ufffd": ["\ufffd"]}, "e\ufffd", {"r\ufffd": 1.0}, 0.0)
        (call,) = kept.tool_calls
        assert (call.name, call.arguments, call.result, call.agent) == ("n\ufffd", "\ufffd", "\ufffd" * 300, "\ufffd")
        assert (await store.rollout("a")).attempts[0].error == "e\ufffd"

    async def test_a_call_after_the_end_is_refused_and_counted(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.finish_attempt("a", 1, Outcome.TIMEOUT)
        with pytest.raises(AttemptOver, match=r"attempt 1 of rollout 'a' is over \(timeout\); call 'late'"):
            await store.append_call(make_call(lease, "late", [1], [2]))
        with pytest.raises(AttemptOver):
            await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=ToolCall(id="x", name="y"))])
        assert (await store.counts()).late == 2 and await store.calls("a", 1) == ()

    async def test_a_call_of_an_unknown_attempt_is_refused(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        with pytest.raises(UnknownRecord, match="rollout 'a' has no attempt 2"):
            await store.append_call(make_call(Lease(**{**_fields(lease), "attempt": 2}), "c", [1], [2]))

    # ------------------------------------------------------------------ keys

    async def test_a_key_opens_its_own_attempt_while_it_runs(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a", step=4, sampling=SamplingSettings(temperature=0.0)), make_spec("b")])
        one, other = await leased(store), await leased(store)
        info = await store.authorise("a", 1, one.key)
        assert info is not None and (info.rollout_id, info.step, info.sampling) == ("a", 4, SamplingSettings(temperature=0.0))
        assert await store.authorise("a", 1, one.key) == info
        assert await store.authorise("a", 1, other.key) is None
        assert await store.authorise("b", 1, one.key) is None
        assert await store.authorise("a", 2, one.key) is None
        assert await store.authorise("a", 1, "") is None
        assert "wrong key" in str(await store.refusal("a", 1, other.key))
        assert isinstance(await store.refusal("a", 2, one.key), UnknownRecord)
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        assert await store.authorise("a", 1, one.key) is None
        assert isinstance(await store.refusal("a", 1, one.key), AttemptOver)

    # ------------------------------------------------------------------ other calls, tool calls and spans

    async def test_calls_that_are_no_transitions_come_back_apart_from_tool_calls(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store)
        refused = OtherCall(
            kind=OtherCallKind.REFUSED, path="responses", agent="boss", status=503, code="busy", message="no", started_at=1.0
        )
        said: dict[str, Any] = {"request": {"messages": [{"x": "y" * 1000}]}, "answer": {"n": None}, "duration_s": 0.5}
        forwarded = OtherCall(kind=OtherCallKind.FORWARDED, path="embeddings", model="e", status=200, started_at=2.0, **said)
        await store.append_other_calls("a", 1, [refused, forwarded])
        hostile = OtherCall(kind=OtherCallKind.ELSEWHERE, path="\ud800", model="\ud800", message="\udfff", answer="\ud800", started_at=3.0)
        await store.append_other_calls("a", 1, [hostile])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        (trajectory,) = await store.trajectories(["a"])
        assert trajectory.tool_calls == () and trajectory.other_calls[:2] == (refused, forwarded)
        assert (trajectory.other_calls[2].path, trajectory.other_calls[2].answer) == ("\ufffd", "\ufffd")
        with pytest.raises(AttemptOver, match="attempt 1 of rollout 'a' is over"):
            await store.append_other_calls("a", 1, [refused])

    async def test_what_the_dialogue_shows_of_a_tool_call_gives_way_to_what_is_told_of_it(self, store: Store) -> None:
        def shown(call_id: str, status: ToolStatus = ToolStatus.UNKNOWN) -> ToolCallRecord:
            call = ToolCall(id=call_id, name=f"tool_{call_id}", result="of the dialogue", status=status, transition_id="c0")
            return ToolCallRecord(tool_call=call, span_id=f"{DIALOGUE}{call_id}", parent_span_id="c0")

        def told(call_id: str, status: ToolStatus = ToolStatus.OK, result: str = "") -> ToolCallRecord:
            call = ToolCall(id=call_id, name=f"tool_{call_id}", arguments="{}", result=result, status=status)
            return ToolCallRecord(tool_call=call, span_id=f"s-{call_id}")

        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("x", "y", "z", "v", "w")))
        await store.append_spans("a", 1, [SpanRecord(span_id="c0", agent="planner")])
        assert await store.append_tool_calls("a", 1, [told("y", result="of a span"), told("v", ToolStatus.UNKNOWN)]) == 2
        second = make_call(lease, "c1", [1, 2, 3], [4])
        results = [shown("x", ToolStatus.ERROR), shown("y"), *(shown(name, ToolStatus.ERROR) for name in "zvw")]
        assert await store.append_calls([second], results) == (None,)
        (again,) = await store.append_calls([second], results)
        assert again is not None and again.transition.id == "c1", "a retry, with the same results"
        assert await store.tool_call_ids("a", 1) == frozenset({"y", "v"}), "so that a span without an id may still be told to be of x"
        assert await store.append_tool_calls("a", 1, [told("x"), told("x"), told("w", ToolStatus.UNKNOWN)]) == 2
        assert await store.append_tool_calls("a", 1, [shown("x")]) == 0
        assert await store.tool_call_ids("a", 1) == frozenset({"x", "y", "v", "w"})
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        tools = {tool.id: tool for tool in (await store.trajectories(["a"]))[0].tool_calls}
        assert {name: (tool.status, tool.result, tool.transition_id) for name, tool in tools.items()} == {
            "x": (ToolStatus.ERROR, "of the dialogue", "c0"),
            "y": (ToolStatus.OK, "of a span", "c0"),
            "z": (ToolStatus.ERROR, "of the dialogue", "c0"),
            "v": (ToolStatus.ERROR, "of the dialogue", "c0"),
            "w": (ToolStatus.ERROR, "of the dialogue", "c0"),
        }
        assert tools["z"].agent == "planner", "of the call that asked"
        assert {name: tool.contradicted for name, tool in tools.items()} == {"x": 2, "y": 0, "z": 0, "v": 0, "w": 0}

    async def test_tool_calls_find_the_call_that_asked(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("call_1",)))
        await store.append_call(make_call(lease, "c1", [1], [2], span_id="00000000000000aa"))
        by_id = ToolCall(id="call_1", name="sql", arguments="{}", result="x" * 1000, status=ToolStatus.OK, duration_s=0.5)
        by_span = ToolCall(id="s2", name="other", status=ToolStatus.ERROR, error_type="ValueError", agent="boss")
        records = [
            ToolCallRecord(tool_call=by_id, span_id="0000000000000001", parent_span_id="00000000000000aa", started_at=1.0),
            ToolCallRecord(tool_call=by_span, span_id="0000000000000002", parent_span_id="00000000000000aa", started_at=2.0),
            ToolCallRecord(tool_call=ToolCall(id="s3", name="other"), span_id="0000000000000003", started_at=3.0),
        ]
        assert await store.append_tool_calls("a", 1, records) == 3
        assert await store.append_tool_calls("a", 1, records) == 0
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        first, second, third = (await store.trajectories(["a"]))[0].tool_calls
        assert (first.transition_id, first.result, first.status, first.duration_s) == ("c0", "x" * 1000, ToolStatus.OK, 0.5)
        assert (second.transition_id, second.agent, second.error_type) == ("c1", "boss", "ValueError")
        assert third.transition_id is None

    async def test_of_reports_of_one_tool_call_that_contradict_each_other_the_worst_stands_and_they_are_counted(self, store: Store) -> None:
        def told(call_id: str, status: ToolStatus, span: str | None, result: str = "") -> ToolCallRecord:
            return ToolCallRecord(tool_call=ToolCall(id=call_id, name="sql", status=status, result=result), span_id=span)

        await store.create_rollouts([make_spec("a")])
        await leased(store)
        ok, error, timeout, unknown = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.UNKNOWN
        first = [told("t0", ok, "reported:t0", "fine"), told("t1", error, "s1", "no"), told("t2", unknown, "s2"), told("t3", ok, "s3")]
        assert await store.append_tool_calls("a", 1, first) == 4
        again = [told("t0", error, "s0", "broke"), told("t1", ok, "reported:t1"), told("t2", ok, "s4"), told("t3", ok, "s5")]
        assert await store.append_tool_calls("a", 1, again) == 0
        assert await store.append_tool_calls("a", 1, again) == 0
        assert await store.append_tool_calls("a", 1, [told("t4", ok, None), told("t4", timeout, None), told("other", error, "s3")]) == 1
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        (trajectory,) = await store.trajectories(["a"])
        kept = {tool.id: (tool.status, tool.result, tool.contradicted) for tool in trajectory.tool_calls}
        assert kept == {
            "t0": (error, "broke", 1),
            "t1": (error, "no", 2),
            "t2": (ok, "", 0),
            "t3": (error, "", 1),
            "t4": (timeout, "", 1),
        }

    async def test_an_unnamed_call_gets_the_agent_of_its_trace(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2], span_id="00000000000000aa"))
        await store.append_call(make_call(lease, "c1", [1], [2], span_id="00000000000000aa", agent="said"))
        await store.append_spans("a", 1, [SpanRecord(span_id="00000000000000aa", parent_span_id="00000000000000bb")])
        await store.append_spans("a", 1, [SpanRecord(span_id="00000000000000bb", agent="planner")])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        assert [one.agent for one in (await store.trajectories(["a"]))[0].transitions] == ["planner", "said"]

    # ------------------------------------------------------------------ rewards and scores

    async def test_what_is_reported_and_what_is_computed_are_kept_apart_by_name_and_none_is_not_zero(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_calls([make_call(lease, "c0", [1], [2, 3]), make_call(lease, "c1", [1], [2, 3])])
        await store.add_rewards("a", 1, {"style": 0.5})
        await store.add_rewards("a", 1, {"tool": -1.0, "judge": None}, transition_id="c1")
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        score = Score(
            rollout_id="a",
            attempt=1,
            rewards={"match": 1.0, "style": None},
            reward=1.25,
            digests={"rewards.match": "one"},
            transition_rewards={"c0": {"tool": 0.0}},
            advantages={"c0": np.array([0.5, -0.25], np.float32), "c1": None},
        )
        await store.set_scores([replace(score, digests={"rewards.match": "two"}, unrewarded="style: ValueError: \ud800")])
        trajectory = (await store.trajectories(["a"]))[0]
        assert (trajectory.unrewarded, trajectory.digests) == ("style: ValueError: \ufffd", {"rewards.match": "two"})
        await store.set_scores([score])
        trajectory = (await store.trajectories(["a"]))[0]
        assert trajectory.reported == {"style": 0.5}
        assert trajectory.rewards == {"style": None, "match": 1.0} and trajectory.reward == 1.25
        assert (trajectory.unrewarded, trajectory.digests) == (None, {"rewards.match": "one"})
        assert [one.reported for one in trajectory.transitions] == [{}, {"tool": -1.0, "judge": None}]
        assert [one.rewards for one in trajectory.transitions] == [{"tool": 0.0}, {}]
        (kept,) = await store.scores(["a"])
        assert (kept.rewards, kept.digests, kept.transition_rewards) == (score.rewards, score.digests, score.transition_rewards)
        first, second = kept.advantages["c0"], kept.advantages["c1"]
        assert first is not None and first.tolist() == [0.5, -0.25] and second is None
        assert (await store.rollout("a")).reward == 1.25

    async def test_evidence_and_the_calls_of_judges_are_kept_after_the_end_and_a_repeat_adds_nothing(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0", [1], [2, 3]))
        await store.append_other_calls("a", 1, [OtherCall(kind=OtherCallKind.REFUSED, path="models", started_at=1.0)])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        evidence = Evidence(calls={"grade": np.array([0.5], np.float32)}, tokens={"value": (np.array([0.25, -1.0], np.float32),)})
        judged = OtherCall(kind=OtherCallKind.JUDGE, path="chat/completions", request={"a": [1]}, answer="7", started_at=2.0)
        score = Score(rollout_id="a", attempt=1, evidence=evidence, asked=(judged,), digests={"credit": "one"})
        await store.set_scores([score])
        await store.set_scores([score])
        await store.set_scores([Score(rollout_id="a", attempt=1, reward=1.0)])  # what is not given stays
        (trajectory,) = await store.trajectories(["a"])
        assert [call.kind for call in trajectory.other_calls] == [OtherCallKind.REFUSED, OtherCallKind.JUDGE]
        assert trajectory.other_calls[1] == judged
        assert trajectory.digests == {"credit": "one"}
        for kept in (trajectory.evidence, (await store.scores(["a"]))[0].evidence):
            assert kept is not None
            assert {name: values.tolist() for name, values in kept.calls.items()} == {"grade": [0.5]}
            assert [values.tolist() for values in kept.tokens["value"]] == [[0.25, -1.0]]

    async def test_a_constant_advantage_comes_back_per_token(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await store.append_call(make_call(await leased(store), "c0", [1], [2, 3, 4]))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        await store.set_scores([Score(rollout_id="a", attempt=1, advantages={"c0": np.full(3, 0.1, np.float32)})])
        kept = (await store.scores(["a"]))[0].advantages["c0"]
        assert kept is not None and kept.tolist() == np.full(3, 0.1, np.float32).tolist()

    async def test_rewards_for_nothing_are_refused(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        await leased(store)
        with pytest.raises(UnknownRecord, match="no transition 'nope'"):
            await store.add_rewards("a", 1, {"x": 1.0}, transition_id="nope")
        with pytest.raises(StoreError, match="'x' of rollout 'a' is nan"):
            await store.add_rewards("a", 1, {"x": float("nan")})
        with pytest.raises(Conflict, match="still runs"):
            await store.set_scores([Score(rollout_id="a", attempt=1)])

    async def test_a_trajectory_needs_an_ended_attempt(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        with pytest.raises(Conflict, match="'a' has no finished attempt"):
            await store.trajectories(["a"])
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.trajectories(["nope"])

    # ------------------------------------------------------------------ steps

    async def test_a_rollout_is_trained_once(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b"), make_spec("c")])
        await store.mark_trained(1, ["a", "b"], {"loss": 0.5})
        await store.mark_trained(1, ["b", "a"], {"loss": 0.5})
        with pytest.raises(Conflict, match="'b' was trained in step 1"):
            await store.mark_trained(2, ["c", "b"], {})
        with pytest.raises(Conflict, match="step 1 is already recorded"):
            await store.mark_trained(1, ["c"], {})
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.mark_trained(2, ["nope"], {})
        (step,) = await store.steps()
        assert (step.step, step.rollout_ids, step.metrics) == (1, ("a", "b"), {"loss": 0.5})
        assert (await store.rollout("a")).trained_step == 1

    async def test_steps_after_the_checkpoint_are_forgotten(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        for step, name in enumerate("abc", 1):
            await store.mark_trained(step, [name], {})
        assert await store.rollback_steps(after=1) == 2
        await store.mark_trained(2, ["c"], {})
        assert [(one.step, one.rollout_ids) for one in await store.steps()] == [(1, ("a",)), (2, ("c",))]

    async def test_rollouts_of_old_steps_are_forgotten_and_their_steps_stay(self, store: Store) -> None:
        validation = {"mode": RolloutMode.VALIDATION}
        await store.create_rollouts([make_spec("v1", step=1, **validation), make_spec("v2", step=2, **validation)])
        await store.create_rollouts([make_spec(name, step=step) for step, name in enumerate(("a", "b", "late", "c"))])
        await store.create_rollouts([make_spec("queued", step=0)])
        for name in ("v1", "v2", "a", "b", "late", "c"):
            lease = await leased(store)
            assert lease.rollout_id == name
            await store.append_call(make_call(lease, f"of-{name}", [1], [2]))
            await store.finish_attempt(name, 1, Outcome.SUCCEEDED, "done")
            await store.set_scores([Score(rollout_id=name, attempt=1, reward=1.0, rewards={"right": 1.0})])
        for step, name in enumerate(("a", "b", "c"), 1):
            await store.mark_trained(step, [name], {"rollouts": 1.0})
        assert await store.forget_rollouts(through=1) == 2  # `late` is planned for step 3
        assert await store.forget_rollouts(through=3, slack=2) == 3
        left = {record.spec.id for record in await store.list_rollouts()}
        assert left == {"late", "queued"}
        assert await store.forget_rollouts(through=3) == 1
        with pytest.raises(UnknownRecord):
            await store.rollout("a")
        await store.create_rollouts([make_spec("later")])
        await store.mark_trained(4, ["later"], {"rollouts": 1.0})
        kept = [(one.step, one.rollout_ids, one.is_forgotten) for one in await store.steps()]
        assert kept == [(1, (), True), (2, (), True), (3, (), True), (4, ("later",), False)]
        counts = await store.counts()
        assert (counts.attempts, counts.calls) == (0, 0)
        assert (await leased(store)).rollout_id == "queued"

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
        assert await store.read(lambda db: db.execute(text("SELECT id FROM rollouts ORDER BY id")).scalars().all()) == ["a", "b", "c"]

    async def test_a_closed_store_says_so(self, store: Store) -> None:
        waiting = asyncio.create_task(store.lease("w", 60.0, wait_s=30.0))
        await asyncio.sleep(0.02)
        await store.close()
        assert await waiting is None
        with pytest.raises(StoreError, match="is closed"):
            await store.create_rollouts([make_spec("a")])


def _fields(lease: Lease) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in lease.__slots__}
