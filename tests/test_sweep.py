"""A sweep, with kills: runs that have ended are not run again, an interrupted one goes on, and the verdict is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from processes import wait_for
from warm import WarmCommand

SHORT = (
    *("--set", "loop.steps=6", "--set", "learner.warmup_steps=0"),
    *("--set", "validation.every=6", "--set", "validation.tasks=20", "--set", "loop.checkpoint_every=1"),
)


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_by_the_same_command_and_finds_the_rate_that_learns(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    shutil.copytree(first_agent, tmp_path / "first")
    command = ("lightningrl", "sweep", "first", "--seeds", "3", "--set", "learner.learning_rate=0,2e-3", *SHORT)
    with (tmp_path / "said").open("wb") as said:
        sweep = warm.start(*command, output=said, errors=said, cwd=tmp_path, environment=dict(os.environ))
        try:
            wait_for(lambda: len(_ended(tmp_path)) == 1, lambda: (tmp_path / "said").read_text())
            folder = _folder(tmp_path)
            second = folder / "learning_rate=2e-3,seed=0"
            wait_for(
                lambda: any(second.glob("checkpoints/step-000002")), lambda: (tmp_path / "said").read_text()
            )  # in the midst of it
        finally:
            sweep.send_signal(signal.SIGKILL)
            sweep.wait()
    first = folder / "learning_rate=0,seed=0" / "metrics.jsonl"
    before = first.read_bytes()
    again = warm.run(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on: 1 of 6 runs have ended, and are not run again" in again.stdout
    assert first.read_bytes() == before
    assert "going on with" in (folder / "logs" / f"{second.name}.txt").read_text(), "resumed, not begun anew"
    result = json.loads((folder / "sweep.json").read_text())
    assert result["settings"][0]["setting"] == "learner.learning_rate=2e-3"
    assert [len(setting["seeds"]) for setting in result["settings"]] == [3, 3]
    assert result["differences"][0]["shown"], result
    assert "learner.learning_rate=2e-3 is better than learner.learning_rate=0 by +0." in again.stdout
    assert (folder / "curves.png").is_file()
    logs = {file: file.stat().st_size for file in (folder / "logs").iterdir()}
    assert result["verdict"] in warm.run(*command, cwd=tmp_path).stdout
    assert {file: file.stat().st_size for file in (folder / "logs").iterdir()} == logs, "nothing is run a third time"


def test_a_wrong_value_of_one_setting_is_a_sentence_before_the_first_run(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    shutil.copytree(first_agent, tmp_path / "first")
    refused = warm.run("lightningrl", "sweep", "first", "--seeds", "2", "--set", "credit.use=grpo,grpoo", cwd=tmp_path)
    assert refused.returncode == 2
    assert "credit.use=grpoo: no credit assigner named 'grpoo'" in refused.stderr
    assert not (tmp_path / "runs").exists()


def _folder(home: Path) -> Path:
    return next((home / "runs").glob("dates-sweep-*"))


def _ended(home: Path) -> dict[str, str]:
    files = list((home / "runs").glob("dates-sweep-*/finished.json"))
    return json.loads(files[0].read_text()) if files else {}
