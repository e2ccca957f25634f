"""`lightningrl train`, killed with `kill -9` at random moments: nothing acknowledged is lost, nothing is trained
twice."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from crashes import (
    RECIPE,
    Victim,
    begin,
    check_run,
    check_same,
    draw,
    finish,
    kill,
    kill_all,
    kill_trainer_and_resume,
    last_step,
    newest_checkpoint,
    read_completions,
    read_metrics,
    read_rollouts,
    resume,
    tell_kills,
    wait_for_answers,
)
from jumping_clock import find_faketime
from processes import ROLES, Role, TrainRun
from sizes import PATIENCE_S, sized
from warm import WarmCommand

from lightningrl.types import RolloutMode, RolloutState
from lightningrl_training.run_folder import RunFolder

SEED = 12
BEYOND_LEASE_S = 40.0
"""A worker's lease is of 30 s."""
pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


@pytest.mark.timeout(4 * 3600)
def test_kills_at_random_moments_lose_nothing_and_train_nothing_twice(
    run: TrainRun, tmp_path: Path, warm: WarmCommand, tiny_policy: Path
) -> None:
    """At full size 200 moments; prints the figures of docs/reference/results.md (`pytest --long -s`)."""
    began = time.monotonic()
    chance = random.Random(SEED)
    counts: dict[Victim, int] = {
        "server": sized(1, 60),
        "worker": sized(1, 60),
        "trainer": sized(0, 39),  # and the last one
        "all": sized(1, 40),
    }
    victims = draw(counts, chance)
    begin(run, tiny_policy, steps=100_000)
    for victim in victims:
        if victim in ROLES or chance.random() < 0.6:
            wait_for_answers(run, chance.randint(1, 12))
            time.sleep(chance.uniform(0.0, 0.3))  # perhaps in a weight update or a checkpoint
        else:
            time.sleep(chance.uniform(0.0, 6.0))  # perhaps before it has sampled anything
        kill(run, victim, chance)
    wait_for_answers(run, chance.randint(1, 12))
    steps = last_step(run) + sized(2, 4)
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    found = check_run(run, steps=steps)
    tell_kills([*victims, "trainer"], found, began)
    if sized(False, True):
        calm = TrainRun(warm, tmp_path / "calm", tmp_path / "calm-journal")
        begin(calm, tiny_policy, steps=steps)
        finish(calm)
        check_same(run, calm)


@pytest.mark.timeout(4 * 3600)
def test_asynchronous_steps_lose_nothing_and_train_nothing_twice_and_nothing_that_is_too_old(
    run: TrainRun, tiny_policy: Path
) -> None:
    """At full size 20 moments."""
    chance = random.Random(SEED)
    loop = ["--set", "loop.asynchronous=true", "--set", "loop.max_staleness=2"]
    counts: dict[Victim, int] = {
        "server": sized(0, 4),
        "worker": sized(0, 4),
        "trainer": sized(1, 7),
        "all": sized(1, 5),
    }
    victims = draw(counts, chance)
    begin(run, tiny_policy, *loop, steps=100_000)
    for victim in victims:
        wait_for_answers(run, chance.randint(12, 40))
        time.sleep(chance.uniform(0.0, 0.3))
        kill(run, victim, chance)
    wait_for_answers(run, 12)
    steps = last_step(run) + 4
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    check_run(run, steps=steps, max_staleness=2)
    lines = read_metrics(run.folder)
    assert any(line.get("learn/staleness_mean") for line in lines), "steps were collected while others were learned"
    print(f"{len(victims) + 1} kills, {steps} steps")


# ------------------------------------------------------------------ what is not a kill


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, warm: WarmCommand, tiny_policy: Path) -> TrainRun:
    """A run that was killed whole, some steps after its newest checkpoint. Tests take copies."""
    folder = tmp_path_factory.mktemp("killed")
    run = TrainRun(warm, folder / "run", folder / "journal")
    try:
        begin(run, tiny_policy, "--set", "loop.checkpoint_every=3", steps=100_000)
        run.wait_for(lambda: last_step(run) >= 5)
        kill_all(run, random.Random(SEED))
        run.wait_for_orphans()
    finally:
        run.close()
    assert json.loads((newest_checkpoint(run.folder) / "loop.json").read_text())["step"] == 3
    return run


@pytest.fixture
def copy(killed: TrainRun, run: TrainRun) -> TrainRun:
    shutil.copytree(killed.folder, run.folder)
    shutil.copy(killed.journal, run.journal)
    return run


def refused(run: TrainRun, *arguments: str) -> str:
    """The one sentence with which `lightningrl train` ends."""
    run.console.unlink(missing_ok=True)
    run.start(*arguments)
    assert run.wait() == 1, run.describe()
    run.wait_for_orphans()
    said = run.said()
    assert "Traceback" not in said, said
    assert said.count("error: ") == 1, said
    return said.partition("error: ")[2]


