"""Specification of a store's tool calls, spans and calls that are no transitions."""

from __future__ import annotations

from typing import Any

from lightningrl.types import OtherCall, OtherCallKind, ToolCall, ToolStatus
from lightningrl_server.records import DIALOGUE, SpanRecord, ToolCallRecord
from lightningrl_server.store.errors import AttemptOver
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest
from lightningrl_testing.store_conformance.inputs import ended, make_call, started

__all__ = ["ToolCallConformance"]


class ToolCallConformance:
    """Tests of the part of `lightningrl_server.store.protocol.CallLog` that is no model call of a policy."""

    async def test_calls_that_are_no_transitions_come_back_apart_from_tool_calls(self, store: Store) -> None:
        await started(store)
        values: dict[str, Any] = {"agent": "boss", "status": 503, "code": "busy", "message": "no"}
        refused = OtherCall(kind=OtherCallKind.REFUSED, path="responses", started_at=1.0, **values)
        values = {"request": {"messages": [{"x": "y" * 1000}]}, "answer": {"n": None}, "duration_s": 0.5}
        forwarded = OtherCall(
            kind=OtherCallKind.FORWARDED, path="embeddings", model="e", status=200, started_at=2.0, **values
        )
        await store.append_other_calls("a", 1, [refused, forwarded])
        texts: dict[str, Any] = {"path": "\ud800", "model": "\ud800", "message": "\udfff", "answer": "\ud800"}
        hostile = OtherCall(kind=OtherCallKind.ELSEWHERE, started_at=3.0, **texts)
        await store.append_other_calls("a", 1, [hostile])
        trajectory = await ended(store)
        assert trajectory.tool_calls == () and trajectory.other_calls[:2] == (refused, forwarded)
        assert (trajectory.other_calls[2].path, trajectory.other_calls[2].answer) == ("\ufffd", "\ufffd")
        with pytest.raises(AttemptOver, match="attempt 1 of rollout 'a' is over"):
            await store.append_other_calls("a", 1, [refused])

    async def test_what_the_dialogue_shows_of_a_tool_call_gives_way_to_what_is_told_of_it(self, store: Store) -> None:
        def shown(call_id: str, status: ToolStatus = ToolStatus.UNKNOWN) -> ToolCallRecord:
            call = ToolCall(
                id=call_id, name=f"tool_{call_id}", result="of the dialogue", status=status, transition_id="c0"
            )
            return ToolCallRecord(tool_call=call, span_id=f"{DIALOGUE}{call_id}", parent_span_id="c0")

        def report(call_id: str, status: ToolStatus = ToolStatus.OK, result: str = "") -> ToolCallRecord:
            call = ToolCall(id=call_id, name=f"tool_{call_id}", arguments="{}", result=result, status=status)
            return ToolCallRecord(tool_call=call, span_id=f"s-{call_id}")

        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("x", "y", "z", "v", "w")))
        await store.append_spans("a", 1, [SpanRecord(span_id="c0", agent="planner")])
        reports = [report("y", result="of a span"), report("v", ToolStatus.UNKNOWN)]
        assert await store.append_tool_calls("a", 1, reports) == 2
        second = make_call(lease, "c1", [1, 2, 3], [4])
        results = [shown("x", ToolStatus.ERROR), shown("y"), *(shown(name, ToolStatus.ERROR) for name in "zvw")]
        assert await store.append_calls([second], results) == (None,)
        (again,) = await store.append_calls([second], results)
        assert again is not None and again.transition.id == "c1", "a retry, with the same results"
        assert await store.tool_call_ids("a", 1) == frozenset({"y", "v"}), (
            "so that a span without an id may still be told to be of x"
        )
        assert await store.append_tool_calls("a", 1, [report("x"), report("x"), report("w", ToolStatus.UNKNOWN)]) == 2
        assert await store.append_tool_calls("a", 1, [shown("x")]) == 0
        assert await store.tool_call_ids("a", 1) == frozenset({"x", "y", "v", "w"})
        tools = {tool.id: tool for tool in (await ended(store)).tool_calls}
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
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("call_1",)))
        await store.append_call(make_call(lease, "c1", [1], [2], span_id="00000000000000aa"))
        by_id = ToolCall(
            id="call_1", name="sql", arguments="{}", result="x" * 1000, status=ToolStatus.OK, duration_s=0.5
        )
        by_span = ToolCall(id="s2", name="other", status=ToolStatus.ERROR, error_type="ValueError", agent="boss")
        below: dict[str, Any] = {"parent_span_id": "00000000000000aa"}
        records = [
            ToolCallRecord(tool_call=by_id, span_id="0000000000000001", started_at=1.0, **below),
            ToolCallRecord(tool_call=by_span, span_id="0000000000000002", started_at=2.0, **below),
            ToolCallRecord(tool_call=ToolCall(id="s3", name="other"), span_id="0000000000000003", started_at=3.0),
        ]
        assert await store.append_tool_calls("a", 1, records) == 3
        assert await store.append_tool_calls("a", 1, records) == 0
        first, second, third = (await ended(store)).tool_calls
        assert (first.transition_id, first.result) == ("c0", "x" * 1000)
        assert (first.status, first.duration_s) == (ToolStatus.OK, 0.5)
        assert (second.transition_id, second.agent, second.error_type) == ("c1", "boss", "ValueError")
        assert third.transition_id is None

    async def test_of_reports_of_one_tool_call_that_contradict_each_other_the_worst_stands_and_they_are_counted(
        self, store: Store
    ) -> None:
        def report(call_id: str, status: ToolStatus, span: str | None, result: str = "") -> ToolCallRecord:
            call = ToolCall(id=call_id, name="sql", status=status, result=result)
            return ToolCallRecord(tool_call=call, span_id=span)

        await started(store)
        ok, error, timeout, unknown = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.UNKNOWN
        first = [
            report("t0", ok, "reported:t0", "fine"),
            report("t1", error, "s1", "no"),
            report("t2", unknown, "s2"),
            report("t3", ok, "s3"),
        ]
        assert await store.append_tool_calls("a", 1, first) == 4
        again = [
            report("t0", error, "s0", "broke"),
            report("t1", ok, "reported:t1"),
            report("t2", ok, "s4"),
            report("t3", ok, "s5"),
        ]
        assert await store.append_tool_calls("a", 1, again) == 0
        assert await store.append_tool_calls("a", 1, again) == 0
        more = [report("t4", ok, None), report("t4", timeout, None), report("other", error, "s3")]
        assert await store.append_tool_calls("a", 1, more) == 1
        trajectory = await ended(store)
        stored = {tool.id: (tool.status, tool.result, tool.contradicted) for tool in trajectory.tool_calls}
        assert stored == {
            "t0": (error, "broke", 1),
            "t1": (error, "no", 2),
            "t2": (ok, "", 0),
            "t3": (error, "", 1),
            "t4": (timeout, "", 1),
        }

    async def test_an_unnamed_call_gets_the_agent_of_its_trace(self, store: Store) -> None:
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2], span_id="00000000000000aa"))
        await store.append_call(make_call(lease, "c1", [1], [2], span_id="00000000000000aa", agent="said"))
        await store.append_spans("a", 1, [SpanRecord(span_id="00000000000000aa", parent_span_id="00000000000000bb")])
        await store.append_spans("a", 1, [SpanRecord(span_id="00000000000000bb", agent="planner")])
        assert [call.agent for call in (await ended(store)).transitions] == ["planner", "said"]
