"""`lightningrl certify` on tiny runs: a clean one passes, and each drift that is planted between engine and trainer is
found."""

from __future__ import annotations

import copy
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer

import lightningrl
from lightningrl.errors import RunFolderError
from lightningrl_credit import samples
from lightningrl_torch import backend as torch_backend
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.testing import make_model, make_tokenizer
from lightningrl_training.commands.certify import certify
from lightningrl_training.evaluation import certificate
from lightningrl_training.evaluation.certificate import Certificate

Change = Callable[[lightningrl.GenerateRequest], lightningrl.GenerateRequest]
"""What the engine is asked instead."""


PROJECT = """
from openai import OpenAI


def answer(question):
    client = OpenAI(api_key="any")
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    return client.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""


def tasks():
    return [{"id": f"t{number}", "input": f"count {number}"} for number in range(4)]


def held_out():
    return [{"id": f"h{number}", "input": f"say {number}"} for number in range(4)]


def of_every_other(task, output, trajectory):
    return float(int(trajectory.rollout_id[-1]) % 2)
"""
"""The agent makes two calls, the second with the first's answer in its history."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer(context_length=256)
    tokenizer.save_pretrained(folder)
    make_model(max_position_embeddings=256).save_pretrained(folder)
    (folder / "two_calls.py").write_text(PROJECT, encoding="utf-8")
    return folder


def train(
    policy: Path, folder: Path, *, steps: int = 1, learner: dict[str, Any] | None = None, **sampling: Any
) -> lightningrl.Run:
    recipe = lightningrl.Recipe.model_validate(
        {
            "agent": "two_calls.py:answer",
            "folder": policy,
            "tasks": {"train": "two_calls.py:tasks", "validation": "two_calls.py:held_out"},
            "policy": {"model": str(policy)},
            "rewards": {"other": {"use": "two_calls.py:of_every_other"}},
            "sampling": {"max_tokens": 8, **sampling},
            "validation": {"every": 1, "sampling": {"temperature": 1.0}},
            "loop": {"steps": steps, "tasks_per_step": 4, "group_size": 4, "checkpoint_every": 1},
            "runtime": {"workers": 1, "concurrency": 4},
            "learner": {"learning_rate": 3e-3, **(learner or {})},
        }
    )
    return lightningrl.train(recipe, run=folder / "run")


@pytest.fixture(scope="module")
def clean(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> lightningrl.Run:
    return train(policy, tmp_path_factory.mktemp("clean"))


def failures(found: Certificate) -> dict[str, str]:
    return {check.name: check.evidence for check in found.checks if check.is_passed is False}


def test_a_run_without_a_fault_passes_with_every_token_looked_at(clean: lightningrl.Run) -> None:
    found = clean.certify()
    assert found.is_passed, failures(found)
    assert found.recomputed == found.tokens > 300, "the weights of both versions are there"
    assert found.trained == found.trained_unique > 100 and found.trained_unsampled == found.trained_cut == 0
    parts = {part.part: part for part in found.gaps["policy"]}
    assert {"version 0", "version 1", "call 0", "call 1"} <= parts.keys()
    assert (
        parts["version 0"].tokens + parts["version 1"].tokens
        == parts["call 0"].tokens + parts["call 1"].tokens
        == parts["all"].tokens
    )


def test_tokens_that_were_sampled_from_a_part_of_the_softmax_are_counted(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(policy, tmp_path, top_p=0.9)
    found = run.certify()
    assert found.is_passed, failures(found)
    assert found.trained_cut == found.trained > 0
    certify(run.folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "100.0% of the trained tokens were sampled from a part of the softmax" in said


def test_a_run_with_its_kl_in_the_reward_asks_its_start_and_passes(policy: Path, tmp_path: Path) -> None:
    run = train(policy, tmp_path, learner={"kl_coef": 0.1, "kl_estimator": "k1", "learning_rate": 3e-2}, steps=2)
    assert run.certify().is_passed
    first, second = (entry["credit/kl_reference"] for entry in run.metrics if "credit/kl_reference" in entry)
    assert first == pytest.approx(0.0, abs=1e-6) and second > 1e-4


def colder(request: lightningrl.GenerateRequest) -> lightningrl.GenerateRequest:
    return replace(request, sampling=replace(request.sampling, temperature=0.7))


def with_text(request: lightningrl.GenerateRequest, change: Callable[[str], str]) -> lightningrl.GenerateRequest:
    """The prompt as text, changed, and tokenised again."""
    tokenizer = make_tokenizer()
    text = change(str(tokenizer.decode(list(request.prompt_ids))))
    return replace(request, prompt_ids=tuple(tokenizer.encode(text, add_special_tokens=False)))


def other_template(request: lightningrl.GenerateRequest) -> lightningrl.GenerateRequest:
    return with_text(request, lambda text: text.replace("user: ", "[user] "))


def tokenised_anew(request: lightningrl.GenerateRequest) -> lightningrl.GenerateRequest:
    """Bytes that are no text come back as others: of a prompt without sampled tokens nothing changes."""
    return with_text(request, lambda text: text)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        pytest.param(colder, "from the first call", marks=pytest.mark.long),
        pytest.param(other_template, "from the first call", marks=pytest.mark.long),
        (tokenised_anew, "a history that was tokenised anew"),
    ],
)
def test_what_the_engine_is_asked_otherwise_than_recorded_is_found(
    change: Change, where: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TorchEngine.generate

    def changed(engine: TorchEngine, request: lightningrl.GenerateRequest) -> AsyncIterator[lightningrl.TokenChunk]:
        return generate(engine, change(request))

    with monkeypatch.context() as planted:
        planted.setattr(TorchEngine, "generate", changed)
        run = train(policy, tmp_path)
    said = failures(run.certify())
    assert where in said["probabilities of 'policy'"]


def test_weights_that_never_reach_the_engine_are_found(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_stale(model: Any, **settings: Any) -> TorchEngine:
        return TorchEngine(copy.deepcopy(model), **settings)

    with monkeypatch.context() as planted:
        planted.setattr(torch_backend, "TorchEngine", make_stale)
        run = train(policy, tmp_path)
    said = failures(run.certify())
    assert "weights that did not reach the engine" in said["probabilities of 'policy'"]


def test_a_token_that_was_trained_and_not_sampled_is_found(
    clean: lightningrl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_row = samples._row

    def with_a_token_of_the_prompt(*arguments: Any) -> lightningrl.Sample:
        row = make_row(*arguments)
        place = int(np.argmax(row.mask)) - 1
        for column, value in ((row.mask, True), (row.calls, row.calls[place + 1])):
            column[place] = value
        return row

    monkeypatch.setattr(samples, "_row", with_a_token_of_the_prompt)
    said = failures(clean.certify())
    assert "trained tokens were sampled" in said and "the record is what was trained" in said


@pytest.mark.parametrize("value", [-0.5, float("nan")])
def test_a_call_changed_in_the_store_is_found(
    value: float, clean: lightningrl.Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The record's own logprobs, one of them another."""
    with closing(sqlite3.connect(copy_of(clean, tmp_path) / "store.sqlite")) as db, db:
        (pk, values), *_ = db.execute("SELECT pk, logprobs FROM calls ORDER BY pk LIMIT 1").fetchall()
        changed = np.frombuffer(values, np.float32).copy()
        changed[0] += value
        db.execute("UPDATE calls SET logprobs = ? WHERE pk = ?", (changed.tobytes(), pk))
    assert "probabilities of 'policy'" in failures(lightningrl.Run(tmp_path / "run").certify())
    with pytest.raises(typer.Exit):
        certify(tmp_path / "run", as_json=True)
    sys.stdout.flush()
    told = msgspec.json.decode(capfd.readouterr().out)  # refuses the NaN of Python's json
    assert not told["is_passed"]


