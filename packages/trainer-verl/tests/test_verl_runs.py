"""Whole runs of `lightningrl train` on verl: they learn, survive kills, keep two replicas and two ranks, and run ahead
of learning."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.cluster_utils import Cluster
from sizes import PATIENCE_S, sized
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
TWO_CALLS = Path(__file__).parent / "two_calls"
EXACT = 1e-5
"""Most that the probability of a sampled token may differ between replica and trainer."""


class Run:
    """A `lightningrl train` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "lightningrl", "train", *arguments]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder.parent
            )

    def steps(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return [record for record in (json.loads(line) for line in lines if line.endswith("}")) if "seconds" in record]

    def wait_for_step(self, step: int, timeout_s: float = PATIENCE_S) -> None:
        self._wait(lambda: any(record["step"] >= step for record in self.steps()), f"step {step}", timeout_s)

    def wait_for(self, found: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        return self._wait(found, what, timeout_s)

    def finish(self, timeout_s: float = PATIENCE_S) -> list[dict[str, float]]:
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {timeout_s:g} s:\n{self.tail()}")
        assert status == 0, self.tail()
        return self.steps()

    def family(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def kill_after_checkpoint(self, step: int) -> None:
        """Kill -9 once this step is saved (its metrics are written before); everything that the run has started ends
        with it."""
        self.wait_for((self.folder / "checkpoints" / f"step-{step:06d}").is_dir, f"checkpoint of step {step}")
        family = self.family()
        self.kill()
        psutil.wait_procs(family, timeout=PATIENCE_S)  # Ray looks for its head now and then
        orphans = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not orphans

    def export(self) -> dict[str, torch.Tensor]:
        """The weights that `lightningrl export` writes."""
        weights = self.folder.with_name("weights")
        command = [
            sys.executable,
            "-m",
            "lightningrl",
            "export",
            str(weights),
            "--run",
            str(self.folder),
            "--step",
            "newest",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        exported: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(weights).state_dict()
        return exported

    def certificate(self) -> dict[str, Any]:
        """What `lightningrl certify` says of it; fails where a check does."""
        command = [sys.executable, "-m", "lightningrl", "certify", str(self.folder), "--json"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-5000:]

    def rollouts(self) -> list[str]:
        """Ids of all training rollouts."""
        with sqlite3.connect(f"file:{self.folder / 'store.sqlite'}?mode=ro", uri=True) as store:
            return [row[0] for row in store.execute("SELECT id FROM rollouts WHERE mode = 'train'")]

    def _wait(self, found: Callable[[], Any], what: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            seen = found()
            if seen:
                return seen
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with status {self.process.returncode} before {what}:\n{self.tail()}")
            time.sleep(0.2)
        pytest.fail(f"no {what} in {timeout_s:g} s:\n{self.tail()}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str, name: str = "run") -> Run:
        runs.append(Run(tmp_path / name, *arguments, "--run", str(tmp_path / name)))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def settings(**values: Any) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


def test_the_sql_agent_is_trained_by_verl_with_vllm_and_goes_on_after_kill_9(start: Callable[..., Run]) -> None:
    example = str(ROOT / "examples" / "text_to_sql")
    small = settings(
        loop__tasks_per_step=8, loop__checkpoint_every=1, validation__tasks=4, learner__max_tokens_per_microbatch=65536
    )
    run = start(example, "--backend", "verl", "--steps", "4", *small)
    run.kill_after_checkpoint(2)
    before = {record["step"]: record for record in run.steps()}
    steps = start("--resume").finish()
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record == steps[int(step) - 1] for step, record in before.items() if step <= 2), (
        "what was learned is not learned again"
    )
    assert all(record["learn/probability_gap_max"] <= EXACT for record in steps), (
        "the replicas serve the trainer's weights after each update"
    )
    assert [record["policy_version"] for record in steps] == [1, 2, 3, 4]
    assert has_learned(run, f"{example}/starter")
    certificate = run.certificate()
    assert certificate["trained"] > 0
    assert [check["is_passed"] for check in certificate["checks"]] == [None, True, True, True, True], (
        "verl scores no tokens"
    )


def has_learned(run: Run, policy: str) -> bool:
    """Whether the exported weights have the policy's names and other values."""
    exported, start = run.export(), AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert exported.keys() == start.keys()
    return any(not torch.equal(exported[name], start[name]) for name in exported)


def test_two_ranks_with_two_replicas_learn_are_killed_and_go_on_to_an_export(
    start: Callable[..., Run], policy: str
) -> None:
    """The run through everything that CI makes; the others look at each thing more closely."""
    small = settings(backends__verl__gpus_per_node=2, loop__tasks_per_step=8)
    run = start(str(TWO_CALLS), "--policy", policy, "--steps", "3", *small)
    run.kill_after_checkpoint(2)
    before = {record["step"]: record for record in run.steps()}
    steps = start("--resume").finish()
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record == steps[int(step) - 1] for step, record in before.items() if step <= 2), (
        "what was learned is not learned again"
    )
    assert [record["policy_version"] for record in steps] == [1, 2, 3]
    assert all(record["learn/probability_gap_max"] <= EXACT for record in steps), (
        "replicas serve the weights of the last update"
    )
    assert all(record["rollouts"] == 32 == record.get("outcome/succeeded") for record in steps), run.tail()
    assert len(run.rollouts()) == 3 * 32
    assert has_learned(run, policy)


def test_one_of_two_replicas_dies_in_mid_step_and_nothing_is_lost(start: Callable[..., Run], policy: str) -> None:
    run = start(
        str(TWO_CALLS),
        "--policy",
        policy,
        *settings(backends__verl__gpus_per_node=2, loop__steps=4, loop__tasks_per_step=16),
    )
    run.wait_for_step(1)
    replicas = run.wait_for(
        lambda: [process for process in psutil.process_iter() if "vLLMHttpServer" in " ".join(process.cmdline())],
        "replicas",
    )
    assert len(replicas) == 2, "one replica for each of two learner ranks"
    os.kill(replicas[0].pid, signal.SIGKILL)
    steps = run.finish()
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(record["rollouts"] == 64 and record.get("outcome/succeeded") == 64 for record in steps), run.tail()
    assert all(record["learn/probability_gap_max"] <= EXACT for record in steps)
    assert len(run.rollouts()) == 4 * 64
    assert "died" in run.tail()


SEPARATE = {"mode": "separate_async", "rollout_nodes": 1, "rollout_gpus_per_node": 1}
SEPARATE_EVERY_OTHER = {**SEPARATE, "sync_every": 2}
COLOCATED = {"mode": "colocate_async"}


@pytest.mark.parametrize(
    "layout", [SEPARATE, SEPARATE_EVERY_OTHER, COLOCATED], ids=["separate", "separate-every-other", "colocated"]
)
def test_rollouts_run_ahead_of_learning_and_the_staleness_is_measured(
    start: Callable[..., Run], policy: str, layout: dict[str, Any]
) -> None:
    arguments = settings(
        **{f"backends__verl__{name}": value for name, value in layout.items()}, learner__importance_cap=2.0
    )
    arguments += settings(loop__tasks_per_step=8, loop__max_staleness=2)
    steps = start(str(TWO_CALLS), "--policy", policy, "--steps", "6", *arguments).finish()
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    every = layout.get("sync_every", 1)
    assert [record["policy_version"] for record in steps] == [step // every for step in range(1, 7)], (
        "a version is a transfer of weights"
    )
    assert steps[0]["learn/staleness_max"] == 0
    assert all(record["learn/staleness_max"] <= 2 for record in steps)
    transfers = [record for record in steps if record["step"] % every == 0]
    assert all(0.5 < record["learn/importance"] < 1.5 for record in transfers), "verl's metrics come with each transfer"
    if layout is not COLOCATED:  # those replicas sleep while verl learns, so few calls or none are stale
        assert max(record["learn/staleness_max"] for record in steps) >= 1, (
            "a step is collected while an earlier one is learned"
        )
        assert any(record["learn/importance"] != pytest.approx(1.0, abs=1e-5) for record in transfers), (
            "stale tokens are weighed"
        )


@pytest.mark.timeout(sized(1800, 3 * 3600))
def test_asynchronous_steps_are_killed_and_go_on_and_train_nothing_twice(
    start: Callable[..., Run], policy: str
) -> None:
    kills = sized(2, 20)
    every = list(range(1, 2 * kills + 3))
    layout = {f"backends__verl__{name}": value for name, value in COLOCATED.items()}
    loop = settings(loop__tasks_per_step=8, loop__max_staleness=2, loop__asynchronous="true", loop__checkpoint_every=1)
    run = start(str(TWO_CALLS), "--policy", policy, "--steps", str(len(every)), *settings(**layout), *loop)
    for step in every[1:-1:2]:
        run.kill_after_checkpoint(step)
        run = start("--resume")
    steps = run.finish()
    assert [record["step"] for record in steps] == [record["policy_version"] for record in steps] == every
    assert all(record["learn/staleness_max"] <= 2 for record in steps)
    with sqlite3.connect(f"file:{run.folder / 'store.sqlite'}?mode=ro", uri=True) as store:
        trained = store.execute(
            "SELECT step, count(*), count(DISTINCT rollout_pk) FROM trained GROUP BY step ORDER BY step"
        ).fetchall()
        assert trained == [(step, 32, 32) for step in every]
        assert store.execute("SELECT count(DISTINCT rollout_pk) FROM trained").fetchone() == (len(every) * 32,)


def is_actors_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return (
            "lightningrl_client.runtime.worker" in process.cmdline()
            and parent is not None
            and "ray::" in " ".join(parent.cmdline())
        )
    return False


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "started"])
def test_agents_and_verl_share_a_cluster(
    start: Callable[..., Run], policy: str, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """The workers come first: they connect the process to the cluster, or start one, and leave it before verl does."""
    head = {"num_cpus": 32, "num_gpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=joins, head_node_args=head if joins else None)
    try:
        if joins:
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        run = start(
            str(TWO_CALLS), "--policy", policy, "--steps", "2", "--workers", "ray:2", *settings(loop__tasks_per_step=8)
        )
        run.wait_for(
            lambda: any(is_actors_worker(process) for process in psutil.process_iter()), "worker of a Ray actor"
        )
        steps = run.finish()
    finally:
        cluster.shutdown()
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["rollouts"] == 32 == record.get("outcome/succeeded") for record in steps), run.tail()
    assert all(record["learn/probability_gap_max"] <= EXACT for record in steps)
