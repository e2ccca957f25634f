"""Specification of a store's call log: calls, tool calls, spans, keys."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.records import RolloutFilter, Score
from lightningrl.types import FinishReason, OtherCall, OtherCallKind, Outcome, SamplingSettings, Task, ToolCall
from lightningrl_server.records import ToolCallRecord
from lightningrl_server.store.errors import AttemptOver, Conflict, UnknownRecord
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest
from lightningrl_testing.store_conformance.inputs import ended, leased, make_call, make_spec, started

__all__ = ["CallLogConformance"]


class CallLogConformance:
    """Tests of `lightningrl_server.store.protocol.CallLog`."""

    async def test_prompts_come_back_token_for_token(self, store: Store) -> None:
        lease = await started(store)
        first = make_call(lease, "c0", [1, 2, 70_000], [3, 20_000_000])
        left = make_call(lease, "c1", [5], [6, 7], parent=first)
        right = make_call(lease, "c2", [8, 9], [10], parent=first)
        alone = make_call(lease, "c4", [12], [13], is_break=True)
        for call in (first, left, right, make_call(lease, "c3", [], [11], parent=left), alone):
            await store.append_call(call)
        await store.append_call(make_call(lease, "c5", [14], [15], parent=right))
        transitions = (await ended(store)).transitions
        root = [1, 2, 70_000, 3, 20_000_000]
        prompts = [root[:3], [*root, 5], [*root, 8, 9], [*root, 5, 6, 7], [12], [*root, 8, 9, 10, 14]]
        assert [call.prompt_ids.tolist() for call in transitions] == prompts
        completions = [[3, 20_000_000], [6, 7], [10], [11], [13], [15]]
        assert [call.completion_ids.tolist() for call in transitions] == completions
        assert [call.parent_id for call in transitions] == [None, "c0", "c0", "c1", None, "c2"]
        assert [call.is_break for call in transitions] == [False, False, False, False, True, False]
        assert all(call.prompt_ids.dtype == np.int32 and call.completion_ids.dtype == np.int32 for call in transitions)
        assert (await store.counts()).breaks == 1

    async def test_what_a_call_was_offered_comes_back_with_it(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b")])
        search = '{"search":{"type":"object"}}'
        offered = [search, "", '{"now":null}', search, '{"long":"' + "ü" * 50_000 + '"}']
        for name in ("a", "b"):
            lease = await leased(store)
            for index, tools in enumerate(offered):
                await store.append_call(make_call(lease, f"c{index}", [1], [2], offered=tools))
            assert [call.transition.offered for call in await store.calls(name, 1)] == offered
            await store.finish_attempt(name, 1, Outcome.SUCCEEDED)
        for trajectory in await store.trajectories(["a", "b"]):
            assert [call.offered for call in trajectory.transitions] == offered

    async def test_logprobs_come_back_bit_for_bit(self, store: Store) -> None:
        record = make_call(await started(store), "c0", [1], [3, 7, 11])
        await store.append_call(record)
        stored = (await store.calls("a", 1))[0].transition
        assert stored.logprobs.dtype == np.float32 and stored.logprobs.tobytes() == record.transition.logprobs.tobytes()

    async def test_everything_a_call_says_comes_back(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a")])
        values: dict[str, Any] = {
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
        await store.append_call(make_call(await leased(store), "c0", [1], [2], history_key="h", **values))
        (stored,) = await store.calls("a", 1)
        assert (stored.call_key, stored.history_key) == ("key-c0", "h")
        assert {name: getattr(stored.transition, name) for name in values} == values

    async def test_a_retried_call_is_kept_once_and_its_first_answer_returns(self, store: Store) -> None:
        lease = await started(store)
        assert await store.append_call(make_call(lease, "c0", [1], [2], call_key="k")) is None
        again = await store.append_call(make_call(lease, "c9", [1], [5], call_key="k"))
        assert again is not None and (again.transition.id, again.transition.completion_ids.tolist()) == ("c0", [2])
        assert len(await store.calls("a", 1)) == 1

    async def test_a_prompt_that_does_not_hold_its_parent_is_refused(self, store: Store) -> None:
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1, 2], [3]))
        with pytest.raises(StoreError, match=r"call 'c1': its prompt of 2 tokens does not hold the 3 of its parent"):
            await store.append_call(make_call(lease, "c1", [1, 2], [4], parent_id="c0"))

    async def test_the_choices_of_one_call_are_kept_together_or_not_at_all(self, store: Store) -> None:
        lease = await started(store)
        pair = [make_call(lease, "c0", [1], [2]), make_call(lease, "c1", [1], [3], parent_id="nope")]
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.append_calls(pair)
        assert await store.calls("a", 1) == ()
        first = make_call(lease, "c0", [1], [2])
        assert await store.append_calls([first, make_call(lease, "c1", [4], [3], parent=first)]) == (None, None)
        assert [call.transition.prompt_ids.tolist() for call in await store.calls("a", 1)] == [[1], [1, 2, 4]]

    async def test_one_refused_call_does_not_hinder_the_others(self, store: Store) -> None:
        await store.create_rollouts([make_spec(f"r{i}") for i in range(8)])
        leases = [await leased(store) for _ in range(8)]
        calls = []
        for lease in leases:
            calls.append(make_call(lease, f"{lease.rollout_id}/0", [1], [2]))
            calls.append(make_call(lease, f"{lease.rollout_id}/x", [1], [2], parent_id="nope"))
        results = await asyncio.gather(*map(store.append_call, calls), return_exceptions=True)
        assert results[::2] == [None] * 8 and all(isinstance(result, UnknownRecord) for result in results[1::2])
        assert (await store.counts()).calls == 8

    async def test_a_transition_id_is_used_once(self, store: Store) -> None:
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2]))
        with pytest.raises(Conflict, match="'c0'"):
            await store.append_call(make_call(lease, "c0", [1], [2], call_key="other"))

    async def test_the_ids_of_calls_and_tool_calls_are_known(self, store: Store) -> None:
        lease = await started(store)
        assert not await store.call_ids("a", 1) and not await store.tool_call_ids("a", 1)
        await store.append_calls([make_call(lease, f"c{number}", [1], [2]) for number in range(3)])
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=ToolCall(id="x", name="y"))])
        assert await store.call_ids("a", 1) == frozenset({"c0", "c1", "c2"})
        assert await store.tool_call_ids("a", 1) == frozenset({"x"})
        with pytest.raises(UnknownRecord):
            await store.call_ids("a", 2)

    @pytest.mark.parametrize("odd", ["\0", "\ud800"])
    async def test_what_a_call_is_known_by_may_hold_what_no_database_keeps_and_so_may_a_tasks_id(
        self, store: Store, odd: str
    ) -> None:
        spec = replace(make_spec("a"), task=Task(id="t\0", input="?"))
        await store.create_rollouts([spec])
        assert (await store.create_rollouts([spec])) == 0, "the same again"
        lease = await leased(store)
        call = make_call(lease, "c0", [1], [2], call_key=f"k{odd}", history_key=f"h{odd}")
        assert await store.append_call(call) is None
        again = await store.append_call(replace(call, transition=replace(call.transition, id="c1")))
        assert again is not None and again.transition.id == "c0"
        (listed,) = await store.list_rollouts(RolloutFilter(task_id="t\0"))
        assert listed.spec == spec

    async def test_a_text_with_nul_in_it_is_kept_with_a_replacement_character(self, store: Store) -> None:
        """Such as a policy or a user's reward may write; PostgreSQL has no NUL in its texts."""
        await started(store)
        tool_call = ToolCall(id="x\0", name="n\0", arguments="\0", result="\0", agent="g\0", error_type="\0")
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=tool_call)])
        elsewhere = OtherCall(kind=OtherCallKind.ELSEWHERE, path="p\0", model="m\0", code="\0", message="\0")
        await store.append_other_calls("a", 1, [elsewhere])
        await store.finish_attempt("a", 1, Outcome.AGENT_ERROR, {"k\0": "\0"}, error="e\0")
        await store.set_scores([Score(rollout_id="a", attempt=1, unrewarded="style: ValueError: \0")])
        (stored,) = await store.trajectories(["a"])
        (call,), (other,) = stored.tool_calls, stored.other_calls
        assert (call.id, call.name, call.agent, call.error_type) == ("x\ufffd", "n\ufffd", "g\ufffd", "\ufffd")
        assert (other.path, other.model, other.code) == ("p\ufffd", "m\ufffd", "\ufffd")
        assert stored.unrewarded == "style: ValueError: \ufffd"
        assert (call.arguments, call.result, other.message) == ("\0", "\0", "\0")
        assert (stored.output, stored.error) == ({"k\0": "\0"}, "e\0")

    async def test_text_that_utf_8_cannot_carry_is_kept_with_replacement_characters(self, store: Store) -> None:
        await started(store)
        tool_call = ToolCall(
            id="x", name="n\ud800", arguments="\ud800", result="\udfff" * 300, agent="\ud800", error_type="\ud800"
        )
        await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=tool_call, span_id="\ud800")])
        await store.add_rewards("a", 1, {"r\ud800": 1.0})
        output = {"k\ud800": ["\ud800"]}
        stored = await ended(store, Outcome.AGENT_ERROR, output, error="e\ud800", duration_s=float("inf"))
        assert (stored.output, stored.error) == ({"k\ufffd": ["\ufffd"]}, "e\ufffd")
        assert (stored.reported, stored.duration_s) == ({"r\ufffd": 1.0}, 0.0)
        (call,) = stored.tool_calls
        assert (call.name, call.arguments, call.result, call.agent) == ("n\ufffd", "\ufffd", "\ufffd" * 300, "\ufffd")
        assert (await store.rollout("a")).attempts[0].error == "e\ufffd"

    async def test_a_call_after_the_end_is_refused_and_counted(self, store: Store) -> None:
        lease = await started(store)
        await store.finish_attempt("a", 1, Outcome.TIMEOUT)
        with pytest.raises(AttemptOver, match=r"attempt 1 of rollout 'a' is over \(timeout\); call 'late'"):
            await store.append_call(make_call(lease, "late", [1], [2]))
        with pytest.raises(AttemptOver):
            await store.append_tool_calls("a", 1, [ToolCallRecord(tool_call=ToolCall(id="x", name="y"))])
        assert (await store.counts()).late == 2 and await store.calls("a", 1) == ()

    async def test_a_call_of_an_unknown_attempt_is_refused(self, store: Store) -> None:
        lease = await started(store)
        with pytest.raises(UnknownRecord, match="rollout 'a' has no attempt 2"):
            await store.append_call(make_call(replace(lease, attempt=2), "c", [1], [2]))

    async def test_a_key_opens_its_own_attempt_while_it_runs(self, store: Store) -> None:
        greedy = SamplingSettings(temperature=0.0)
        await store.create_rollouts([make_spec("a", step=4, sampling=greedy), make_spec("b")])
        lease, other = await leased(store), await leased(store)
        info = await store.authorise("a", 1, lease.key)
        assert info is not None and (info.rollout_id, info.step, info.sampling) == ("a", 4, greedy)
        assert await store.authorise("a", 1, lease.key) == info
        assert await store.authorise("a", 1, other.key) is None
        assert await store.authorise("b", 1, lease.key) is None
        assert await store.authorise("a", 2, lease.key) is None
        assert await store.authorise("a", 1, "") is None
        assert "wrong key" in str(await store.refusal("a", 1, other.key))
        assert isinstance(await store.refusal("a", 2, lease.key), UnknownRecord)
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        assert await store.authorise("a", 1, lease.key) is None
        assert isinstance(await store.refusal("a", 1, lease.key), AttemptOver)
