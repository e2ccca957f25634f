"""The example runs for two steps, its agent knows nothing of us, and its data is what its page says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certified import certified
from warm import WarmCommand

from lightningrl.loading import load_callable

EXAMPLE = Path(__file__).resolve().parents[1]


def load(name: str) -> Any:
    return load_callable(f"agent.py:{name}", EXAMPLE)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    queries = load("queries")
    if queries.cache_info().currsize:
        queries().communicate()
        queries.cache_clear()


@pytest.mark.slow
def test_the_recipe_trains_for_two_steps(tmp_path: Path, warm: WarmCommand) -> None:
    sizes = ("loop.steps=2", "loop.tasks_per_step=4", "loop.group_size=8", "validation.tasks=4", "runtime.workers=1")
    settings = [part for size in sizes for part in ("--set", size)]
    ran = warm.run("lightningrl", "train", str(EXAMPLE), "--run", str(tmp_path / "run"), *settings, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "rows" in line]
    assert [line["outcome/succeeded"] for line in trained] == [32, 32]
    assert sum(line["rows"] for line in trained) > 0
    assert certified(tmp_path / "run", warm)["trained"] > 0


def test_the_agent_knows_nothing_of_us_and_is_short() -> None:
    code = (EXAMPLE / "agent.py").read_text()
    assert "lightningrl" not in code.lower()
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


def test_held_out_tasks_share_no_table_and_no_number_with_the_training() -> None:
    train, held_out = list(load("train_tasks")()), list(load("held_out_tasks")())
    words = [{word for task in tasks for word in task["input"]["schema"].split()} for tasks in (train, held_out)]
    assert words[0] & words[1] == {"-", ":", "name"}
    assert len({task["id"] for task in train + held_out}) == 500


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("ATTACH 'stolen.sqlite' AS s", "not authorized"),
        ("VACUUM INTO 'stolen.sqlite'", "authorization denied"),
        ("SELECT zeroblob(10000000)", "string or blob too big"),
        ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n", "more than 1000 rows"),
        (
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
            "too much time or memory",
        ),
        ("SELECT '\ud800'", "surrogates not allowed"),
    ],
)
def test_a_hostile_query_is_an_error_and_the_next_one_is_answered(query: str, error: str) -> None:
    run = load("run")
    assert error in run("CREATE TABLE t (x)", query)
    assert run("CREATE TABLE t (x); INSERT INTO t VALUES (7)", "SELECT x FROM t") == "[(7,)]"


def test_a_right_query_earns_one_and_a_wrong_or_broken_one_nothing() -> None:
    reward = load("right_rows")
    for raw in list(load("train_tasks")())[:50]:
        task = SimpleNamespace(**raw)
        assert reward(task, task.answer, None) == 1.0
        assert reward(task, "SELECT 'nothing'", None) == 0.0
        assert reward(task, "SELEC", None) == 0.0