def test_rollouts_that_are_gone_and_were_not_forgotten_are_missed(clean: lightningrl.Run, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copy_of(clean, tmp_path) / "store.sqlite")) as db, db:
        db.execute("DELETE FROM trained")
    assert "the record is what was trained" in failures(lightningrl.Run(tmp_path / "run").certify())


def test_a_run_without_a_call_is_no_certified_run(clean: lightningrl.Run, tmp_path: Path) -> None:
    """As one whose agent ends each time before it asks."""
    with closing(sqlite3.connect(copy_of(clean, tmp_path) / "store.sqlite")) as db, db:
        db.execute("DELETE FROM calls")
    with pytest.raises(RunFolderError, match="no sampled token"):
        lightningrl.Run(tmp_path / "run").certify()


def test_a_backend_that_scores_nothing_is_judged_by_its_steps_and_its_engine_is_not_started(
    clean: lightningrl.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl, whose engine would be started on Ray, with all weights, to be asked nothing."""

    class NoScorer:
        @property
        def engine(self) -> object:
            raise AssertionError("it is not started")

        def close(self) -> None:
            pass

    monkeypatch.setattr(certificate, "build_backends", lambda *_, **__: {"policy": NoScorer})
    found = clean.certify()
    passed = {check.name: check.is_passed for check in found.checks}
    assert found.is_passed and found.recomputed == 0
    assert (passed["probabilities of 'policy'"], passed["steps of 2 versions whose weights are gone"]) == (None, True)


def copy_of(run: lightningrl.Run, folder: Path) -> Path:
    return Path(shutil.copytree(run.folder, folder / "run"))
