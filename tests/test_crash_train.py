"""`lightningrl train`, killed with `kill -9` at random moments: nothing acknowledged is lost, nothing is trained twice."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from crashes import (
    begin,
    check_run,
    check_same,
    finish,
    kill_all_and_resume,
    kill_one,
    kill_trainer_and_resume,
    last_step,
    newest_checkpoint,
    read_rollouts,
    wait_for_answers,
)
from processes import ROLES, Role, TrainRun, wait_for
from sizes import sized
from warm import WarmCommand

from lightningrl.types import RolloutState

SEED = 12
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
    """At full size 200 moments; prints the figures of docs/results.md (`pytest --long -s`)."""
    began = time.monotonic()
    chance = random.Random(SEED)
    counts: dict[Literal["trainer", "all"] | Role, int] = {
        "server": sized(2, 60),
        "worker": sized(2, 60),
        "trainer": sized(1, 40),
        "all": sized(1, 40),
    }
    victims = [victim for victim, count in counts.items() for _ in range(count)]
    chance.shuffle(victims)
    begin(run, tiny_policy, steps=100_000)
    for number, victim in enumerate(victims):
        if victim in ROLES or chance.random() < 0.6:
            wait_for_answers(run, chance.randint(1, 12))
            time.sleep(chance.uniform(0.0, 0.3))  # perhaps in a weight update or a checkpoint
        else:
            time.sleep(chance.uniform(0.0, 6.0))  # perhaps before it has sampled anything
        if victim == "trainer":
            kill_trainer_and_resume(run)
        elif victim == "all":
            kill_all_and_resume(run, chance)
        else:
            kill_one(run, victim, chance)
        print(f"{number + 1} {victim}: step {last_step(run)}", flush=True)
    steps = last_step(run) + 4
    kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    found = check_run(run, steps=steps)
    kills = ", ".join(f"{count} {victim}" for victim, count in counts.items())
    minutes = (time.monotonic() - began) / 60
    print(f"{len(victims)} kills ({kills}): {found}, 0 lost, 0 doubled, {minutes:.0f} minutes")
    calm = TrainRun(warm, tmp_path / "calm", tmp_path / "calm-journal")
    begin(calm, tiny_policy, steps=steps)
    finish(calm)
    check_same(run, calm)


def test_a_resumed_run_replays_stored_rollouts_instead_of_calling_the_model(run: TrainRun, tiny_policy: Path) -> None:
    begin(run, tiny_policy, "--set", "loop.checkpoint_every=5", steps=9)
    wait_for(lambda: last_step(run) >= 7, run.describe)
    run.kill_trainer()
    run.wait_for_orphans()
    assert json.loads((newest_checkpoint(run.folder) / "loop.json").read_text())["step"] == 5
    done = {record.spec.id: record for record in read_rollouts(run.folder) if record.state is RolloutState.SUCCEEDED}
    assert sum(record.spec.step in (5, 6) for record in done.values()) == 12
    answers_before = {tuple(line) for line in run.lines()}
    run.start("--resume")
    finish(run)
    after = {record.spec.id: record for record in read_rollouts(run.folder)}
    assert {name: after[name].attempts for name in done} == {name: record.attempts for name, record in done.items()}
    new = {tuple(line) for line in run.lines()} - answers_before
    assert new, "steps 8 and 9 need new calls"
    assert not {line[1].split("/")[0] for line in new} & done.keys()
    check_run(run, steps=9)
