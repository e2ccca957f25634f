"""`lightningrl runs`: a folder of runs as a person reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.errors import ConfigError, LightningError, RunFolderError
from lightningrl_runs.notes import read_notes


def runs(folder: Path, *arguments: str, width: int = 140) -> str:
    """The output of `lightningrl runs --runs FOLDER …`. Raises what it raises."""
    done = CliRunner().invoke(app, ["runs", "--runs", str(folder), *arguments], env={"COLUMNS": str(width)})
    if isinstance(done.exception, LightningError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def two_runs(recorded_run: Path, tmp_path: Path) -> Path:
    """A folder with a run and a copy of it, in which one held-out task in two was answered otherwise."""
    for name in ("one", "two"):
        shutil.copytree(recorded_run, tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_runs_are_listed_with_steps_held_out_reward_and_state(two_runs: Path) -> None:
    (two_runs / "no-run").mkdir()
    listed = runs(two_runs)
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["one", "two"]
    assert "dates" in listed
    assert "starter" in listed
    assert "3/3" in listed
    assert "done" in listed
    first = json.loads(runs(two_runs, "--json").splitlines()[0])
    assert (first["run"], first["steps"], first["state"], first["tags"]) == ("one", 3, "done", [])
    assert 0.0 <= first["before"] <= 1.0
    assert "starter" not in runs(two_runs, width=80), "narrow terminals keep what tells runs apart"


def test_runs_of_a_sweep_are_listed_below_its_name_and_an_interrupted_one_is_stopped(two_runs: Path) -> None:
    sweep = two_runs / "dates-sweep-1"
    sweep.mkdir()
    (sweep / "plan.json").write_text("{}")
    (two_runs / "two").rename(sweep / "learning_rate=0,seed=0")
    for checkpoint in sorted((sweep / "learning_rate=0,seed=0" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    states = {run["run"]: run["state"] for run in map(json.loads, runs(two_runs, "--json").splitlines())}
    assert states == {"one": "done", "dates-sweep-1/learning_rate=0,seed=0": "stopped"}


def test_tags_are_added_removed_listed_and_filtered(two_runs: Path) -> None:
    assert "baseline lr=1e-3" in runs(two_runs, "tag", "one", "+baseline", "+lr=1e-3")
    assert "no tags" not in runs(two_runs, "tag", "one", "-baseline")
    assert read_notes(two_runs / "one").tags == ("lr=1e-3",)
    assert [json.loads(line)["run"] for line in runs(two_runs, "--tag", "lr=1e-3", "--json").splitlines()] == ["one"]
    assert "no run has the tag 'nope'" in runs(two_runs, "--tag", "nope")
    runs(two_runs, "note", "one", "the run of the talk")
    assert read_notes(two_runs / "one").tags == ("lr=1e-3",), "a note leaves tags as they are"
    assert "+lr=1e-3 the run of the talk" in runs(two_runs)
    assert "the run of the talk" in runs(two_runs, "note", "one")
    runs(two_runs, "note", "one", "")
    assert "has no note" in runs(two_runs, "note", "one")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tag", "one", "draft"), r"'draft' neither adds nor removes a tag; write \+draft or -draft"),
        (("tag", "one", "-draft"), r"has no tag 'draft'; it has none"),
        (("tag", "one", "+a b"), r"'a b' is no tag"),
        (("tag", "three", "+x"), r"no run 'three', neither here nor below"),
        (("compare", "one", "one"), r"both are run .*; name two runs"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(two_runs: Path, arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises((ConfigError, RunFolderError), match=sentence):
        runs(two_runs, *arguments)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no folder .* give one with --runs, or start a run"):
        runs(tmp_path / "nowhere")


def test_two_runs_are_compared_by_settings_numbers_and_held_out_tasks(two_runs: Path) -> None:
    recipe = json.loads((two_runs / "two" / "recipe.json").read_text())
    recipe["learner"]["learning_rate"] = 0.5
    (two_runs / "two" / "recipe.json").write_text(json.dumps(recipe))
    compared = runs(two_runs, "compare", "one", "two")
    assert "learner.learning_rate" in compared
    assert "held-out reward after" in compared
    assert "held-out tasks are alike" in compared
    result = json.loads(runs(two_runs, "compare", str(two_runs / "one"), "two", "--json"))
    assert result["settings"] == {"learner.learning_rate": [0.001, 0.5]}
    assert result["metrics"]["steps"] == [3, 3]
    assert result["difference"]["mean"] == 0.0
    recipe["rewards"]["right"]["weight"] = 2.0
    (two_runs / "two" / "recipe.json").write_text(json.dumps(recipe))
    assert "not compared: their rewards differ (rewards.right.weight)" in runs(two_runs, "compare", "one", "two")


def test_settings_of_several_seeds_are_compared_by_seed_and_not_by_the_tasks_of_two_runs(two_runs: Path) -> None:
    """Tasks of two lucky seeds said "better" where the seeds of each setting overlap."""
    scores = {"one": 0.719, "one-b": 0.769, "one-c": 0.706, "two": 0.669, "two-b": 0.725, "two-c": 0.8}
    for number, (name, score) in enumerate(scores.items()):
        folder = two_runs / name
        if not folder.exists():
            shutil.copytree(two_runs / name.partition("-")[0], folder)
        recipe = json.loads((folder / "recipe.json").read_text())
        recipe["seed"], recipe["learner"]["learning_rate"] = number % 3, 0.001 if name.startswith("one") else 0.002
        (folder / "recipe.json").write_text(json.dumps(recipe))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            if "validation/reward" in row:
                row["validation/reward"] = score
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compared = runs(two_runs, "compare", "one", "two")
    assert "no difference of the settings shown in held-out reward" in " ".join(compared.split())
    assert "3 and 3 seeds" in " ".join(compared.split())
    difference = json.loads(runs(two_runs, "compare", "one", "two", "--json"))["difference"]
    assert difference["mean"] == pytest.approx(0.0, abs=1e-3)
    assert difference["high"] > 0.1, "the seeds' noise, not the tasks'"
    alone = runs(two_runs, "compare", "one", "one-b")
    assert "of these two policies alone" in " ".join(alone.split()), "seeds of one setting are no two settings"
