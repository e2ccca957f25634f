"""An assigner that remembers goes on exactly where the checkpoint stands, after `kill -9` and `--resume`."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashes import RECIPE, finish, kill_all, read_metrics, resume
from processes import TrainRun
from warm import WarmCommand

from lightningrl.types import Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store

pytestmark = pytest.mark.slow
CREDIT = """
import numpy as np

from lightningrl import CreditAssigner


class RunningMean(CreditAssigner):
    def __init__(self):
        self.mean = 0.0

    def assign(self, group):
        return tuple(
            tuple(np.full(len(call.completion_ids), one.reward - self.mean, np.float32) for call in one.transitions)
            for one in group.trajectories
        )

    def finish_step(self, groups, advantages):
        rewards = [one.reward for group in groups for one in group.trajectories]
        before, self.mean = self.mean, self.mean + 0.5 * (float(np.mean(rewards)) - self.mean)
        return {"mean": before, "groups": len(advantages)}

    def state(self):
        return {"mean": self.mean}

    def load(self, state):
        self.mean = state["mean"]
"""
SETTINGS = (
    "credit.use=credit.py:RunningMean",
    "validation.every=0",
    "loop.checkpoint_every=2",
    "loop.tasks_per_step=2",
)


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


async def read_steps(folder: Path) -> list[tuple[Trajectory, ...]]:
    store = await SqlStore.open(find_store(folder), read_only=True)
    try:
        return [await store.trajectories(step.rollout_ids) for step in await store.steps()]
    finally:
        await store.close()


@pytest.mark.timeout(600)
def test_what_an_assigner_remembers_goes_on_exactly_after_kill_9(
    run: TrainRun, tmp_path: Path, tiny_policy: Path
) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE.parent, recipe)
    (recipe / "credit.py").write_text(CREDIT, encoding="utf-8")
    said = [argument for setting in SETTINGS for argument in ("--set", setting)]
    run.start(str(recipe / "recipe.toml"), "--policy", str(tiny_policy), "--steps", "5", *said)
    run.wait_for(lambda: any(line["step"] == 3 and "credit/mean" in line for line in read_metrics(run.folder)))
    kill_all(run, random.Random(0))
    resume(run)
    finish(run)

    mean, expected = 0.0, []
    for trajectories in asyncio.run(read_steps(run.folder)):
        expected.append(mean)
        mean += 0.5 * (statistics.fmean(one.reward for one in trajectories if one.reward is not None) - mean)
    lines = {line["step"]: line for line in read_metrics(run.folder) if "credit/mean" in line}
    assert [lines[step]["credit/mean"] for step in range(1, 6)] == pytest.approx(expected, abs=1e-12)
    assert [lines[step]["credit/groups"] for step in range(1, 6)] == [2.0] * 5
    assert len(set(expected)) > 3, "else the test tells nothing"
