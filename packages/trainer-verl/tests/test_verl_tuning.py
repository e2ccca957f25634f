"""`lightningrl tune` on verl: its updates are those of the torch backend, and a run that was killed goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sizes import PATIENCE_S

from lightningrl.backends import Backend, Continuation
from lightningrl.errors import BackendError
from lightningrl_runs.origin import read_models
from lightningrl_torch.plugin import create_backend
from lightningrl_torch.testing import save_policy
from lightningrl_training.tuning.rows import Row
from lightningrl_training.tuning.settings import Method, TuneSettings
from lightningrl_training.tuning.tuner import Tuner, TuningRow, arrange
from lightningrl_verl.plugin import create_tuner

TWO_CALLS = Path(__file__).parent / "two_calls"
NEAR = 2e-5
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RECIPE = """
backend = "verl"
policy.model = "starter"
agent = "agent.py:answer"
tasks.train = "data.py:train"
rewards.exact.use = "reward.py:exact"
learner.dtype = "float32"
tune = { data = "rows", validation = 0.25, epochs = 4, batch = 3, learning_rate = 1e-3, checkpoint_every = 2 }
"""


def answers(count: int, lot: np.random.Generator) -> list[Continuation]:
    return [
        Continuation(
            context=lot.integers(3, 250, lot.integers(2, 9)).astype(np.int32),
            tokens=lot.integers(3, 250, lot.integers(1, 7)).astype(np.int32),
        )
        for _ in range(count)
    ]


def rows_of(method: Method, settings: TuneSettings) -> list[TuningRow]:
    """Five rows: an odd number, which two ranks cannot share alike."""
    lot = np.random.default_rng(0)
    each = 2 if method == "dpo" else 1
    return arrange([Row(answers=tuple(answers(each, lot)), label=bool(n % 2)) for n in range(5)], settings)


def take_updates(backend: Backend, rows: Sequence[TuningRow], settings: TuneSettings, path: Path) -> list[Any]:
    tuner = Tuner(backend, settings, policy="policy")
    reference = tuner.keep_reference(rows, path)
    updates = [tuner.update(rows, reference) for _ in range(3)]
    return [tuner.score(rows), *([update["learn/loss"], update["learn/grad_norm"]] for update in updates)]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_its_updates_are_those_of_the_torch_backend(method: Method, tmp_path: Path, cpu_ray: None) -> None:
    policy = save_policy(
        tmp_path / "policy", vocab_size=258
    )  # as many embeddings as tokens: verl's softmax leaves out the others
    settings = TuneSettings(data=tmp_path, method=method, batch=5)
    rows = rows_of(method, settings)
    wanted = {"policy": policy, "name": "policy", "learning_rate": 1e-3}
    ours = create_backend(**wanted, loss="reinforce", device="cpu")
    theirs = create_tuner(**wanted, dtype="float32", gpus_per_node=2)
    try:
        for mine, verls in zip(
            take_updates(ours, rows, settings, tmp_path / "torch.npy"),
            take_updates(theirs, rows, settings, tmp_path / "verl.npy"),
            strict=True,
        ):
            np.testing.assert_allclose(verls, mine, atol=NEAR, rtol=1e-4)
        with pytest.raises(BackendError, match="the verl tuner keeps no reference"):
            theirs.logprobs(list(rows[0].scored), reference=True)
    finally:
        ours.close()
        theirs.close()


def test_adapters_are_saved_loaded_and_exported_as_they_score(tmp_path: Path, cpu_ray: None) -> None:
    policy = save_policy(tmp_path / "policy", vocab_size=258)
    settings = TuneSettings(data=tmp_path, batch=5)
    rows = rows_of("sft", settings)
    tuner = create_tuner(policy=policy, name="policy", dtype="float32", learning_rate=1e-2, lora=True, gpus_per_node=2)
    try:
        before = Tuner(tuner, settings, policy="policy").score(rows)
        scores, *_ = take_updates(tuner, rows, settings, tmp_path / "none.npy")
        assert scores.sum() > before.sum()
        tuner.save(tmp_path / "saved")
        take_updates(tuner, rows, settings, tmp_path / "none.npy")
        tuner.load(tmp_path / "saved")
        np.testing.assert_array_equal(Tuner(tuner, settings, policy="policy").score(rows), scores)
        tuner.export(tmp_path / "exported")
    finally:
        tuner.close()
    whole = create_backend(policy=str(tmp_path / "exported"), name="policy", device="cpu")
    np.testing.assert_allclose(Tuner(whole, settings, policy="policy").score(rows), scores, atol=NEAR, rtol=1e-4)
    whole.close()


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightningrl", *arguments, "--run", str(folder / "run")]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def write_rows(policy: str, folder: Path, asked: str) -> None:
    """A starter with a chat template, and rows in which it says yes."""
    shutil.copytree(policy, folder / "starter")
    (folder / "starter" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "rows").mkdir()
    yes = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": asked.format(number)}, yes]} for number in range(12)]
    (folder / "rows" / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_that_was_killed_goes_on_to_a_policy_that_transformers_loads(policy: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_rows(policy, tmp_path, "{}?")
    first = begin(tmp_path, "tune", "recipe.toml")
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "run" / "checkpoints" / "step-000004").is_dir():
        assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    again = begin(tmp_path, "tune", "--resume")
    assert again.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(13))
    losses = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert losses[-1] < 0.5 * losses[0]

    from transformers import AutoModelForCausalLM

    trained, start = (
        AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (tmp_path / "run" / "policy", policy)
    )
    assert trained.keys() == start.keys()
    assert any((trained[name] != start[name]).any() for name in trained)


def test_a_warm_start_is_tuned_here_and_its_run_goes_on_from_there(policy: str, tmp_path: Path) -> None:
    write_rows(policy, tmp_path, "q{}")
    words = {
        "policy.model": tmp_path / "starter",
        "warm_start.traces": tmp_path / "rows",
        "tune.epochs": 8,
        "tune.batch": 4,
        "tune.learning_rate": 1e-3,
        "loop.steps": 1,
        "loop.tasks_per_step": 2,
    }
    set_to = [word for key, value in words.items() for word in ("--set", f"{key}={value}")]
    assert begin(tmp_path, "train", str(TWO_CALLS), *set_to).wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()[
        -4000:
    ]
    run = tmp_path / "run"
    assert Path(read_models(run)["policy"]) == run / "warm_start" / "tuning" / "policy"
    tuned, learned = (
        [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        for place in (run / "warm_start" / "tuning", run)
    )
    losses = [line["learn/loss"] for line in tuned if "learn/loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    first = next(line for line in learned if line.get("step") == 1)
    assert first["reward"] > 0.4, "it says yes, which is letters; of an untuned policy's bytes a fifth are"
