"""Credit that asks, in a whole run: a judge that ranks groups and fails on one of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from crashes import RECIPE, finish, kill_all, read_metrics, resume
from posts import PostServer
from processes import TrainRun
from warm import WarmCommand

from lightningrl.types import OtherCallKind, Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store

pytestmark = pytest.mark.slow
SETTINGS = (
    *(
        "credit.use=judge",
        "credit.options.per=group",
        "credit.options.orders=1",
        "judge.model=grader",
        "judge.retries=0",
        "outcomes.max_failed_rewards=0.5",
    ),
    *("validation.every=0", "loop.checkpoint_every=100"),
)
"""Three groups of two rollouts a step."""
SAID = "the judge's own words"


class Judge(PostServer):
    """Scores the first rollout of a group 1 and the second 0. It fails on the `hard` task, and keeps the question on
    the `held` one."""

    def __init__(self) -> None:
        super().__init__()
        self.hard = self.held = ""
        self.asked: Counter[str] = Counter()
        self.words: list[str] = []
        """Tasks, in the order in which they were first asked about."""

    def answer(self, body: dict[str, Any], headers: Message) -> tuple[int, bytes] | None:
        (word,) = set(re.findall(r'\{"task": "(word \d+)"\}', body["messages"][-1]["content"]))
        with self.lock:
            self.asked[word] += 1
            self.words += [] if word in self.words else [word]
            if len(self.words) == 1 and not self.hard:
                self.hard = word
            elif len(self.words) == 3 and not self.held:
                self.held = word
        if word == self.held and not self.over.is_set():
            self.over.wait()
            return None  # whoever asked is dead
        grades = [{"rollout": number, "why": SAID, "grade": float(number == 1)} for number in (1, 2)]
        said = {"choices": [{"message": {"content": json.dumps({"grades": grades})}}]}
        return (503, b"overloaded") if word == self.hard else (200, json.dumps(said).encode())


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge().running() as judge:
        yield judge


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


def read_trajectories(run: TrainRun, groups: int) -> tuple[Trajectory, ...]:
    async def read() -> tuple[Trajectory, ...]:
        store = await SqlStore.open(find_store(run.folder), read_only=True)
        try:
            return await store.trajectories(
                [f"g{group:06d}-{member:03d}" for group in range(groups) for member in range(2)]
            )
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.mark.timeout(1200)
def test_a_run_goes_on_without_the_group_that_its_judge_cannot_rank_and_asks_nobody_twice_after_kill_9(
    run: TrainRun, judge: Judge, tiny_policy: Path
) -> None:
    url = f"http://127.0.0.1:{judge.server_port}/v1"
    said = [argument for setting in (*SETTINGS, f"judge.base_url={url}") for argument in ("--set", setting)]
    run.start(str(RECIPE), "--policy", str(tiny_policy), "--steps", "2", *said)
    run.wait_for(lambda: bool(judge.held))
    run.wait_for(lambda: sum(one.evidence is not None for one in read_trajectories(run, 3)) == 2)
    kill_all(run, random.Random(0))
    judge.over.set()
    resume(run)
    finish(run)

    first_step, ranked = judge.words[:3], [word for word in judge.words if word != judge.hard]
    assert len(judge.words) == 6
    assert judge.asked[judge.hard] == 2, "it failed in each process"
    assert {word: judge.asked[word] for word in ranked} == {word: 2 if word == judge.held else 1 for word in ranked}
    trajectories = read_trajectories(run, 6)
    for one in trajectories:
        if one.task.input == judge.hard:
            assert one.reward is None
            assert (one.unrewarded or "").startswith("credit: JudgeError: the judge at")
        else:
            assert one.evidence is not None
            assert one.evidence.calls["grade"].tolist() == [float(one.rollout_id.endswith("0"))] * 3
    judged = [call for one in trajectories for call in one.other_calls if call.kind is OtherCallKind.JUDGE]
    assert sum(SAID in json.dumps(call.answer) for call in judged) == 5
    lines = [line for line in read_metrics(run.folder) if "rows" in line]
    assert [(line["rewards_failed"], line["rollouts"]) for line in lines] == [(2, 6), (0, 6)]
    assert [line["groups_without_signal"] for line in lines] == [1, 0]
    taught = sum(len(call.completion_ids) for one in trajectories if one.reward is not None for call in one.transitions)
    assert sum(line["trained_tokens"] for line in lines) == taught, (
        "the policy's own tokens, and nothing that the judge said"
    )
    assert set(first_step) == {one.task.input for one in trajectories[:6]}
