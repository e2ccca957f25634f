"""What an evaluation reads: tasks, runs of several policies, and what a provider says of its calls."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import OtherPolicyConfig, OutcomesConfig, PolicyConfig, RewardConfig, TasksConfig
from lightningrl.types import OtherCall, OtherCallKind
from lightningrl_testing.groups import make_trajectory
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.evaluation.examination import Examination, find_candidate
from lightningrl_training.evaluation.result import sample_of
from lightningrl_training.task_files import FORMATS
from lightningrl_training.warm_start.settings import _find_teacher

RECIPE = Recipe(
    agent="agent.py:answer",
    tasks=TasksConfig(train="data.py:train"),
    policy=PolicyConfig(model="m"),
    policies={"qwen2.5": OtherPolicyConfig(model="n")},
    rewards={"right": RewardConfig(use="reward.py:right")},
)


def test_a_line_of_tasks_ends_at_its_newline_and_at_no_other_character(tmp_path: Path) -> None:
    inputs = ["from a page:\u2028next line", "and\u0085another", "plain"]
    lines = [json.dumps({"id": str(number), "input": text}, ensure_ascii=False) for number, text in enumerate(inputs)]
    (tmp_path / "tasks.jsonl").write_bytes("\r\n".join([*lines, ""]).encode())
    tasks = Examination(tasks=str(tmp_path / "tasks.jsonl")).choose(RECIPE, cast("Any", None))
    assert sorted(task.input for task in tasks) == sorted(inputs)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", '{"tasks": [{"input": "1"}]}', "tasks.eval: '{path}' holds a dict, not a list of tasks; {formats}"),
        (
            "a.jsonl",
            '{"input": "1"}\n\n{"input": ',
            "tasks.eval: line 3 of '{path}' is no JSON (Expecting value); {formats}",
        ),
        ("a.jsonl", None, "tasks.eval: '{path}' is not there; {formats}"),
        ("", None, "'{path}' cannot be read as tasks; {formats}"),
    ],
)
def test_a_file_that_holds_no_tasks_is_refused_with_its_line_and_nothing_is_taken_for_one(
    tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    """All that is refused: test_task_files.py."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        Examination(tasks=str(path)).choose(RECIPE, cast("Any", None))
    assert str(caught.value) == sentence.format(path=path, formats=FORMATS)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused_before_anything_runs(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature is .*; give 0 \(greedy\) or more"):
        Examination(temperature=temperature)


def test_a_run_whose_policy_has_a_dot_in_its_name_can_be_evaluated(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    (saved / "loop.json").write_text(json.dumps(asdict(LoopState(step=1, seconds=1.0, rollouts=1))), encoding="utf-8")
    (tmp_path / "recipe.json").write_text(RECIPE.frozen_text(), encoding="utf-8")
    (tmp_path / "run.json").write_text(
        json.dumps({"models": {"policy": "there/m", "qwen2.5": "there/n"}}), encoding="utf-8"
    )
    found = find_candidate(str(tmp_path), None).recipe
    assert (found.policy.model, found.policies["qwen2.5"].model) == ("there/m", "there/n")


@pytest.mark.parametrize("place", ["0", "base"])
@pytest.mark.parametrize("kept", [[], [5, 10]])
def test_the_starting_model_can_be_evaluated_whatever_checkpoints_are_kept(
    tmp_path: Path, place: str, kept: list[int]
) -> None:
    for step in kept:
        saved = tmp_path / "checkpoints" / f"step-{step:06d}"
        saved.mkdir(parents=True)
        (saved / "loop.json").write_text(json.dumps(asdict(LoopState(step=step, seconds=1.0, rollouts=1))))
    (tmp_path / "recipe.json").write_text(RECIPE.frozen_text(), encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps({"models": {"policy": "there/m", "qwen2.5": "there/n"}}))
    found = find_candidate(f"{tmp_path}@{place}", None)
    assert (found.name, found.checkpoint, found.run) == (f"{tmp_path} after step 0", None, tmp_path)
    assert found.recipe.policy.model == "there/m"


@pytest.mark.parametrize(
    "teacher",
    [
        "m@https://h.example/v1?key=sk-sesame123",
        "m@https://h.example/v1?api-key=sk-sesame123",
        "m@https://me:sk-sesame123@h.example/v1",
        "org/m@https://sk-sesame123@h.example/v1",
    ],
)
def test_an_address_with_a_secret_is_one_sentence_that_does_not_tell_it(tmp_path: Path, teacher: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_candidate(teacher, RECIPE)
    with pytest.raises(ConfigError, match=r"warm_start\.teacher: ") as of_table:
        _find_teacher(teacher, None, RECIPE)
    for error in (caught, of_table):
        (sentence,) = error.value.args
        assert "sesame" not in sentence and "\n" not in sentence


STREAMS = tuple(
    "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    for events in (
        (
            {"choices": [{"index": 0, "delta": {"content": "42"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 5}},
        ),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 30, "output_tokens": 5}}},),
        (
            {"type": "message_start", "message": {"usage": {"input_tokens": 30, "output_tokens": 1}}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
            {"type": "message_stop"},
        ),
    )
)


def test_a_refused_call_and_an_embedding_leave_the_tokens_of_a_rollout_known() -> None:
    answered = OtherCall(
        kind=OtherCallKind.FORWARDED,
        path="chat/completions",
        status=200,
        answer={"usage": {"prompt_tokens": 30, "completion_tokens": 5}},
    )
    refused = replace(answered, status=429, code="http_429", answer={"error": {"message": "slow down"}})
    embedding = replace(answered, path="embeddings", answer={"usage": {"prompt_tokens": 7, "total_tokens": 7}})
    unsaid = replace(answered, answer="data: [DONE]")

    def tokens(*calls: OtherCall) -> tuple[int | None, int | None]:
        sample = sample_of(replace(make_trajectory("a", []), other_calls=calls), OutcomesConfig())
        return sample.prompt_tokens, sample.completion_tokens

    assert tokens(answered, refused) == (30, 5)
    assert tokens(answered, embedding) == (37, 5)
    assert tokens(answered, unsaid) == (None, None), "a provider that does not say"
    for stream in STREAMS:
        assert tokens(replace(answered, answer=stream)) == (30, 5), "nor does it matter that an answer was streamed"
