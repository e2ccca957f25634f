"""The shop: its questions are in one set each, many make its database once, and the recipe tunes and trains."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from warm import WarmCommand

from lightningrl.loading import load_callable
from lightningrl.plugins import load_plugins
from lightningrl.types import Task
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.build import build_tasks_and_rewards

EXAMPLE = Path(__file__).resolve().parents[1]


def load(name: str) -> Any:
    return load_callable(name, EXAMPLE)


def test_no_question_is_in_two_sets_and_each_answer_is_the_databases_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = load("shop.py:make_database")
    monkeypatch.setitem(make.__globals__, "DATABASE", tmp_path / "shop.sqlite")
    with ThreadPoolExecutor() as several:
        list(several.map(lambda _: make(), range(8)))
    with sqlite3.connect(tmp_path / "shop.sqlite") as connection:
        prices = dict(connection.execute("select name, price from items"))
    sets = [[*load(f"shop.py:{name}")()] for name in ("train", "validation", "test")]
    every = [task for tasks in sets for task in tasks]
    assert [len(tasks) for tasks in sets] == [100, 40, 178]
    assert len({task["input"] for task in every}) == len(every)
    for task in every:
        words = task["input"].split()
        item, count = (words[-2], int(words[2])) if task["metadata"]["kind"] != "price" else (words[-2], 1)
        assert task["answer"] == str(prices[item] * count)


def test_the_recipe_names_what_there_is() -> None:
    """Tasks had a column that no task has, and only the longest test read them."""
    recipe = load_recipe(EXAMPLE / "recipe.toml")
    _, tasks, (reward,) = build_tasks_and_rewards(recipe, load_plugins())
    assert (len(tasks.train), len(tasks.validation), reward.name) == (100, 40, "right")


def test_the_traces_are_of_training_questions_and_nearly_all_right() -> None:
    """As traces are: one answer is wrong, one rollout has none."""
    right, train = load("reward.py:right"), {task["input"]: task for task in load("shop.py:train")()}
    earned: dict[str, float] = {}
    for part in ("train", "validation"):
        for line in (EXAMPLE / "traces" / part / "sft.jsonl").read_text(encoding="utf-8").splitlines():
            _, question, *_, last = json.loads(line)["messages"]
            task = Task(id="t", input=question["content"], answer=train[question["content"]]["answer"])
            earned[task.input] = 0.0 if last.get("tool_calls") else right(task, last["content"], None)
    assert (len(earned), sum(earned.values())) == (19, 17)


@pytest.mark.long
def test_it_is_tuned_and_trained_by_one_command(tmp_path: Path, warm: WarmCommand) -> None:
    small = ("tune.epochs=1", "loop.steps=1", "loop.tasks_per_step=1", "loop.group_size=2", "validation.tasks=2")
    settings = [word for setting in small for word in ("--set", setting)]
    ran = warm.run("lightningrl", "train", str(EXAMPLE), "--run", "run", *settings, cwd=tmp_path)
    assert ran.returncode == 0 or "nothing was learned" in ran.stderr, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/failures/agent_error" in row for row in rows)
