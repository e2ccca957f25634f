"""Calls that providers answered, of each API and streamed or not, read as one conversation."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lightningrl.records import RolloutRecord
from lightningrl.types import OtherCall, OtherCallKind, Outcome, RolloutSpec, RolloutState, Task, ToolCall, ToolStatus
from lightningrl_runs.dialogue import Exchange, final_text, question_of, read_exchanges
from lightningrl_runs.trace import Trace

USER = {"role": "user", "content": "What costs tea?"}
WANTED = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"of": "tea"}'}}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "3 euros"}


def forwarded(path: str, request: Any, answer: Any, **more: Any) -> OtherCall:
    return OtherCall(kind=OtherCallKind.FORWARDED, path=path, request=request, answer=answer, **more)


def events(*data: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(each)}\n\n" for each in data)


CHAT = (
    forwarded("chat/completions", {"messages": [USER]}, {"choices": [{"message": {"tool_calls": [WANTED]}}]}),
    forwarded(
        "chat/completions",
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [WANTED]}, TOLD]},
        events(
            {"choices": [{"delta": {"content": "3 "}}]},
            {"choices": [{"delta": {"content": "euros."}, "finish_reason": "stop"}]},
        ),
    ),
)
MESSAGES = (
    forwarded(
        "messages",
        {"system": "Be short.", "messages": [USER]},
        {"type": "message", "content": [{"type": "tool_use", "id": "c1", "name": "price", "input": {"of": "tea"}}]},
    ),
    forwarded(
        "messages",
        {
            "system": "Be short.",
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "price", "input": {"of": "tea"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3 euros"}]},
            ],
        },
        {"type": "message", "content": [{"type": "text", "text": "3 euros."}]},
    ),
)
RESPONSES = (
    forwarded(
        "responses",
        {"instructions": "Be short.", "input": [USER]},
        {"output": [{"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"of": "tea"}'}]},
    ),
    forwarded(
        "responses",
        {
            "instructions": "Be short.",
            "input": [
                USER,
                {"type": "function_call", "call_id": "c1", "name": "price", "arguments": '{"of": "tea"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "3 euros"},
            ],
        },
        {
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3 euros."}]}
            ]
        },
    ),
)


def read(*calls: OtherCall, tools: tuple[ToolCall, ...] = ()) -> tuple[Exchange, ...]:
    spec = RolloutSpec(id="r", task=Task(id="t", input="What costs tea?"), group_id="g")
    rollout = RolloutRecord(spec=spec, state=RolloutState.SUCCEEDED, outcome=Outcome.SUCCEEDED, attempts=())
    return read_exchanges(Trace(rollout=rollout, attempt=1, other_calls=calls, tool_calls=tools))


@pytest.mark.parametrize("calls", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_a_dialogue_of_any_api_is_told_once_with_each_result_at_its_call(calls: tuple[OtherCall, ...]) -> None:
    first, second = read(*calls)
    assert [speech.text for speech in first.speeches if speech.who == "user"] == ["What costs tea?"]
    (tool,) = first.tool_calls
    assert (tool.name, json.loads(tool.arguments), tool.result) == ("price", {"of": "tea"}, "3 euros")
    assert second.seen_in == 0 and second.seen == len(first.speeches) + 1
    assert [(speech.who, speech.text, speech.is_answer) for speech in second.speeches] == [
        ("assistant", "3 euros.", True)
    ]


def test_a_recorded_tool_keeps_its_status_and_a_result_of_nobody_is_a_message() -> None:
    failed = ToolCall(id="c1", name="price", result="KeyError", status=ToolStatus.ERROR)
    first, _ = read(*CHAT, tools=(failed,))
    assert first.has_failed and first.tool_calls[0].result == "KeyError"
    (alone,) = read(CHAT[1])
    assert ("tool result", "3 euros") in [(speech.who, speech.text) for speech in alone.speeches]


def test_what_is_no_chat_or_was_not_kept_is_no_part_of_it() -> None:
    assert read(forwarded("embeddings", {"input": "tea"}, {"data": []}), forwarded("responses", 1_000_000, None)) == ()
    (failed,) = read(forwarded("messages", None, None, code="http_429", message="too many"))
    assert failed.has_failed and not failed.speeches


@pytest.mark.parametrize(
    ("state", "question"),
    [
        ({"messages": [["user", "7 + 8?"]]}, "7 + 8?"),
        ({"messages": [{"type": "human", "data": {"content": "7 + 8?"}}]}, "7 + 8?"),
        ([{"role": "system", "content": "Add."}, {"role": "user", "content": "7 + 8?"}], "7 + 8?"),
        ({"messages": [["user", "7 + 8?"]], "customer": 7}, None),
        ({"messages": [["user", "7"], ["ai", "and?"], ["user", "8"]]}, None),
        ({"messages": []}, None),
        ("7 + 8?", None),
    ],
)
def test_a_state_with_one_users_text_and_nothing_else_asks_it(state: Any, question: str | None) -> None:
    assert question_of(state) == question


@pytest.mark.parametrize("output", ["15", 15, {"total": 15}, [["a", "b"]], {"messages": "15"}, {"messages": []}, []])
def test_an_output_that_is_no_state_is_shown_as_it_is(output: Any) -> None:
    assert final_text(output) == (output if isinstance(output, str) else json.dumps(output))


ODD = (
    {"role": "assistant", "content": None, "refusal": {"why": ["no"]}},
    {"role": "tool", "content": None, "refusal": [1]},
    ["tool", "of a pair"],
    {"role": {"a": 1}, "content": [{"type": "text", "text": ["x"]}, 5, [], {"type": ["tool_use"]}]},
    {"type": "tool_result", "content": {"a": None}, "tool_use_id": ["c"]},
    {"role": "assistant", "tool_calls": [{"id": {"a": 1}, "function": {"name": [1], "arguments": {"b": [2]}}}, 7]},
    {"kwargs": {"role": 5, "content": {}}, "id": [1]},
    {"data": {"content": 5}, "type": []},
)


@pytest.mark.parametrize("odd", ODD)
def test_messages_of_any_shape_are_read_or_left_out(odd: Any) -> None:
    calls = (
        forwarded("chat/completions", {"messages": [odd, USER, odd]}, {"choices": [{"message": odd}]}),
        forwarded("responses", {"instructions": odd, "input": [odd]}, {"output": [odd, odd], "status": odd}),
        forwarded("messages", {"system": odd, "messages": odd}, {"type": "message", "content": [odd], "id": odd}),
        forwarded("chat/completions", {"input": odd}, events({"choices": [{"delta": odd, "finish_reason": "stop"}]})),
    )
    for exchange in read(*calls):
        assert all(isinstance(speech.text, str) and isinstance(speech.who, str) for speech in exchange.speeches)
        assert all(isinstance(tool.name, str) and isinstance(tool.arguments, str) for tool in exchange.tool_calls)
    assert isinstance(final_text({"messages": [odd]}), str)


def test_a_message_of_a_hundred_thousand_calls_and_a_stream_of_as_many_pieces_are_read_at_once() -> None:
    wanted = [{"id": f"c{number}", "function": {"name": "f", "arguments": ""}} for number in range(100_000)]
    pieces = [{"index": 0, "delta": {"type": "input_json_delta", "partial_json": "0" * 20}}] * 100_000
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": "f"}}
    streamed = events({"type": "message_start", "message": {}}, start, *pieces, {"type": "message_stop"})
    before = time.process_time()
    many, _ = read(
        forwarded("chat/completions", {"messages": [USER]}, {"choices": [{"message": {"tool_calls": wanted}}]}),
        forwarded("messages", {"messages": [USER]}, streamed),
    )
    assert len(many.tool_calls) == 100_000 and time.process_time() - before < 20.0
