"""The example trains for a step and leaves as a model file, its agent knows nothing of us, its calculator runs nothing else, and its data is what
its page says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from certified import certified
from gguf_models import smollm2_file
from llama_cpp import running
from teaching import OF_EVERY_OTHER
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import WarmCommand

from lightningrl.loading import load_callable

EXAMPLE = Path(__file__).resolve().parents[1]
SMALL = (
    "loop.steps=1",
    "loop.tasks_per_step=2",
    "loop.group_size=4",
    "validation.tasks=2",
    "learner.warmup_steps=0",
    "learner.learning_rate=1e-4",
    f"rewards.right.use={OF_EVERY_OTHER}",
)


def load(name: str) -> Any:
    return load_callable(name, EXAMPLE)


@pytest.mark.slow
def test_a_model_file_learns_and_answers_in_llama_cpp_as_it_was_trained(tmp_path: Path, warm: WarmCommand) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    train = ("train", str(EXAMPLE), "--run", str(tmp_path / "run"), *settings)
    for words in (
        train,
        ("export", "folder", "--run", "run"),
        ("export", "trained.gguf", "--gguf", "f32", "--run", "run"),
    ):
        ran = warm.run("lightningrl", *words, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["outcome/succeeded"] for line in lines if "outcome/succeeded" in line] == [8]
    certificate = certified(tmp_path / "run", warm)
    assert certificate["trained"] > 0 and certificate["recomputed"] == certificate["tokens"]
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "folder")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 3 plus 4?"}])["input_ids"]
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with running(tmp_path / "trained.gguf") as server:
        theirs = server.logprobs(prompt)
    assert {token: pytest.approx(float(logprobs[token]), abs=2e-3) for token in theirs} == theirs
    with running(smollm2_file()) as server:
        before = server.logprobs(prompt)
    assert max(abs(value - theirs.get(token, -99.0)) for token, value in before.items()) > 0.3


def test_the_files_of_the_tutorial_are_the_examples() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "tutorials" / "small-model.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^```\w+ title=(\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert files == {name: (EXAMPLE / name).read_text(encoding="utf-8") for name in files} and len(files) == 5


def test_the_agent_knows_nothing_of_us() -> None:
    for file in ("agent.py", "calculator.py"):
        assert "lightningrl" not in (EXAMPLE / file).read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("file", ["sums.py", "word_problems.py"])
def test_no_question_of_the_validation_is_trained_on(file: str) -> None:
    trained, held_out = ({task["input"] for task in load(f"{file}:{name}")()} for name in ("train", "validation"))
    assert (len(trained), len(held_out)) == (400, 80)
    assert not trained & held_out


def test_half_of_the_word_problems_held_out_have_sentences_of_their_own() -> None:
    kinds = [task["metadata"]["sentences"] for task in load("word_problems.py:validation")()]
    assert (kinds.count("seen"), kinds.count("unseen")) == (40, 40)


def test_answers_of_sums_are_what_the_calculator_says() -> None:
    calculate, signs = load("calculator.py:calculate"), {"plus": "+", "times": "*"}
    tasks: Iterable[dict[str, str]] = load("sums.py:validation")()
    for task in tasks:
        words = task["input"].removeprefix("What is ").removesuffix("?").split()
        assert task["answer"] == str(calculate(" ".join(signs.get(word, word) for word in words)))


@pytest.mark.parametrize("expression", ["2 ** 9", "True + 1", "__import__('os')", "1 +", "1" * 61, "1 / 2", "1.5 + 1"])
def test_the_calculator_calculates_whole_numbers_and_runs_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"calculated|expression"):
        load("calculator.py:calculate")(expression)


def test_the_prompt_shows_each_action() -> None:
    actions = [
        json.loads(turn["content"])
        for turn in load("agent.py:answer").__globals__["SHOWN"]
        if turn["role"] == "assistant"
    ]
    assert [set(action) for action in actions] == [{"calculate"}, {"answer"}] * 2
