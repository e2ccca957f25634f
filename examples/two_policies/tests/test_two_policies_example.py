"""A writer and a critic: each policy answers its own calls and is paid for its own work."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from certified import certified
from verdicts import verdicts_right
from warm import WarmCommand

FOLDER = Path(__file__).parents[1]


def test_the_critic_is_paid_for_right_verdicts_alone(tmp_path: Path) -> None:
    path = tmp_path / "some.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE pets (name TEXT)")
        connection.execute("INSERT INTO pets VALUES ('Bo')")
    connection.close()
    task = SimpleNamespace(input={"db_path": str(path)}, answer="SELECT name FROM pets")
    right, wrong = "SELECT name FROM pets", "SELECT 1"
    drafts = [
        {"query": wrong, "accepted": False},
        {"query": wrong, "accepted": True},
        {"query": right, "accepted": True},
    ]
    assert verdicts_right(task, {"drafts": drafts[:1]}) == 1.0
    assert verdicts_right(task, {"drafts": drafts[1:]}) == 0.5
    assert verdicts_right(task, {"drafts": [{"query": right, "accepted": False}]}) == 0.0


@pytest.mark.slow
def test_both_policies_are_trained_and_exported_in_one_run(tmp_path: Path, warm: WarmCommand) -> None:
    run, cut = tmp_path / "run", ["loop.tasks_per_step=4", "loop.group_size=8", "validation.tasks=4"]
    settings = [word for setting in cut for word in ("--set", setting)]
    trained = warm.run("lightningrl", "train", str(FOLDER), "--run", str(run), "--steps", "2", *settings, cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2
    learned = {key.split("/")[1] for line in metrics for key in line if key.startswith("learn/")}
    assert learned == {"writer", "critic"}
    assert {policy: bool(parts) for policy, parts in certified(run, warm)["gaps"].items()} == {
        "writer": True,
        "critic": True,
    }
    for policy in ("writer", "critic"):
        exported = warm.run(
            "lightningrl", "export", policy, "--run", str(run), "--policy", policy, "--step", "newest", cwd=tmp_path
        )
        assert exported.returncode == 0, exported.stdout + exported.stderr
    starts = {"writer": FOLDER.parent / "text_to_sql" / "starter", "critic": FOLDER / "critic"}
    for policy, start in starts.items():
        assert (tmp_path / policy / "model.safetensors").read_bytes() != (start / "model.safetensors").read_bytes()
