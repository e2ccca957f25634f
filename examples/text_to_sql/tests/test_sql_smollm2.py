"""The pretrained model's tasks: easy ones, shown with other questions of their databases as turns; other recipes' prompts stay one text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import smollm2
from prompts import rewrite_prompt, write_prompt
from sandbox import run_query

from lightningrl.loading import resolve
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import check_agent_file

EXAMPLE = Path(__file__).resolve().parent.parent


def turns_of(task: dict[str, Any]) -> list[tuple[str, str]]:
    turns = write_prompt(task["input"]["schema"], task["input"]["question"])
    assert isinstance(turns, list)
    return turns


def test_the_tasks_stay_as_they_are(cache: Path) -> None:
    tasks = [*smollm2.train_tasks(cache), *smollm2.validation_tasks(cache)]
    rows = [[task["id"], task["input"]["question"], task["input"]["schema"], task["answer"]] for task in tasks]
    assert len(tasks) == 704 + 42
    assert (
        hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        == "59ec20084dc5ef48603c93e975e656f3143b06e0957b41f1abfd767d12b8b565"
    )


def test_no_shown_query_is_the_task_s_own_and_each_gives_rows(cache: Path) -> None:
    for task in smollm2.validation_tasks(cache):
        shown = [text for role, text in turns_of(task) if role == "assistant"]
        assert len(shown) == 6 and task["answer"] not in shown
        assert all(run_query(task["input"]["db_path"], query).error is None for query in shown)


def test_worked_questions_are_turns_before_the_question(cache: Path) -> None:
    task = next(iter(smollm2.train_tasks(cache)))
    turns = turns_of(task)
    assert [role for role, _ in turns] == ["system", *(["user", "assistant"] * 6), "user"]
    assert turns[-1][1] == task["input"]["question"]
    again = rewrite_prompt(task["input"]["schema"], "which?", "SELECT 1", "no such table")
    assert again[:-3] == turns[:-1] and again[-2] == ("assistant", "SELECT 1")


def test_a_schema_without_worked_questions_is_one_text() -> None:
    assert isinstance(write_prompt("- cars : id", "how many?"), str)
    assert isinstance(rewrite_prompt("- cars : id", "how many?", "SELECT 1", ""), str)


def test_the_recipe_names_what_is_there() -> None:
    recipe = load_recipe(EXAMPLE / "recipe-smollm2.toml")
    check_agent_file(recipe)
    for reference in (recipe.tasks.train, recipe.tasks.validation, *(reward.use for reward in recipe.rewards.values())):
        assert callable(resolve(reference, recipe.folder))
