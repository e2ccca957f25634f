"""benchmarks/losses.py: its table of runs, and what it calls shown."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "losses.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["folder_of"].__globals__, "RUNS", tmp_path)
    return script


def write(folder: Path, *, arrives: int | None, steps: int) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "validation/reward": 0.95 if arrives is not None and step >= arrives else 0.3}
        for step in range(0, steps + 1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_five_seeds_in_another_order_are_shown_and_a_run_that_was_cut_off_is_not_counted(
    script: dict[str, Any],
) -> None:
    for arm in script["ARMS"]:
        for seed in range(5):
            first = arm.loss == "gspo" and arm.setting == "four updates"
            arrives = None if arm.setting == "control" else 6 + 2 * seed if first else 16 + seed % 2 * 2
            write(script["folder_of"](arm, seed), arrives=arrives, steps=script["STEPS"])
    cut = script["folder_of"](script["ARMS"][0], 4)
    lines = (cut / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:4]), encoding="utf-8")
    rows = {tuple(line.split(" | ")[:2]): line for line in script["as_markdown"](5).splitlines()[2:]}
    shown = rows["| four updates", "`gspo`"]
    assert shown == "| four updates | `gspo` | 384, 512, 640, 768, 896 | 640 | 0.950 [0.388, 1.000] | 0.048 |"
    assert rows["| four updates", "`cispo`"].endswith("| 1.000 |")
    assert "never, never, never, never, never | never" in rows["| control", "`reinforce`"]
    assert rows["| one update", "`reinforce`"].count(",") == 4, "four runs and an interval"
