"""The tasks of reasoning-gym stay as they are, none is in both files, each gold answer is rewarded, and the generator makes them again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightningrl.loading import load_callable

EXAMPLE = Path(__file__).resolve().parents[1]
DIGESTS = {
    "train": "3667d4c9a6f164d4cd4cd48e072856e58f2d07ac7a174bc1acf6f37969a0f188",
    "validation": "d8e4a59bd33f78f07f881f76070c5b606bde4ab3be72929ef4095a2752958b4b",
}


def tasks_of(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / "gym" / f"{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_tasks_stay_as_they_are(split: str) -> None:
    assert hashlib.sha256((EXAMPLE / "gym" / f"{split}.jsonl").read_bytes()).hexdigest() == DIGESTS[split]


def test_no_question_of_the_validation_is_trained_on_or_shown() -> None:
    trained, held_out = ({task["input"] for task in tasks_of(split)} for split in ("train", "validation"))
    shown = {question for question, _ in load_callable("gym_agent.py:answer", EXAMPLE).__globals__["EXAMPLES"]}
    assert (len(trained), len(held_out)) == (370, 75)
    assert not held_out & (trained | shown)
    kinds = Counter(task["generator"] for task in tasks_of("validation"))
    assert kinds == {"letter_counting": 25, "products": 25, "chain_sum": 25}


def test_gold_answers_score_1_and_others_0() -> None:
    right: Any = load_callable("reward.py:right", EXAMPLE)
    for task in tasks_of("train") + tasks_of("validation"):
        assert right(SimpleNamespace(answer=task["answer"]), task["answer"], None) == 1.0
        assert right(SimpleNamespace(answer=task["answer"]), "", None) == 0.0


def test_the_generators_make_the_files_again() -> None:
    pytest.importorskip(
        "reasoning_gym", reason="its dependency pycosat has no wheel: pip install reasoning-gym==0.1.25"
    )
    draw: Any = load_callable("gym_tasks.py:draw", EXAMPLE)
    held_out = draw("validation", set())
    trained = draw("train", {task["input"] for task in held_out})
    for split, tasks in (("validation", held_out), ("train", trained)):
        assert [{"id": f"{split}/{number}", **task} for number, task in enumerate(tasks)] == tasks_of(split)
