"""A judge behind HTTP that fails now and then: the run goes on without what it could not judge, and asks nobody twice
after `kill -9`."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from crashes import RECIPE, finish, kill_all, read_metrics, read_rollouts, resume
from posts import PostServer
from processes import TrainRun
from warm import WarmCommand

from lightningrl.types import Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store

pytestmark = pytest.mark.slow
REWARD = """
import os
import httpx

async def judge(task, output, trajectory):
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        answer = await client.post(os.environ["JUDGE_URL"], json={"rollout": trajectory.rollout_id, "output": output})
        answer.raise_for_status()
        return answer.json()["score"]
"""
SETTINGS = (
    *("rewards.judge.use=judged.py:judge", "rewards.judge.retries=1", "rewards.letters.weight=0", "validation.every=0"),
    *("loop.tasks_per_step=5", "loop.checkpoint_every=100"),
)
"""Ten rollouts a step; a resumed run begins at the beginning and replays what is stored."""


class Judge(PostServer):
    """Counts what it is asked and what it answers, by rollout. It cannot judge those that end in one of `hard`, and
    keeps those `held` waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.hard: tuple[str, ...] = ()
        self.held: tuple[str, ...] = ()
        self.asked: Counter[str] = Counter()
        self.judged: Counter[str] = Counter()

    def answer(self, body: dict[str, Any], headers: Message) -> tuple[int, bytes] | None:
        rollout = body["rollout"]
        with self.lock:
            self.asked[rollout] += 1
        if self.held and rollout.startswith(self.held):
            self.over.wait()
            return None  # whoever asked is dead
        if self.hard and rollout.endswith(self.hard):
            return 503, b"overloaded"
        with self.lock:
            self.judged[rollout] += 1
        return 200, json.dumps({"score": sum(map(ord, body["output"])) % 7 / 6}).encode()


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    with Judge().running() as judge:
        monkeypatch.setenv("JUDGE_URL", judge.url)
        yield judge


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


def begin(run: TrainRun, policy: Path, *settings: str, steps: int) -> None:
    recipe = run.folder.parent / "recipe"
    shutil.copytree(RECIPE.parent, recipe)
    (recipe / "judged.py").write_text(REWARD, encoding="utf-8")
    said = [argument for setting in (*SETTINGS, *settings) for argument in ("--set", setting)]
    run.start(str(recipe / "recipe.toml"), "--policy", str(policy), "--steps", str(steps), *said)


def read_trajectories(run: TrainRun, rollout_ids: list[str]) -> tuple[Trajectory, ...]:
    async def read() -> tuple[Trajectory, ...]:
        store = await SqlStore.open(find_store(run.folder), read_only=True)
        try:
            return await store.trajectories(rollout_ids)
        finally:
            await store.close()

    return asyncio.run(read())


def of_step(step: int) -> list[str]:
    return [f"g{5 * step + task:06d}-{member:03d}" for task in range(5) for member in range(2)]


def of_steps(task: int, member: int) -> tuple[str, ...]:
    """That rollout of each step."""
    return tuple(f"g{5 * step + task:06d}-{member:03d}" for step in range(3))


@pytest.mark.timeout(1200)
def test_a_run_goes_on_without_what_its_judge_cannot_judge_and_asks_nobody_twice_after_kill_9(
    run: TrainRun, judge: Judge, tiny_policy: Path
) -> None:
    judge.hard = of_steps(3, 1)  # a tenth
    judge.held = ("g000007", "g000009")
    held = [rollout for rollout in of_step(1) if rollout.startswith(judge.held)]
    before = [rollout for rollout in of_step(1) if rollout not in held and not rollout.endswith(judge.hard)]
    begin(run, tiny_policy, steps=3)
    run.wait_for(lambda: all(judge.asked[rollout] for rollout in of_step(1)))
    run.wait_for(lambda: all("judge" in one.rewards for one in read_trajectories(run, before)))
    kill_all(run, random.Random(0))
    judge.held = ()
    judge.over.set()
    resume(run)
    finish(run)

    hard = [of_step(step)[7] for step in range(3)]
    everyone = [rollout for step in range(3) for rollout in of_step(step)]
    assert judge.judged == {rollout: 1 for rollout in everyone if rollout not in hard}, (
        "each that could be judged was, once"
    )
    assert {rollout: judge.asked[rollout] for rollout in before} == dict.fromkeys(before, 1)
    assert judge.asked[hard[0]] == 2 * 2, "tried twice by each process"

    lines = {line["step"]: line for line in read_metrics(run.folder) if "rows" in line}
    assert [(line["rewards_failed"], line["rollouts"]) for line in lines.values()] == [(1, 10)] * 3
    assert all(line["rows"] > 0 and line["learn/loss"] is not None for line in lines.values())
    trained = [record.spec.id for record in read_rollouts(run.folder) if record.trained_step is not None]
    assert sorted(trained) == everyone
    for one in read_trajectories(run, everyone):
        if one.rollout_id in hard:
            assert one.reward is None
            assert (one.unrewarded or "").startswith("judge: HTTPStatusError: Server error '503")
        else:
            assert (one.reward, one.unrewarded) == (one.rewards["judge"], None)
            assert one.rewards["judge"] == sum(map(ord, one.output)) % 7 / 6
    said = run.said()
    assert "rewards failed 1/10" in said
    assert (
        "a reward or evidence failed on 1 rollouts; first, on 'g000003-001': judge: HTTPStatusError: Server error '503"
        in said
    )


@pytest.mark.timeout(1200)
def test_above_the_limit_the_run_stops_with_a_sentence_and_a_mended_judge_is_asked_only_what_is_missing(
    run: TrainRun, judge: Judge, tiny_policy: Path
) -> None:
    judge.hard = ("g000003-001", "g000001-000", "g000004-001")
    begin(run, tiny_policy, "outcomes.max_failed_rewards=0.2", steps=1)
    assert run.wait() == 1, run.describe()
    run.wait_for_orphans()
    said = run.said()
    assert (
        "error: step 1: a reward or evidence failed on 3 of 10 rollouts, more than outcomes.max_failed_rewards = 0.2 of them"
        in said
    )
    assert "judge: HTTPStatusError: Server error '503" in said
    assert "then go on with `lightningrl train --resume --run" in said
    assert "Traceback" not in said
    kept = [one.rollout_id for one in read_trajectories(run, of_step(0)) if "judge" in one.rewards]
    judge.hard = ()
    resume(run)
    finish(run)
    assert {rollout: judge.judged[rollout] for rollout in kept} == dict.fromkeys(kept, 1)
    assert set(judge.judged) == set(of_step(0))
    assert all(one.reward is not None for one in read_trajectories(run, of_step(0)))
