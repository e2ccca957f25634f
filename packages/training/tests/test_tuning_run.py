"""A run of `lightningrl tune`: it goes on after it was cut off as if it never was, and training goes on from it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.machine import FreeMemory
from lightningrl_torch.testing import save_policy
from lightningrl_training import memory_check
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.commands import tune as tuning
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tuning.tuner import Tuner

RECIPE = """
agent = "agent.py:answer"
tasks.train = "data.py:train"
policy.model = "starter"
rewards.exact.use = "reward.py:exact"
learner = { device = "cpu" }
tune = { data = "rows", method = "dpo", epochs = 2, batch = 2, learning_rate = 1e-3, checkpoint_every = 2 }
"""


TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Cut(Exception):
    """Stands for a kill: nothing is tidied but what the operating system tidies."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    save_policy(tmp_path / "starter")
    (tmp_path / "starter" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "rows").mkdir()
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}?"}],
            "chosen": [{"role": "assistant", "content": "yes"}],
            "rejected": [{"role": "assistant", "content": f"no {number}"}],
        }
        for number in range(6)
    ]
    (tmp_path / "rows" / "dpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "recipe.toml"


def tune(recipe: Path | None, run: Path, *, resume: bool = False) -> None:
    settings = [] if resume else ["tune.validation=0.34"]
    tuning.tune(recipe, resume=resume, run=run, runs=run.parent, settings=settings)


def test_a_run_that_was_cut_off_ends_with_the_weights_of_one_that_was_not(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tune(recipe, whole)
    updates = 0
    update = Tuner.update

    def cut_off(*arguments: object) -> dict[str, float]:
        nonlocal updates
        updates += 1
        if updates == 4:
            raise Cut
        return update(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Tuner, "update", cut_off)
    with pytest.raises(Cut):
        tune(recipe, cut)
    assert [saved.state.step for saved in checkpoints(cut)] == [2]
    monkeypatch.undo()
    tune(None, cut, resume=True)
    ours, theirs = (load_file(run / "policy" / "model.safetensors") for run in (cut, whole))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    steps = [json.loads(line)["step"] for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    assert (cut / "curve.png").is_file()
    with pytest.raises(RunFolderError, match="is of `lightningrl tune`"):
        RunFolder.resume(cut, {})


def test_a_pipe_is_told_rate_time_left_and_what_to_do_with_the_policy(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(recipe, tmp_path / "run")
    lines = capsys.readouterr().out.splitlines()
    updates = [line for line in lines if line.startswith("update ")]
    assert len(updates) > 2 and all(re.search(r" s an update, left \d+:\d\d$", line) for line in updates[1:]), updates
    policy, of = str(tmp_path / "run" / "policy"), os.path.relpath(recipe)
    for command in (f"train {of} --policy {policy}", f"eval {policy} --recipe {of}", "export weights --run "):
        assert any(f"lightningrl {command}" in line for line in lines), command


def test_too_little_memory_for_its_rows_is_refused_before_weights_load(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room = FreeMemory(free=1000, total=1000, where="the container's 1 kB")
    monkeypatch.setattr(memory_check, "free_memory", lambda: no_room)
    (tmp_path / "starter" / "model.safetensors").write_bytes(
        (tmp_path / "starter" / "model.safetensors").read_bytes()[:-8]  # whoever loads it fails otherwise
    )
    with pytest.raises(ConfigError) as refused:
        tune(recipe, tmp_path / "run")
    said = str(refused.value)
    assert "policy 'policy' needs at least" in said and "--set tune.max_tokens=…; the longest has" in said
    assert "running calls" not in said and "loop.group_size" not in said
    assert not (tmp_path / "run").exists()


def test_rows_that_are_none_of_the_method_leave_no_folder_behind(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rows" / "dpo.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(ConfigError, match="a row of dpo has 'prompt'"):
        tune(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