def test_a_resumed_run_replays_stored_rollouts_instead_of_calling_the_model(copy: TrainRun) -> None:
    done = {record.spec.id: record for record in read_rollouts(copy.folder) if record.state is RolloutState.SUCCEEDED}
    assert sum(record.spec.step in (3, 4) for record in done.values()) == 12
    answers_before = {tuple(line) for line in copy.lines()}
    copy.start("--resume", "--steps", "7")
    finish(copy)
    after = {record.spec.id: record for record in read_rollouts(copy.folder)}
    assert {name: after[name].attempts for name in done} == {name: record.attempts for name, record in done.items()}
    new = {tuple(line) for line in copy.lines()} - answers_before
    assert new, "steps 6 and 7 need new calls"
    assert not {line[1].split("/")[0] for line in new} & done.keys()
    check_run(copy, steps=7)


def test_a_write_ahead_log_that_was_deleted_is_told_of_and_no_step_is_trained_twice(copy: TrainRun) -> None:
    for end in ("-wal", "-shm"):
        (copy.folder / f"store.sqlite{end}").unlink()
    steps = sized(3, 6)
    copy.start("--resume", "--steps", str(steps))
    finish(copy)
    assert re.search(
        r"has lost its records of \d of 5 steps \(\d to 5\): it or its write-ahead log was deleted or cut short; the weights keep what "
        r"they learned up to step 3, and no step is trained twice; to have the records, put the files back and resume again",
        copy.said(),
    )
    assert [line["step"] for line in read_metrics(copy.folder) if "reward" in line] == list(range(1, steps + 1))
    state = json.loads((newest_checkpoint(copy.folder) / "loop.json").read_text())
    assert (state["step"], state["rollouts"]) == (steps, steps * 6)


