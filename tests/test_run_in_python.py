"""`lightningrl.train` and `Run`: what the command line does, in a script, an event loop, and of a run that lies elsewhere now."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from warm import WarmCommand

import lightningrl
from lightningrl.training.run_folder import RunFolder

QUICK = {
    "rewards.right.use": f"{__file__}:of_every_other",
    "loop.steps": 2,
    "loop.tasks_per_step": 2,
    "loop.group_size": 2,
    "loop.checkpoint_every": 1,
    "validation.every": 0,
}


def of_every_other(task: lightningrl.Task, output: str, trajectory: lightningrl.Trajectory) -> float:
    """Each step teaches, whatever is sampled."""
    return float(int(trajectory.rollout_id[-1]) % 2)


@pytest.fixture(scope="module")
def project(first_agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run of two steps in it."""
    folder = tmp_path_factory.mktemp("user") / "first"
    shutil.copytree(first_agent, folder)
    steps: list[int] = []
    run = lightningrl.train(str(folder), run=folder / "runs" / "one", settings=QUICK, on_step=lambda report: steps.append(report.step))
    assert steps == [1, 2]
    assert run.steps == 2
    return folder


@pytest.fixture
def moved(project: Path, tmp_path: Path) -> Iterator[Path]:
    """The user's folder, run included, somewhere else; where it was is nothing."""
    shutil.copytree(project, tmp_path / "elsewhere")
    project.rename(project.with_name("gone"))
    yield tmp_path / "elsewhere"
    project.with_name("gone").rename(project)


def test_a_run_is_read_from_its_folder(project: Path) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert all(row["rollouts"] == 4 for row in run.metrics)
    assert run.recipe.loop.group_size == 2
    assert run.curve().stat().st_size > 1000
    rollouts = run.rollouts()
    assert len(rollouts) == 8
    trace = run.trace(rollouts[0].spec.id)
    assert trace.rollout.reward == rollouts[0].reward
    assert trace.calls[0].segments
    with pytest.raises(lightningrl.LightningError, match=r"no run in 'nowhere'"):
        lightningrl.Run("nowhere")


def test_weights_are_written_while_the_run_is_held_by_its_trainer(project: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(project / "runs" / "one")
    holder, _ = RunFolder.resume(run.folder, {})
    try:
        assert run.export(tmp_path / "weights") == 2
    finally:
        holder.close()
    before, after = (load_file(folder / "model.safetensors") for folder in (project / "starter", tmp_path / "weights"))
    assert before.keys() == after.keys()
    with pytest.raises(lightningrl.LightningError, match="is not empty"):
        run.export(tmp_path / "weights")
    with pytest.raises(lightningrl.ConfigError, match=r"no policy 'judge' is trained .* choose one of: policy"):
        run.export(tmp_path / "other", policy="judge")


def test_a_checkpoint_that_goes_while_it_is_read_makes_room_for_the_next(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project, tmp_path / "copy")
    run = lightningrl.Run(tmp_path / "copy" / "runs" / "one")
    saved = sorted((run.folder / "checkpoints").iterdir())
    late = saved[-1].rename(saved[-1].with_name("later"))
    from lightningrl.training import policies

    load = policies.load_backend

    def load_late(backend: lightningrl.Backend, folder: Path, name: str) -> None:
        if late.exists():  # the trainer goes on: the newer one is there, this one is not
            late.rename(saved[-1])
            shutil.rmtree(folder.parent)
        load(backend, folder, name)

    monkeypatch.setattr(policies, "load_backend", load_late)
    assert run.export(tmp_path / "weights") == 2


def test_a_run_that_was_moved_with_its_recipe_is_exported_and_goes_on(moved: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(moved / "runs" / "one")
    assert run.export(tmp_path / "weights") == 2
    went_on = lightningrl.train(run=run.folder, resume=True, settings={"loop.steps": 3})
    assert went_on.steps == 3
    (moved / "recipe.toml").rename(moved / "renamed.toml")
    with pytest.raises(lightningrl.LightningError, match=r"is gone; say where it is: `lightningrl train RECIPE --resume"):
        lightningrl.train(run=run.folder, resume=True)
    assert lightningrl.train(moved / "renamed.toml", run=run.folder, resume=True, settings={"loop.steps": 3}).steps == 3


def test_training_within_an_event_loop_is_awaited(project: Path, tmp_path: Path) -> None:
    async def main() -> lightningrl.Run:
        with pytest.raises(lightningrl.ConfigError, match=r"await lightningrl.train_async"):
            lightningrl.train(project, run=tmp_path / "run")
        training = asyncio.create_task(lightningrl.train_async(project, run=tmp_path / "run", settings={**QUICK, "loop.steps": 1}))
        others = 0
        while not training.done():
            await asyncio.sleep(0)
            others += 1
        assert others > 100, "others have their turns"
        return await training

    assert asyncio.run(main()).steps == 1


def test_what_cannot_run_leaves_no_folder(project: Path, tmp_path: Path) -> None:
    with pytest.raises(lightningrl.ConfigError, match="no recipe given"):
        lightningrl.train(run=tmp_path / "run")
    with pytest.raises(lightningrl.LightningError, match="no credit assigner named 'grop'"):
        lightningrl.train(project, run=tmp_path / "run", settings={"credit.use": "grop"})
    assert not (tmp_path / "run").exists()


def test_a_run_that_python_started_says_how_to_go_on(project: Path, tmp_path: Path, warm: WarmCommand) -> None:
    recipe = lightningrl.Recipe(
        agent=f"{project}/agent.py:answer",
        tasks=lightningrl.TasksConfig(train=f"{project}/tasks.py:train"),
        policy=lightningrl.PolicyConfig(model=str(project / "starter")),
        rewards={"right": lightningrl.RewardConfig(use=of_every_other)},
    )
    settings = {key: value for key, value in QUICK.items() if not key.startswith("rewards.")}
    run = lightningrl.train(recipe, run=tmp_path / "run", settings={**settings, "loop.steps": 1})
    assert json.loads((run.folder / "recipe.json").read_text())["rewards"]["right"]["use"].endswith(":of_every_other")
    resumed = warm.run("lightningrl", "train", "--resume", "--run", str(run.folder), cwd=tmp_path, environment={"COLUMNS": "300"})
    assert resumed.returncode == 1
    assert "lightningrl.train(recipe, run=" in resumed.stderr + resumed.stdout
    assert lightningrl.train(recipe, run=run.folder, resume=True, settings={"loop.steps": 2}).steps == 2
