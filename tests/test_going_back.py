"""A run that goes back to its best weights and is killed as it does comes to the same as one that is not killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crashes import begin, check_same, finish, kill_all, newest_checkpoint, read_metrics, read_tensors, resume
from processes import TrainRun
from warm import WarmCommand

pytestmark = pytest.mark.slow
SETTINGS = (
    *("tasks.validation=falling.py:validation_tasks", "rewards.letters.use=falling.py:falls", "validation.every=2"),
    *("runtime.workers=1", "learner.prefix_cache_tokens=0"),
)


@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_as_it_goes_back_comes_to_the_same(
    warm: WarmCommand, tmp_path: Path, tiny_policy: Path
) -> None:
    settings = [argument for setting in SETTINGS for argument in ("--set", setting)]
    killed, calm = (TrainRun(warm, tmp_path / name, tmp_path / f"{name}-journal") for name in ("killed", "calm"))
    try:
        begin(killed, tiny_policy, *settings, steps=4)
        killed.wait_for(lambda: any("went_back_to" in line for line in read_metrics(killed.folder)))
        kill_all(killed, random.Random(0))
        resume(killed)
        finish(killed)
        begin(calm, tiny_policy, *settings, steps=4)
        finish(calm)
    finally:
        killed.close()
        calm.close()
    check_same(killed, calm)
    for run in (killed, calm):
        lines = {name: value for line in read_metrics(run.folder) for name, value in line.items()}
        assert (lines["went_back_to"], lines["policy_version"]) == (0.0, 5.0), "a return is a version, too"
        scores = [line["validation/reward"] for line in read_metrics(run.folder) if "validation/reward" in line]
        assert scores == [1.0, 0.0, 1.0]
        (pace,) = (
            value
            for name, value in read_tensors(next(newest_checkpoint(run.folder).rglob("state.pt"))).items()
            if name.endswith("pace")
        )
        assert pace == 0.5