def test_a_store_that_was_cut_short_is_named(copy: TrainRun) -> None:
    store = copy.folder / "store.sqlite"
    (copy.folder / "store.sqlite-wal").unlink()
    os.truncate(store, store.stat().st_size // 2)
    assert f"the store '{store}' is no readable SQLite database" in refused(copy, "--resume")


def test_a_folder_in_use_a_changed_recipe_and_a_store_in_use_are_refused(copy: TrainRun) -> None:
    folder, _ = RunFolder.resume(copy.folder, {})
    assert f"run folder '{copy.folder}' is in use by process {os.getpid()}" in refused(copy, "--resume")
    folder.close()
    assert "has changed since it started: 'loop.group_size' was 2, is 3" in refused(
        copy, "--resume", "--set", "loop.group_size=3"
    )
    with (copy.folder / "store.sqlite-lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"the store '{copy.folder / 'store.sqlite'}' is in use by another process; stop it first" in refused(
            copy, "--resume"
        )
    if sized(False, True):
        copy.start("--resume", "--steps", "5")
        finish(copy)
        check_run(copy, steps=5)


@pytest.mark.long
def test_a_second_trainer_leaves_the_first_alone(run: TrainRun, tiny_policy: Path, warm: WarmCommand) -> None:
    begin(run, tiny_policy, steps=2)
    second = TrainRun(warm, run.folder, run.journal.with_name("second"))
    second.console = run.console.with_name("second.console")
    for arguments in (
        (str(RECIPE), "--policy", str(tiny_policy)),
        (str(RECIPE), "--policy", str(tiny_policy), "--overwrite"),
        ("--resume",),
    ):
        assert f"run folder '{run.folder}' is in use by process {run.trainer.pid}" in refused(second, *arguments)
    finish(run)
    check_run(run, steps=2)


@pytest.mark.long
def test_a_store_that_somebody_else_locks_for_long_ends_the_run_and_loses_nothing(
    run: TrainRun, tiny_policy: Path
) -> None:
    """Before the first checkpoint, too."""
    begin(run, tiny_policy, steps=2)
    wait_for_answers(run, 3)
    other = sqlite3.connect(run.folder / "store.sqlite", isolation_level=None, timeout=PATIENCE_S)
    other.execute("BEGIN IMMEDIATE")
    assert run.wait() == 1, run.describe()
    run.wait_for_orphans()
    other.close()
    assert (
        f"the store '{run.folder / 'store.sqlite'}' is in use by another process; stop it first"
        in run.said().partition("error: ")[2]
    )
    run.start("--resume")
    finish(run)
    check_run(run, steps=2)


@pytest.mark.long
def test_pauses_beyond_the_lease_end_no_attempt_but_that_of_a_worker_which_stood_still_alone(
    run: TrainRun, tiny_policy: Path
) -> None:
    begin(run, tiny_policy, steps=100_000)
    for roles in (("server",), ("trainer",), ("trainer", "server", "worker")):
        wait_for_answers(run, 7)
        pids = [run.trainer.pid] if "trainer" in roles else []
        pids += [child.pid for role in ROLES if role in roles for child in run.children(role)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(BEYOND_LEASE_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    wait_for_answers(run, 7)
    assert not expired(run)
    worker = run.children("worker")[0]
    os.kill(worker.pid, signal.SIGSTOP)
    run.wait_for(lambda: bool(expired(run)))
    os.kill(worker.pid, signal.SIGCONT)
    wait_for_answers(run, 7)
    steps = last_step(run) + 2
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    check_run(run, steps=steps)


@pytest.mark.long
def test_a_clock_that_jumps_ends_no_attempt(
    run: TrainRun, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of server and workers, by a day, forth and back; the server is killed between."""
    library = find_faketime()
    clock = tmp_path / "clock"

    def jump(seconds: int) -> None:
        clock.with_suffix(".new").write_text(f"{seconds:+d}s\n")
        clock.with_suffix(".new").replace(clock)

    jump(0)
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        environment.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
        environment.setenv("FAKETIME_NO_CACHE", "1")
        environment.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        begin(run, tiny_policy, steps=100_000)
    for day in (1, 0, 1, -1, 1, 0):
        wait_for_answers(run, 5)
        jump(day * 86_400)
    for day in (-1, 1):
        wait_for_answers(run, 5)
        run.kill(run.children("server")[0])
        jump(day * 86_400)
    wait_for_answers(run, 5)
    assert not expired(run)
    steps = last_step(run) + 2
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    check_run(run, steps=steps)


def expired(run: TrainRun) -> list[str]:
    """Rollouts of which an attempt's lease ended."""
    return [
        record.spec.id
        for record in read_rollouts(run.folder)
        for one in record.attempts
        if "lease expired" in (one.error or "")
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a small disk: run as root where tmpfs can be mounted")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("room", [0, 300 * 1024], ids=["none", "for_no_checkpoint"])
def test_a_full_disk_ends_the_run_in_a_sentence_and_loses_nothing(
    small_disk: Path, tmp_path: Path, warm: WarmCommand, tiny_policy: Path, room: int
) -> None:
    run = TrainRun(warm, small_disk / "run", tmp_path / "journal")
    run.console = tmp_path / "console"
    filler = small_disk / "filler"
    try:
        begin(run, tiny_policy, steps=8)
        run.wait_for(lambda: last_step(run) >= 2)
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        os.truncate(filler, filler.stat().st_size - room)
        assert run.wait() == 1, run.describe()
        said = run.said()
        assert "Traceback" not in said, said
        assert said.count("error: ") == 1, said
        sentences = (
            f"no room on the disk for the store '{run.folder / 'store.sqlite'}'; nothing of this request was kept: free some space",
            "cannot be written: [Errno 28] No space left on device; nothing of it was kept: mend that, then run again (--resume)",
            "metrics cannot be written to",
        )
        assert any(sentence in said for sentence in sentences), said
        filler.unlink()
        resume(run)
        finish(run)
        check_run(run, steps=8)
    finally:
        run.close()


@pytest.mark.timeout(3600)
def test_kills_in_mid_branch_lose_nothing(run: TrainRun, tiny_policy: Path) -> None:
    """Each while a branch runs; a branch that was interrupted repeats its calls again, and is made once."""
    chance = random.Random(SEED)
    branches = (
        "--set",
        "credit.use=branches",
        "--set",
        "credit.options.samples=2",
        "--set",
        "credit.options.equal=true",
    )
    begin(run, tiny_policy, *branches, steps=100_000)
    victims: list[Literal["trainer", "all"] | Role] = ["server", "worker", "trainer", "all"]
    for victim in victims * sized(1, 10):
        wait_for_answers(run, 1)
        run.wait_for(
            lambda: any(
                one.spec.branch is not None and one.state is RolloutState.RUNNING for one in read_rollouts(run.folder)
            )
        )
        kill(run, victim, chance)
    steps = last_step(run) + 2
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    check_run(run, steps=steps)
    check_branches(run)


def check_branches(run: TrainRun) -> None:
    """Two at each state between two calls of every rollout, none diverged, and what they repeat is what was
    recorded."""
    records = read_rollouts(run.folder)
    branches = [record.spec for record in records if record.spec.branch is not None]
    trained = [record.spec.id for record in records if record.spec.mode is RolloutMode.TRAIN]
    assert sorted(spec.id for spec in branches) == sorted(
        f"{name}.after-{calls}-{number:02d}" for name in trained for calls in (1, 2) for number in (0, 1)
    )
    completions = asyncio.run(read_completions(run.folder))
    for spec in branches:
        assert spec.branch is not None
        kept = spec.branch.calls
        assert completions[spec.id][:kept] == completions[spec.branch.rollout_id][:kept]
