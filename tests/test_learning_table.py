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


def test_runs_of_a_table_are_told_apart_by_colour_and_by_marker_and_say_what_they_cost(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    table = next(one for one in script["TABLES"] if one.example == "text_to_sql")
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
    assert labels[:4] == [
        "write and rewrite, seed 0 (3.0 minutes)",
        "write and rewrite, seed 1 (4.0 minutes)",
        "write and rewrite, seed 2 (5.0 minutes)",
        "control: learning rate 0 (6.0 minutes)",
    ]
