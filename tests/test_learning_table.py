"""The pictures of docs/reference/results.md: each run is told apart and says what it cost."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "learning_table.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(TABLE))


@pytest.mark.parametrize("example", ["text_to_sql", "shop"])
def test_runs_of_a_table_are_told_apart_by_colour_and_by_marker_and_say_what_they_cost(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    from matplotlib.figure import Figure

    table = next(one for one in script["TABLES"] if one.example == example)
    monkeypatch.setitem(script["plot"].__globals__, "RUNS", tmp_path)
    for number, row in enumerate(table.rows):
        folder = tmp_path / table.example / row.name
        folder.mkdir(parents=True)
        lines = [
            {"step": 0, "minutes": 0.0, "validation/reward": 0.4},
            {"step": 5, "minutes": 3.0 + number, "validation/reward": 0.8},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    axes = Figure().subplots()
    script["plot"](axes, table, table.rows)
    drawn = axes.get_lines()
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == len(table.rows)
    labels = [str(line.get_label()) for line in drawn]
    assert len(set(labels)) == len(labels)
    if example == "shop":
        assert len(labels) == 5
        return
    assert labels[:6] == [
        "write and rewrite, seed 0 (3.0 minutes)",
        "write and rewrite, seed 1 (4.0 minutes)",
        "write and rewrite, seed 2 (5.0 minutes)",
        "control: learning rate 0, seed 0 (6.0 minutes)",
        "control: learning rate 0, seed 1 (7.0 minutes)",
        "control: learning rate 0, seed 2 (8.0 minutes)",
    ]


def test_a_table_has_intervals_over_seeds_a_test_column_and_trained_less_control(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightningrl.figures import Interval

    table = next(one for one in script["TABLES"] if one.example == "rag")
    ends = {"seed": (0.755, 0.719, 0.738), "control": (0.284, 0.284, 0.284)}

    async def measure(_: object, row: Any) -> Any:
        reward = ends[row.kind][row.seed]
        interval = Interval(mean=reward, low=reward - 0.07, high=reward + 0.07)
        return script["Measured"](first={"reward": 0.284}, last={"reward": reward}, after=interval, test=interval)

    monkeypatch.setitem(script["as_markdown"].__globals__, "measure", measure)
    monkeypatch.setitem(script["as_markdown"].__globals__, "metrics_of", lambda _: [{"minutes": 2.0}])
    lines = script["as_markdown"](table, table.rows).splitlines()
    assert lines[0] == "| trained | seed | minutes | reward | test |"
    assert lines[2] == "| all calls | 0 | 2.0 | 0.284 → 0.755 [0.685, 0.825] | 0.755 [0.685, 0.825] |"
    # t of 2 degrees of freedom, 4.303, times the seeds' deviation of 0.018 over the root of 3
    assert "| **all calls, mean of 3 seeds** | | | 0.284 → 0.737 [0.693, 0.782] | 0.737 [0.693, 0.782] |" in lines
    assert len(lines) == 2 + len(table.rows) + 3
    assert lines[-1].startswith("| **all calls less control** | | | +0.453 [+0.4")


def test_every_table_has_test_tasks_that_are_in_no_other_split(script: dict[str, Any]) -> None:
    from lightningrl_client.recipe_file import load_recipe
    from lightningrl_training.task_files import task_source
    from lightningrl_training.tasks import columns_of, input_key, read_tasks

    for table in script["TABLES"]:
        recipe = load_recipe(table.folder / table.recipe)
        if table.example == "two_policies":  # text_to_sql's
            continue

        def resolve(reference: str, folder: Path = recipe.folder) -> Any:
            return task_source(reference, folder)

        splits = [
            {input_key(task) for task in read_tasks("eval", reference, {}, resolve, columns_of(recipe))}
            for reference in (recipe.tasks.train, recipe.tasks.validation, table.test)
        ]
        assert not splits[2] & (splits[0] | splits[1]), table.name
        assert len(splits[2]) >= 160, table.name
