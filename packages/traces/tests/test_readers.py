"""Readers of traces: what they know, do not know and say; whose branch a line is of; which score is the reward."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from planted_traces import TOOL, Ids, openinference, otlp_export, span, write_lines
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.conventions import parse_attribute
from lightningrl.errors import ConfigError, LightningError
from lightningrl.plugins import load_plugins
from lightningrl.records import RolloutFilter
from lightningrl.tool_schemas import canonical
from lightningrl.types import Trajectory
from lightningrl_runs.foreign.bodies import join_events, read_request, read_response, tools_beside
from lightningrl_runs.foreign.messages import read_message, read_messages
from lightningrl_runs.reader import open_run
from lightningrl_traces.curation.curation import curate
from lightningrl_traces.curation.rules import Rules
from lightningrl_traces.grades import Grade, grade_call
from lightningrl_traces.importers.claude_code import ClaudeCodeImporter
from lightningrl_traces.importers.codex import CodexImporter
from lightningrl_traces.importers.otlp import OtlpImporter
from lightningrl_traces.importing import import_traces
from lightningrl_traces.joins import join_records
from lightningrl_traces.records import Call, Span
from lightningrl_traces.spans import read_genai


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def says(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def use(call_id: str, name: str = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"q": 1}'}}


def read(folder: Path) -> list[Trajectory]:
    async def ask() -> list[Trajectory]:
        async with open_run(folder) as run:
            records = await run.list_rollouts(RolloutFilter(limit=1000))
            return list(await run.look.trajectories([record.id for record in records]))

    return asyncio.run(ask())


@pytest.mark.parametrize("calls", ["tool_calls", "additional_kwargs"])
def test_a_call_that_parts_and_keys_of_a_message_tell_is_there_once(calls: str) -> None:
    parts = [
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"q": 1}},
    ]
    listed: Any = [use("toolu_1"), use("toolu_2")]
    more = {calls: listed if calls == "tool_calls" else {"tool_calls": listed}}
    (message,) = read_message({"role": "assistant", "content": parts, **more}, set())
    assert [call["id"] for call in message["tool_calls"]] == ["toolu_1", "toolu_2"]
    (old,) = read_message(says(None, tool_calls=[use("a")], function_call={**use("")["function"]}), set())
    assert [call["id"] for call in old["tool_calls"]] == ["a"], "a key that tells no id"
    item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}"}
    output = [item, dict(item), {**item, "call_id": "call_2"}]
    merged = read_response({"output": output}, set())["answer"]["tool_calls"]
    assert [call["id"] for call in merged] == ["call_1", "call_2"]
    twins = [{**use(""), "function": {"name": "look", "arguments": "{}"}}] * 2
    assert len(read_message(says(None, tool_calls=twins), set())[0]["tool_calls"]) == 2, "two calls that have no ids"


@pytest.mark.parametrize(
    "key", ["reasoning_content", "reasoning", "reasoning_text", "thinking", "reasoning_details", "thinking_blocks"]
)
def test_thoughts_are_read_under_each_name_that_the_gateway_reads(key: str) -> None:
    value: Any = [{"type": "thinking", "text": "because"}] if key.endswith(("details", "blocks")) else "because"
    beside = ("additional_kwargs", "provider_specific_fields")
    for item in (says("x", **{key: value}), *(says("x", **{side: {key: value}}) for side in beside)):
        assert read_message(item, set()) == [says("x", reasoning_content="because")]


def test_a_streamed_answer_keeps_its_thoughts_and_its_call_of_2023() -> None:
    deltas = [{"reasoning_text": "be"}, {"reasoning_text": "cause"}, {"function_call": {"name": "look"}}]
    deltas += [{"function_call": {"arguments": "{}"}}]
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "function_call"}]})
    body = join_events("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))
    assert body is not None
    message = body["choices"][0]["message"]
    assert message["reasoning_text"] == "because" and message["tool_calls"][0]["function"]["name"] == "look"


def test_a_function_call_of_2023_is_a_call_with_its_result() -> None:
    asks = says(None, function_call={"name": "look", "arguments": '{"q": 1}'})
    result = {"role": "function", "name": "look", "content": "sunny"}
    messages = read_messages([user("weather?"), asks, result, says("It is sunny")], set())
    assert messages is not None and [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] != ""
    (alone,) = read_message(asks, set())
    assert alone["tool_calls"] == messages[1]["tool_calls"], "the answer is the one of the later history"


@pytest.mark.parametrize(
    "messages",
    [
        [user("a", channel="final"), says("b")],
        [user("a"), says("b", recipient="browser")],
        [user("a"), says("b", additional_kwargs={"plan": ["c"]})],
        [{"role": "critic", "content": "a"}, says("b")],
        [user("a"), {"type": "web_search_call", "action": {"q": "x"}}, says("b")],
        [user("a"), says("b", weight=0.5)],
        [user("a"), says("b", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])],
        [user("a"), says("b", tool_calls="look()")],
    ],
)
def test_a_key_or_a_form_that_no_reader_knows_is_told_and_lowers_the_grade(messages: list[Any]) -> None:
    notes: set[str] = set()
    prompt = read_messages(messages, notes)
    assert prompt is not None
    call = Call(id="c", trace_id="t", messages=prompt[:-1] or prompt, answer=prompt[-1], finish_reason="stop")
    assert grade_call(call).grade is Grade.SFT
    graded = grade_call(Call(**{**{n: getattr(call, n) for n in call.__slots__}, "notes": tuple(notes)}))
    assert graded.grade is Grade.JUDGE and any(reason.startswith("not read: ") for reason in graded.reasons)


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"previous_response_id": "resp_1"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"extra_body": {"enable_thinking": False}},
        {"think": False},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"extra_body": {"reasoning": {"enabled": False}}},
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        {"instructions": "Be brief."},
        {"input": [user("b")]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"extra_body": {"guided_json": {"type": "object"}}},
        {"tool_choice": {"function": {"name": "look"}}},
        {"something_new": 1},
    ],
)
def test_what_a_request_asks_beside_its_messages_is_told_where_it_is_not_kept(more: dict[str, Any]) -> None:
    notes: set[str] = set()
    read_request({"messages": [user("a")], **more}, notes)
    assert len(notes) == 1 and next(iter(notes)).startswith("not read: ")


def test_what_says_nothing_is_no_note() -> None:
    notes: set[str] = set()
    body = {
        "messages": [user("a", name=None, cache_control={"type": "ephemeral"})],
        "tool_choice": "auto",
        "stream": True,
    }
    read_request({**body, "response_format": {"type": "text"}, "text": {"verbosity": "low"}, "user": "u"}, notes)
    read_request({**body, "input": "a", "reasoning_effort": "high", "thinking": {"type": "enabled"}}, notes)
    read_request({**body, "reasoning": {"effort": None, "summary": "auto"}, "thinking": None}, notes)
    read_message(
        says("x", refusal=None, annotations=[], audio=None, function_call=None, response_metadata={"a": 1}), notes
    )
    assert notes == set()


def test_a_message_is_read_as_the_gateway_reads_it_and_whichever_of_its_keys_are_filled() -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert read_message(user(parts), set()) == [user("A\nB")]
    cited = [parts[0], {**parts[1], "citations": [{"title": "c"}]}]
    assert read_message(says(cited), set()) == [says("AB")]
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no such file", "is_error": True}
    assert read_message(user([failed]), set())[0]["content"] == "Error: no such file"
    filled: dict[str, Any] = {"role": "assistant", "from": None, "value": None, "parts": [], "content": "x"}
    assert read_message(filled, set()) == [says("x")]
    assert read_message({"from": "gpt", "content": None, "value": "x"}, set()) == [says("x")]
    (asks,) = read_message(says(None, tool_calls=json.dumps([use("c")])), set())
    assert asks["tool_calls"] == [use("c")], "a column of JSON"
    thoughts = [{"type": "reasoning", "content": [{"text": text}]} for text in ("first", "second")]
    (turn,) = read_request({"input": [*thoughts, says("x")]}, set())["messages"]
    assert turn["reasoning_content"] == "first\nsecond"


def test_the_first_choice_by_its_index_is_the_answer() -> None:
    choices: list[Any] = [{"index": 1, "message": says("b"), "finish_reason": "length", "token_ids": [2]}]
    choices += [{"index": 0, "message": says("a"), "finish_reason": "stop", "token_ids": [1]}]
    read_as = read_response({"choices": choices}, set())
    assert read_as == {"answer": says("a"), "finish_reason": "stop", "completion_ids": [1]}
    assert read_response({"choices": [{"text": "c"}]}, set())["answer"] == says("c"), "of one that tells none"


def test_messages_that_a_table_leaves_empty_hide_no_input() -> None:
    fields = read_request({"messages": None, "input": "a", "instructions": "Be brief."}, set())
    assert fields["messages"] == [{"role": "system", "content": "Be brief."}, user("a")]


@pytest.mark.parametrize(
    "settings",
    [
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"extra_body": {"enable_thinking": False}},
        {"logit_bias": {"5": -100}},
    ],
)
def test_settings_beside_a_call_that_change_its_prompt_or_answer_are_told(settings: dict[str, Any]) -> None:
    notes: set[str] = set()
    tools_beside(settings, notes)
    assert len(notes) == 1 and next(iter(notes)).startswith("not read: ")


def test_a_span_tells_what_switches_thinking_off_and_an_answer_has_its_own_reason() -> None:
    outputs = [
        {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": reason}
        for text, reason in (("a", "length"), ("b", "stop"))
    ]
    asked = [{"role": "user", "parts": [{"type": "text", "content": "q"}]}]
    attributes = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(outputs)}
    attributes |= {"gen_ai.operation.name": "chat", "gen_ai.request.reasoning_effort": "none"}
    notes: set[str] = set()
    fields = read_genai(Span(trace_id="t", span_id="s", attributes=attributes), (), notes)
    assert (fields["answer"], fields["finish_reason"]) == (says("b"), "stop")
    assert notes == {"not read: reasoning_effort"}


def test_a_step_that_switches_thinking_off_is_told(tmp_path: Path) -> None:
    steps: list[Any] = [{"step_id": 1, "source": "user", "message": "a"}]
    steps.append({"step_id": 2, "source": "agent", "message": "b", "reasoning_effort": "none"})
    (tmp_path / "x.json").write_text(
        json.dumps({"schema_version": "ATIF-v1.4", "agent": {"name": "x"}, "steps": steps})
    )
    report = import_traces(tmp_path / "x.json", tmp_path / "run", None, load_plugins())
    assert ("judge-only", "not read: reasoning_effort") in report.reasons


def test_of_a_batch_of_prompts_the_first_is_read_and_the_others_are_told() -> None:
    notes: set[str] = set()
    assert read_messages([[user("a")], [user("b")]], notes) == [user("a")]
    assert notes == {"not read: a batch of 2 prompts"}


def test_a_system_prompt_in_parts_and_functions_of_2023_are_read() -> None:
    body = {"system": [{"type": "text", "text": "Be brief."}], "messages": [user("a")], "functions": [TOOL["function"]]}
    fields = read_request(body, set())
    assert fields["messages"][0] == {"role": "system", "content": "Be brief."}
    assert fields["tools"][0]["function"]["name"] == "lookup"
    schema = {"type": "object"}
    for key in ("parameters", "input_schema", "inputSchema", "args_schema"):
        (tool,) = read_request({"messages": [user("a")], "tools": [{"name": "look", key: schema}]}, set())["tools"]
        assert tool["function"]["parameters"] == schema


@pytest.mark.parametrize(
    "mark",
    [
        *({"weight": 0}, {"weight": 0.0}, {"weight": -1}, {"train": False}, {"training": False}, {"loss": "no"}),
        *({"loss_mask": 0}, {"train_on_turn": False}, {"metadata": {"weight": 0}}),
        *({"no_train": True}, {"exclude_from_training": 1}, {"skip-loss": "yes"}),
    ],
)
def test_an_answer_that_its_author_takes_out_is_context_and_no_row(tmp_path: Path, mark: dict[str, Any]) -> None:
    write_lines(
        tmp_path / "rows.jsonl", [{"messages": [user("a"), says("BAD", **mark), user("b"), says("GOOD", weight=1)]}]
    )
    import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    asyncio.run(curate([tmp_path / "run"], tmp_path / "rows", Rules()))
    (row,) = [json.loads(line) for line in (tmp_path / "rows" / "sft.jsonl").read_text().splitlines()]
    assert [message["content"] for message in row["messages"]] == ["a", "BAD", "b", "GOOD"]
    assert row["messages"][1]["weight"] == 0, "and whoever trains on each answer of a row is told"
    graded = grade_call(
        Call(id="c", trace_id="t", messages=[user("a")], answer=says("BAD", weight=0), finish_reason="stop")
    )
    assert graded.grade is Grade.JUDGE and "marked as not to be trained on" in graded.reasons


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [user("a")], "completion": [says("BAD")], "label": False}, "marked as not to be trained on"),
        ({"messages": [user("a"), says("BAD")], "weight": 0}, "marked as not to be trained on"),
        ({"messages": [user("a"), says("BAD")], "loss_mask": [0, 0]}, "not read: loss_mask"),
        ({"messages": [user("a"), says("BAD")], "weights": [1, 0]}, "not read: weights"),
        (
            {"prompt": [user("a"), says("b"), user("c")], "chosen": [says("d")], "rejected": [says("e")]},
            "not read: chosen",
        ),
        ({"messages": [user("a"), says("b")], "images": ["a.png"]}, "not read: images"),
        ({"messages": [user("a", **{"a\u2028b": 1}), says("b")]}, "not read: a\u2028b"),
        ({"messages": [user("a"), says("b")], "enable_thinking": False}, "not read: enable_thinking"),
        ({"messages": [user("a"), says("b")], "reasoning_effort": "none"}, "not read: reasoning_effort"),
        ({"messages": [user("a"), says("b")], "thinking": {"type": "disabled"}}, "not read: thinking"),
        (
            {"messages": [{"role": "system", "content": "x"}, user("a"), says("b")], "instructions": "y"},
            "not read: instructions",
        ),
        ({"messages": [user("a"), says("b")], "tools": [{"type": "web_search"}]}, "not read: tools"),
        ({"messages": [user("a"), says("b")], "tools": "look(q)"}, "not read: tools"),
        ({"messages": [user("a"), says("b")], "stop_reason": "max_tokens"}, "the answer was cut off"),
        ({"messages": [user("a"), says("b", finish_reason="length")]}, "the answer was cut off"),
    ],
)
def test_what_a_row_says_beside_its_messages_lowers_the_grade_of_its_answers(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    write_lines(tmp_path / "rows.jsonl", [row])
    report = import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    assert dict(report.grades) == {"judge-only": 1} and ("judge-only", reason) in report.reasons


@pytest.mark.parametrize(
    ("row", "reward"),
    [({"reward": None, "score": 1}, 1.0), ({"reward": "0.5"}, 0.5), ({"reward": True}, 1.0), ({"reward": None}, None)],
)
def test_a_row_of_a_table_is_read_by_the_columns_that_are_filled(
    tmp_path: Path, row: dict[str, Any], reward: float | None
) -> None:
    dialogue: dict[str, Any] = {"messages": None, "prompt": [user("a")], "completion": [says("b")], "label": True}
    write_lines(tmp_path / "rows.jsonl", [{**dialogue, "system_prompt": "Be brief.", **row}])
    report = import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    assert dict(report.grades) == {"sft-safe": 1}
    (trajectory,) = read(tmp_path / "run")
    assert trajectory.other_calls[0].request["messages"] == [{"role": "system", "content": "Be brief."}, user("a")]
    assert trajectory.reward == reward


def test_rows_of_one_id_and_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder, answers in (("a", ("x", "y")), ("b", ("z",))):
        (tmp_path / "data" / folder).mkdir(parents=True)
        rows = [{"id": "q1", "messages": [user("a"), says(text)], "reward": ord(text)} for text in answers]
        write_lines(tmp_path / "data" / folder / "rows.jsonl", rows)
    report = import_traces(tmp_path / "data", tmp_path / "run", None, load_plugins())
    assert report.rollouts == 3 and not report.facts
    assert {trajectory.output: trajectory.reward for trajectory in read(tmp_path / "run")} == {
        text: ord(text) for text in "xyz"
    }


def test_a_rollout_that_several_rows_tell_is_one_with_all_its_answers(tmp_path: Path) -> None:
    first = [user("a"), says("x")]
    dialogues = [first, [*first, user("b"), says("y")], [user("c"), says("z")]]
    write_lines(tmp_path / "rows.jsonl", [{"rollout_id": "r", "messages": dialogue} for dialogue in dialogues])
    report = import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    assert report.rollouts == 1 and dict(report.grades) == {"sft-safe": 3}


def test_nulls_that_a_table_fills_into_a_rows_calls_and_tools_are_no_part_of_them(tmp_path: Path) -> None:
    function = {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "integer"}, "zip": None}}}
    asks = says(None, tool_calls=[{**use("c"), "function": {"name": "look", "arguments": {"q": 1, "zip": None}}}])
    row = {"messages": [user("a"), asks], "tools": [{"type": "function", "function": function}]}
    write_lines(tmp_path / "rows.jsonl", [row])
    import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    (trajectory,) = read(tmp_path / "run")
    (call,) = trajectory.other_calls
    assert call.answer["choices"][0]["message"]["tool_calls"] == [use("c")]
    assert call.request["tools"][0]["function"]["parameters"]["properties"] == {"q": {"type": "integer"}}


def test_rows_of_sharegpt_and_a_system_prompt_beside_the_messages_are_read(tmp_path: Path) -> None:
    row = {"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    write_lines(tmp_path / "rows.jsonl", [row])
    report = import_traces(tmp_path / "rows.jsonl", tmp_path / "run", None, load_plugins())
    assert dict(report.grades) == {"sft-safe": 1}
    (trajectory,) = read(tmp_path / "run")
    assert [m["content"] for m in trajectory.other_calls[0].request["messages"]] == ["Be brief.", "a"]


# ---------------------------------------------------------------------- scores


def langfuse(number: int, scores: list[dict[str, Any]]) -> dict[str, Any]:
    generation = {"id": f"g{number}", "type": "GENERATION", "input": [user("a")], "output": says("b"), "model": "m"}
    return {"id": f"t{number}", "observations": [generation], "scores": scores}


def test_tools_among_the_settings_of_a_call_were_offered(tmp_path: Path) -> None:
    trace = langfuse(0, [])
    trace["observations"][0]["modelParameters"] = {"tools": json.dumps([TOOL])}
    (tmp_path / "langfuse.json").write_text(json.dumps([trace]))
    values = openinference([user("a")], says("b"), "stop", tools=False, with_bodies=False)
    values["llm.invocation_parameters"] = json.dumps({"functions": [TOOL["function"]]})
    (tmp_path / "otlp.json").write_text(json.dumps(otlp_export([span(Ids(0), 0, values)], [])))
    for source in ("langfuse.json", "otlp.json"):
        import_traces(tmp_path / source, tmp_path / source.partition(".")[0], None, load_plugins())
        (trajectory,) = read(tmp_path / source.partition(".")[0])
        assert [tool["function"]["name"] for tool in trajectory.other_calls[0].request["tools"]] == ["lookup"]


CORRECT = {"name": "correct", "value": 1, "dataType": "BOOLEAN"}
LATENCY = {"name": "latency_ms", "value": 1530.0}
TOXICITY = {"name": "toxicity", "value": 0.9, "observationId": "g0"}


@pytest.mark.parametrize(
    ("scores", "asked", "reward"),
    [
        ([CORRECT, LATENCY, TOXICITY], None, None),
        ([CORRECT, LATENCY, TOXICITY], "correct", 1.0),
        ([CORRECT, LATENCY, TOXICITY], "toxicity", 0.9),
        ([CORRECT], None, 1.0),
        ([CORRECT, TOXICITY], None, None),
        ([TOXICITY], None, None),
        ([CORRECT, {**CORRECT, "value": 0}], None, None),
        ([{**LATENCY, "value": 0, "dataType": "CATEGORICAL", "stringValue": "fast"}], None, None),
    ],
)
def test_the_reward_is_one_score_that_stands_alone_or_is_named(
    tmp_path: Path, scores: list[Any], asked: str | None, reward: float | None
) -> None:
    (tmp_path / "x.json").write_text(json.dumps([langfuse(0, scores)]))
    report = import_traces(tmp_path / "x.json", tmp_path / "run", None, load_plugins(), asked)
    (trajectory,) = read(tmp_path / "run")
    assert trajectory.reward == reward
    assert set(report.scores) >= {score["name"] for score in scores if score in (LATENCY, TOXICITY)}


def test_a_score_that_stands_alone_in_one_trace_is_no_reward_beside_another_score_of_another(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([langfuse(0, [CORRECT]), langfuse(1, [LATENCY])]))
    told = CliRunner().invoke(app, ["import-traces", str(tmp_path / "x.json"), "--into", str(tmp_path / "run")])
    assert "name one with --reward NAME; there are: correct, latency_ms" in told.output.replace("\n", " ")
    assert {trajectory.reward for trajectory in read(tmp_path / "run")} == {None}
    with pytest.raises(ConfigError, match="no score is named 'right'; there are: correct, latency_ms"):
        import_traces(tmp_path / "x.json", tmp_path / "other", None, load_plugins(), "right")


# ---------------------------------------------------------------------- trees


def line(uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    kind = "user" if uuid.startswith(("u", "r")) else "assistant"
    message = {"role": kind, "content": content, **({"id": f"msg_{uuid}", "model": "m"} if kind == "assistant" else {})}
    message |= more.pop("message", {})
    return {"type": kind, "sessionId": "s", "uuid": uuid, "parentUuid": parent, "message": message, **more}


def prompts(tmp_path: Path, lines: list[Any]) -> dict[str, list[str]]:
    write_lines(tmp_path / "s.jsonl", lines)
    calls = [record for record in ClaudeCodeImporter().read(tmp_path / "s.jsonl") if isinstance(record, Call)]
    return {call.id: [str(message["content"]) for message in call.messages or ()] for call in calls}


def test_what_a_rewind_took_back_is_in_no_later_prompt(tmp_path: Path) -> None:
    lines = [line("u1", None, "Q1"), line("a1", "u1", "A1"), line("u2", "a1", "TAKEN BACK"), line("a2", "u2", "A2")]
    lines += [line("u3", "a1", "Q3"), line("a3", "u3", "A3")]
    assert prompts(tmp_path, lines)["msg_a3"] == ["Q1", "A1", "Q3"]


def test_a_history_that_is_written_again_is_there_once(tmp_path: Path) -> None:
    begin = [line("u1", None, "Q1"), line("a1", "u1", "A1")]
    told = prompts(tmp_path, [*begin, *begin, line("u2", "a1", "Q2"), line("a2", "u2", "A2")])
    assert told == {"msg_a1": ["Q1"], "msg_a2": ["Q1", "A1", "Q2"]}


def test_a_history_copied_under_new_ids_and_a_resumed_session_are_one_tree(tmp_path: Path) -> None:
    same = {"message": {"id": "msg_a1"}}
    text = [{"type": "text", "text": "A1"}]
    copied = [line("u1", None, "Q1"), line("a1", "u1", text), line("u1b", None, "Q1"), line("a1b", "u1b", text, **same)]
    asked = prompts(tmp_path, [*copied, line("u2", "a1b", "Q2"), line("a2", "u2", "A2")])
    assert asked["msg_a2"] == ["Q1", "A1", "Q2"]
    more = {"sessionId": "resumed"}
    asked = prompts(tmp_path, [*copied[:2], line("u2", "a1", "Q2", **more), line("a2", "u2", "A2", **more)])
    assert asked["msg_a2"] == ["Q1", "A1", "Q2"]


def test_an_error_in_the_models_place_is_no_answer(tmp_path: Path) -> None:
    error = line("a1", "u1", "API Error: 529", message={"model": "<synthetic>"}, isApiErrorMessage=True)
    told = prompts(tmp_path, [line("u1", None, "Q1"), error, line("u2", "a1", "continue"), line("a2", "u2", "A2")])
    assert told == {"msg_a2": ["Q1", "continue"]}


def test_results_of_parallel_calls_are_all_in_the_next_prompt(tmp_path: Path) -> None:
    asks = [{"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {}} for number in (1, 2)]
    results = [[{"type": "tool_result", "tool_use_id": f"t{number}", "content": f"R{number}"}] for number in (1, 2)]
    same = {"message": {"id": "msg_a"}}
    lines = [line("u1", None, "Q1"), line("a1", "u1", [asks[0]], **same), line("a2", "a1", [asks[1]], **same)]
    hook = {"type": "system", "sessionId": "s", "uuid": "h", "parentUuid": "r2"}
    lines += [line("r1", "a1", results[0]), line("r2", "a2", results[1]), hook, line("a3", "h", "A3")]
    assert prompts(tmp_path, lines)["msg_a3"] == ["Q1", "None", "R1", "R2"]


def test_codex_sessions_are_rolled_back_and_compacted(tmp_path: Path) -> None:
    def item(role: str, text: str) -> dict[str, Any]:
        kind = "input_text" if role == "user" else "output_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def rows(*payloads: tuple[str, dict[str, Any]]) -> list[Any]:
        return [{"type": kind, "payload": payload} for kind, payload in payloads]

    said = [("response_item", item("user", "Q1")), ("response_item", item("assistant", "A1"))]
    said += [("response_item", item("user", "BACK")), ("response_item", item("assistant", "A2"))]
    said += [("event_msg", {"type": "thread_rolled_back", "num_turns": 1}), ("response_item", item("user", "Q3"))]
    said += [("response_item", item("assistant", "A3")), ("compacted", {"message": "In short."})]
    said += [("response_item", item("user", "Q4")), ("response_item", item("assistant", "A4"))]
    write_lines(tmp_path / "rollout.jsonl", rows(("session_meta", {"id": "x"}), *said))
    calls = [record for record in CodexImporter().read(tmp_path / "rollout.jsonl") if isinstance(record, Call)]
    asked = [[message["content"] for message in call.messages or ()] for call in calls]
    assert asked == [["Q1"], ["Q1", "A1", "BACK"], ["Q1", "A1", "Q3"], ["In short.", "Q4"]]


# ---------------------------------------------------------------------- what grows


def spans_of(count: int, *, nested: bool) -> list[Any]:
    """Spans of model calls in one trace: each around the next, or beside each other."""
    ids = Ids(1)
    return [
        span(
            ids,
            place,
            openinference([user(f"Q{place}")], says(f"A{place}"), "stop"),
            parent=place - 1 if nested else None,
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("nested", [True, False])
def test_calls_of_one_trace_are_joined_in_time_that_grows_with_their_number(tmp_path: Path, nested: bool) -> None:
    seconds = []
    for count in (200, 1600):
        write_lines(tmp_path / f"{count}.json", [otlp_export(spans_of(count, nested=nested), ())])
        records = list(OtlpImporter().read(tmp_path / f"{count}.json"))
        before = time.process_time()
        rollout = join_records("r", records)
        seconds.append(time.process_time() - before)
        assert len(rollout.calls) == count
    assert seconds[1] < 24 * seconds[0] + 0.5, "eight times the calls; a quadratic join takes 64 times as long"


@pytest.mark.parametrize(
    "text",
    [
        '{"resourceSpans":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"resourceSpans":' + "[" * 100_000,
        '{"data":' + '[{"a":' * 50_000,
        '[{"observations":[],"type":"x","a":"\\"[[", "b":' + "[" * 100_000,
        '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"1","attributes":[{"key":"a","value":'
        + '{"kvlistValue":{"values":[{"key":"a","value":' * 3000
        + "null"
        + "}]}}" * 3000
        + "}]}]}]}]}",
    ],
)
@pytest.mark.parametrize("form", [None, "otlp", "langfuse"])
def test_a_file_that_is_nested_without_end_is_refused_in_a_sentence_and_little_memory(
    tmp_path: Path, text: str, form: str | None
) -> None:
    (tmp_path / "deep.json").write_text(text)
    tracemalloc.start()
    with pytest.raises(LightningError, match=r"nothing is imported|of no format that an importer knows"):
        import_traces(tmp_path / "deep.json", tmp_path / "run", form, load_plugins())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * 2**20
    assert [path.name for path in tmp_path.iterdir()] == ["deep.json"]


@pytest.mark.parametrize("form", ["lines", "list", "key", "one"])
def test_an_object_that_names_a_key_twice_is_refused_for_the_first_value_would_be_lost(
    tmp_path: Path, form: str
) -> None:
    row = '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", "content": "c"}]}'
    text = {"lines": f"{row}\n{row}\n", "list": f"[{row}]", "key": f'{{"data": [{row}]}}', "one": f"{{\n{row[1:]}"}
    (tmp_path / "rows.json").write_text(text[form])
    with pytest.raises(ConfigError, match="names 'content' twice in one object; nothing is imported"):
        import_traces(tmp_path / "rows.json", tmp_path / "run", None, load_plugins())


def test_brackets_in_texts_are_no_depth(tmp_path: Path) -> None:
    text = "[{" * 40_000 + '\\"' * 3 + "\\"
    row = {"messages": [user(text), says("b" * 70_000 + "\\\\" + "[" * 70_000)]}
    (tmp_path / "rows.json").write_text(json.dumps([row, row], indent=1))
    import_traces(tmp_path / "rows.json", tmp_path / "run", None, load_plugins())
    assert read(tmp_path / "run")[0].other_calls[0].request["messages"] == row["messages"][:1]


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def _field(number: int, inside: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(inside)) + inside


_EMPTY = b",".join([b"[]"] * 6_000_000)
BOMBS = {
    "whole.json": b'{"resourceSpans":' + b"\n" + b"[" + _EMPTY + b"]}",
    "line.jsonl": b'{"a": 1}\n{"x":[' + _EMPTY + b"]}\n",
    "list.json": b'[{"x":[' + _EMPTY + b"]}]",
    "below.json": b'{"observations":[{"x":[' + _EMPTY + b"]}]}",
    "spans.otlp": _field(
        1, _field(2, _field(2, b"\n\x10" + b"t" * 16 + b"\x12\x08" + b"s" * 8 + b"\x4a\x00" * 6_000_000))
    ),
}
IMPORTED = """
import resource, sys, time
from pathlib import Path
from lightningrl.errors import LightningError
from lightningrl.plugins import load_plugins
from lightningrl_traces.importing import import_traces

resource.setrlimit(resource.RLIMIT_DATA, (1_200 * 2**20,) * 2)
try:
    import_traces(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] or None, load_plugins())
except LightningError as error:
    print(error)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_of_a_few_kilobytes_takes_no_gigabytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(BOMBS[name]))
    assert path.stat().st_size < 60_000
    form = "otlp" if name in ("whole.json", "spans.otlp") else "langfuse"
    command = [sys.executable, "-c", IMPORTED, str(path), str(tmp_path / "run"), form]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "more than" in ended.stdout, ended.stderr[-2000:]


def test_json_in_a_text_is_bounded_too() -> None:
    before = time.process_time()
    assert parse_attribute("[" + "[]," * 2_000_000 + "[]]") is None
    assert canonical("[" + "[]," * 2_000_000 + "[]]")[:3] == "[[]" and time.process_time() - before < 2.0
    assert parse_attribute("[" * 300 + "]" * 300) is not None
