"""Rows become RL's own tokens: prompts are the gateway's, answers end where sampled ones end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, Family, build_tokenizer

from lightningrl.errors import ConfigError
from lightningrl_server.gateway.known_answers import render_answer
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training.tuning.rows import read_rows
from lightningrl_training.tuning.settings import TuneSettings

USER: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_row_has_the_prompt_of_the_gateway_and_an_answer_that_the_policy_may_sample(family: Family) -> None:
    renderer = PolicyRenderer(build_tokenizer(family), name=family.name)
    row = render_answer(renderer, [USER, {"role": "assistant", "content": "good day"}])
    assert row.prompt_ids == renderer.render([USER], None)
    assert row.answer_ids[-1] in renderer.stop_token_ids
    assert not set(row.answer_ids[:-1]) & set(renderer.stop_token_ids)
    read = renderer.parse(row.answer_ids, row.prompt_ids)
    assert read.content.strip() == "good day"
    assert not read.tool_calls


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.write], ids=lambda family: family.name)
def test_a_tool_call_of_a_row_is_read_back_as_that_call(family: Family) -> None:
    renderer = PolicyRenderer(build_tokenizer(family), name=family.name)
    row = render_answer(renderer, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], [TOOL])
    assert row.prompt_ids == renderer.render([USER], [TOOL])
    (call,) = renderer.parse(row.answer_ids, row.prompt_ids).tool_calls
    assert call.name == "weather"
    assert call.arguments in ({"city": "Ulm"}, json.dumps({"city": "Ulm"}))


def test_a_row_that_ends_with_another_turn_is_left_out_and_counted(tmp_path: Path) -> None:
    renderer = PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy")
    path = tmp_path / "sft.jsonl"
    good = [USER, {"role": "assistant", "content": "good day"}]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (good, [USER])))
    read = read_rows(path, "sft", renderer)
    assert len(read.rows) == 1
    ((reason, count),) = read.left_out.items()
    assert "the last message is of role 'user'" in reason
    assert count == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        *(("{", "is no JSON"), ("[]", "is no object"), ("{}", "has 'messages'")),
        ('{"conversations": []}', "become such by `lightningrl import-traces` and `lightningrl curate`"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=f"line 1.* {what}"):
        read_rows(path, "sft", PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy"))


@pytest.mark.parametrize("method", ["dpo", "kto"])
@pytest.mark.parametrize("turns", ["", "aua", "aa", "ata"])
def test_a_side_of_several_turns_is_refused_and_never_compared_by_its_last(
    tmp_path: Path, method: Any, turns: str
) -> None:
    answer = {"role": "assistant", "content": "x"}
    kinds = {"a": answer, "u": USER, "t": {"role": "tool", "content": "x", "tool_call_id": "c"}}
    side = [kinds[turn] for turn in turns]
    row: Any = {"dpo": {"chosen": [answer], "rejected": side}, "kto": {"completion": side, "label": True}}[method]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [USER], **row}) + "\n")
    with pytest.raises(ConfigError, match=rf"line 1: .* has {len(side)} messages, and one answer .* into 'prompt'"):
        read_rows(path, method, PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy"))


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_tools_as_json_text_are_the_tools(tmp_path: Path, method: Any) -> None:
    family = next(family for family in FAMILIES if family.write)
    renderer = PolicyRenderer(build_tokenizer(family), name=family.name)
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    row: Any = {
        "sft": {"messages": [USER, answer]},
        "dpo": {"prompt": [USER], "chosen": [answer], "rejected": [{"role": "assistant", "content": "no"}]},
        "kto": {"prompt": [USER], "completion": [answer], "label": True},
    }[method]
    path = tmp_path / "rows.jsonl"
    forms: list[Any] = [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]]]
    path.write_text("".join(json.dumps({**row, "tools": tools}) + "\n" for tools in forms))
    read = read_rows(path, method, renderer)
    assert not read.left_out
    as_list, *as_others = ([list(answer.context) for answer in row.answers] for row in read.rows)
    assert as_others == [as_list] * 3
    assert as_list[0] == list(renderer.render([USER], [TOOL]))


@pytest.mark.parametrize("tools", ["{", '{"a": 1}', 7])
def test_tools_that_are_none_are_refused(tmp_path: Path, tools: Any) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "x"}], "tools": tools}))
    with pytest.raises(ConfigError, match="line 1: 'tools' is a"):
        read_rows(path, "sft", PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_rows_with_a_byte_order_mark_are_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "sft.jsonl"
    line = json.dumps({"messages": [USER, {"role": "assistant", "content": "grüß"}]}, ensure_ascii=False)
    mark = "\ufeff" if encoding == "utf-16-le" else ""
    path.write_text(f"{mark}{line}\r\n", encoding=encoding)
    assert len(read_rows(path, "sft", PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy")).rows) == 1


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({}, "tune.data is missing"),
        ({"data": "nowhere"}, "no file or folder"),
        ({"data": ".", "method": "x"}, "tune.method"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path: Path, table: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TuneSettings.read(table, tmp_path)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"images": ["a.png"]}, "it has 'images' beside its messages"),
        ({"system": "Be brief."}, "it has 'system' beside its messages"),
        ({"documents": [{"text": "a"}]}, "it has 'documents' beside its messages"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "its chat_template_kwargs are not"),
        ({"enable_thinking": False}, "its chat_template_kwargs are not"),
        ({"weight": 0}, "its author took the answer out"),
        ({"metadata": {"train": False}}, "its author took the answer out"),
        ({"label": False}, "its label is false"),
        ({"no_train": True}, "its author took the answer out"),
        ({"loss_mask": [0, 0]}, "its 'loss_mask' is no mark of a whole message"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "weight": 0.5}]}, "its 'weight' is no mark"),
        ({"reasoning_effort": "none"}, "it has 'reasoning_effort' beside its messages"),
        ({"thinking": {"type": "disabled"}}, "it has 'thinking' beside its messages"),
        ({"think": False}, "it has 'think' beside its messages"),
        ({"tool_choice": "required"}, "it has 'tool_choice' beside its messages"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "the answer is empty"),
    ],
)
def test_a_row_that_says_more_than_its_messages_is_left_out_and_counted(
    tmp_path: Path, more: dict[str, Any], reason: str
) -> None:
    good = {"messages": [USER, {"role": "assistant", "content": "good day"}]}
    rows = [good, {**good, **more}, {**good, "images": [], "system": None, "weight": 1, "source": {"run": "r"}}]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    family = next(family for family in FAMILIES if family.name == "qwen3")
    read = read_rows(path, "sft", PolicyRenderer(build_tokenizer(family), name=family.name))
    assert len(read.rows) == 2 and [text.startswith(reason) for text in read.left_out] == [True]


def test_nulls_that_a_table_fills_in_are_not_learned(tmp_path: Path) -> None:
    properties: Any = {"city": {"type": "string"}, "day": {"type": ["integer", "null"]}, "near": {"type": "object"}}
    properties["near"]["properties"] = {"km": {"type": "number"}}
    plain = {**TOOL["function"], "parameters": {"type": "object", "properties": properties}}
    filled = {**plain, "parameters": {"type": "object", "enum": None, "properties": {**properties, "zip": None}}}
    asked: Any = {"city": "Ulm", "day": None, "zip": None, "near": {"km": None}}
    said: Any = {"city": "Ulm", "day": None, "near": {}}
    rows = [
        {
            "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}],
            "tools": [{"type": "function", "function": tool}],
        }
        for function, tool in (
            ({"name": "weather", "arguments": asked}, filled),
            ({"name": "weather", "arguments": json.dumps(said)}, plain),
        )
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    family = next(family for family in FAMILIES if family.name == "qwen3")
    read = read_rows(path, "sft", PolicyRenderer(build_tokenizer(family), name=family.name))
    first, second = ([[*answer.context, *answer.tokens] for answer in row.answers] for row in read.rows)
    assert first == second


def test_a_line_that_names_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n')
    with pytest.raises(ConfigError, match="line 1 names 'content' twice in one object"):
        read_rows(path, "sft", PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy"))


@pytest.mark.parametrize("spelt", ['{"city": "Ulm"}', '{"city":"Ulm"}'])
def test_a_pair_whose_sides_are_the_same_answer_is_left_out_and_counted(tmp_path: Path, spelt: str) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    same = {**answer, "tool_calls": [{**CALL, "id": "c", "function": {"name": "weather", "arguments": spelt}}]}
    other = {"role": "assistant", "content": "x"}
    path = tmp_path / "dpo.jsonl"
    pairs = [{"prompt": [USER], "chosen": [answer], "rejected": [side], "tools": [TOOL]} for side in (same, other)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    family = next(family for family in FAMILIES if family.name == "qwen3")
    read = read_rows(path, "dpo", PolicyRenderer(build_tokenizer(family), name=family.name))
    (reason,) = read.left_out
    assert len(read.rows) == 1 and reason.startswith("chosen and rejected are the same answer")


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"weight": 0.0}])
def test_an_answer_that_its_author_took_out_is_not_learned(tmp_path: Path, mark: dict[str, Any]) -> None:
    good = {"role": "assistant", "content": "good day"}
    rows = [[USER, good], [USER, {**good, **mark}], [USER, {**good, **mark}, USER, {**good, "weight": 1}]]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    read = read_rows(path, "sft", PolicyRenderer(build_tokenizer(FAMILIES[0]), name="policy"))
    assert len(read.rows) == 2 and read.left_out == {"its author took the answer out (weight 0)": 1}
