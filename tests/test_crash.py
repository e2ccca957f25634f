"""Crash safety, end to end: `kill -9` of server, workers and trainer at random moments loses nothing and trains nothing twice.

agent ─► journal: every answer it received, every result that was acknowledged      (fsync before it goes on)
test  ─► kill -9, again and again; `--resume` after a trainer's death
      ─► journal ⊆ store, ledger = the plan, weights = one pass over the stored rollouts
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from processes import Role, TrainRun, wait_for
from sizes import sized
from warm import WarmCommand

from lightningrl.config import Recipe
from lightningrl.plugins import load_plugins
from lightningrl.store import SqlStore
from lightningrl.store.protocol import RolloutFilter, RolloutRecord
from lightningrl.training.parts import Parts
from lightningrl.training.policies import load_backend
from lightningrl.training.run_folder import RunFolder
from lightningrl.training.tasks import plan_step
from lightningrl.types import Outcome, RolloutState

RECIPE = Path(__file__).parent / "support" / "crash" / "recipe.toml"
SEED = 12
pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


def test_kills_at_random_moments_lose_nothing_and_train_nothing_twice(run: TrainRun, tiny_policy: Path) -> None:
    """At full size more than twenty kills."""
    chance = random.Random(SEED)
    steps = sized(12, 36)
    counts: dict[Literal["trainer"] | Role, int] = {"trainer": sized(2, 6), "server": sized(2, 8), "worker": sized(2, 8)}
    victims = [victim for victim, count in counts.items() for _ in range(count)]
    chance.shuffle(victims)
    begin(run, tiny_policy, steps=steps)
    kills = []
    for victim in victims:
        if victim == "trainer" and chance.random() < 0.4:
            time.sleep(chance.uniform(0.0, 6.0))  # perhaps before it has sampled anything
        else:
            wait_for_answers(run, chance.randint(1, 12))
            time.sleep(chance.uniform(0.0, 0.3))  # perhaps in a weight update or a checkpoint
        kills.append((victim, last_step(run)))
        if victim == "trainer":
            kill_trainer_and_resume(run)
        else:
            kill_one(run, victim, chance)
            if chance.random() < 0.25:  # and what takes its place, perhaps before it is ready
                kills.append((victim, last_step(run)))
                kill_one(run, victim, chance)
    assert len(kills) >= len(victims)
    assert kills[-1][1] < steps, f"the run was over before the last kill: {kills}"
    finish(run)
    check_run(run, steps=steps)


def test_a_resumed_run_replays_stored_rollouts_instead_of_calling_the_model(run: TrainRun, tiny_policy: Path) -> None:
    begin(run, tiny_policy, "--set", "loop.checkpoint_every=5", steps=9)
    wait_for(lambda: last_step(run) >= 7, run.describe)
    run.kill_trainer()
    wait_for(lambda: not run.orphans(), run.describe)
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


# ------------------------------------------------------------------ acting


def begin(run: TrainRun, policy: Path, *arguments: str, steps: int) -> None:
    run.start(str(RECIPE), "--policy", str(policy), "--steps", str(steps), *arguments)
    wait_for(lambda: (run.folder / "recipe.json").exists() or run.trainer.poll() is not None, run.describe)


def wait_for_answers(run: TrainRun, count: int) -> None:
    """Until agents have received `count` more answers; the run must still be going."""
    aim = len(run.lines()) + count

    def ready() -> bool:
        assert run.trainer.poll() is None, f"the trainer ended with {run.trainer.returncode}\n{run.describe()}"
        run.children("worker")
        return len(run.lines()) >= aim

    wait_for(ready, run.describe)


def kill_one(run: TrainRun, role: Role, chance: random.Random) -> None:
    """One process of that role, as soon as there is any."""
    wait_for(lambda: bool(run.children(role)), run.describe)
    run.kill(chance.choice(run.children(role)))


def kill_trainer_and_resume(run: TrainRun) -> None:
    run.kill_trainer()
    wait_for(lambda: not run.orphans(), lambda: f"orphans: {run.orphans()}\n{run.describe()}")
    run.start("--resume")


def finish(run: TrainRun) -> None:
    assert run.wait() == 0, run.describe()
    wait_for(lambda: not run.orphans(), lambda: f"orphans: {run.orphans()}\n{run.describe()}")


# ------------------------------------------------------------------ looking


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(run: TrainRun) -> int:
    return max((line["step"] for line in read_metrics(run.folder)), default=0)


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*/loop.json")).parent


def store_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.sqlite'}"


def read_rollouts(folder: Path) -> tuple[RolloutRecord, ...]:
    async def read() -> tuple[RolloutRecord, ...]:
        store = await SqlStore.open(store_url(folder))
        try:
            return await store.list_rollouts(RolloutFilter(limit=100_000))
        finally:
            await store.close()

    return asyncio.run(read())


def check_run(run: TrainRun, *, steps: int) -> None:
    """Nothing acknowledged is lost, everything planned is trained once, and the weights say the same."""
    asyncio.run(check_store(run, steps))
    lines = read_metrics(run.folder)
    assert [line["step"] for line in lines if "reward" in line] == list(range(1, steps + 1))
    validated = [line["step"] for line in lines if "validation/reward" in line]
    assert validated == sorted({0, *range(7, steps + 1, 7), steps})
    trained = [line for line in lines if "rows" in line]
    versions = list(accumulate(1 if line["rows"] else 0 for line in trained))
    assert [line["policy_version"] for line in trained] == versions, "each step with a signal made one version"
    assert {line["learn/staleness_max"] for line in lines if "learn/staleness_max" in line} == {0.0}, "sampled by older weights"
    state = json.loads((newest_checkpoint(run.folder) / "loop.json").read_text())
    assert (state["step"], state["rollouts"]) == (steps, steps * 6)


async def check_store(run: TrainRun, steps: int) -> None:
    folder, recipe, _ = RunFolder.resume(run.folder, {})
    parts = Parts.build(recipe, load_plugins())
    store = await SqlStore.open(folder.store_url)
    try:
        await check_journal(run, store)
        ledger = await store.steps()
        assert [record.step for record in ledger] == list(range(1, steps + 1))
        planned = [sorted(spec.id for spec in plan_step(parts.tasks.train, recipe, step)) for step in range(steps)]
        assert [sorted(record.rollout_ids) for record in ledger] == planned
        trained = [name for record in ledger for name in record.rollout_ids]
        assert len(trained) == len(set(trained)) == steps * 6
        counts = await store.counts()
        assert dict(counts.states) == {RolloutState.SUCCEEDED: sum(counts.states.values())}
        await check_weights(folder, recipe, parts, store, planned)
    finally:
        await store.close()
        folder.close()


async def check_journal(run: TrainRun, store: SqlStore) -> None:
    """What was acknowledged to an agent or a worker is in the store."""
    calls: dict[tuple[str, int], set[str]] = {}
    for kind, *words in run.lines():
        if kind == "result":
            rollout_id, attempt, outcome = words[0], int(words[1]), Outcome(words[2])
            record = await store.rollout(rollout_id)
            assert record.attempts[attempt - 1].outcome is outcome, f"the result of {rollout_id}/{attempt} is lost"
            continue
        rollout_id, number, _ = words[0].split("/")
        place = (rollout_id, int(number))
        if place not in calls:
            calls[place] = {call.transition.id for call in await store.calls(*place)}
        assert words[0] in calls[place], f"call {words[0]} is lost"
    assert calls


async def check_weights(folder: RunFolder, recipe: Recipe, parts: Parts, store: SqlStore, planned: list[list[str]]) -> None:
    """The last checkpoint's weights are those of one undisturbed pass over the stored rollouts."""
    found, _ = folder.latest() or (None, None)
    assert found is not None
    build = parts.backends[recipe.policy.name]
    expected, disturbed = build(), build()
    try:
        load_backend(disturbed, found, recipe.policy.name)
        for names in planned:
            trajectories = await parts.scorer.reward(await store.trajectories(names))
            scored = parts.scorer.credit(trajectories)
            if scored.samples:
                await asyncio.to_thread(expected.learn, scored.samples)
        ours, theirs = (backend.learner.parameters for backend in (expected, disturbed))  # type: ignore[attr-defined]
        assert expected.engine.info.version == disturbed.engine.info.version
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=1e-5)
    finally:
        expected.close()
        disturbed.close()
