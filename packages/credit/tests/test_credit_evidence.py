"""A credit assigner that asks a judge first: bounded, patient, within a budget; what it found is kept, and nobody is
asked twice."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from posts import PostServer

from lightningrl.errors import ConfigError, PluginError, RewardError
from lightningrl.loading import load_callable
from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.types import OtherCallKind, Outcome, Trajectory
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_credit.scoring import score_of
from lightningrl_server.store import SqlStore
from lightningrl_testing.credit_conformance import CreditConformance
from lightningrl_testing.store_conformance import leased, make_call, make_spec
from lightningrl_training import judge as judging
from lightningrl_training.build import Parts

FILE = '''
import asyncio
import numpy as np
from lightningrl import CreditAssigner, Evidence
from lightningrl import mean

def tasks():
    return [{"id": "t", "input": 1}]

def answer(number):
    return number

def right(task, output, trajectory):
    return output

class Odd(CreditAssigner):
    requires = frozenset()

    def __init__(self, share):
        self.share = share

    def assign(self, group):
        raise NotImplementedError

    def state(self):
        return {1, 2}

    def load(self, state):
        raise NotImplementedError

class Grades(CreditAssigner):
    """A = R - mean + share · the judge's grade of the call."""

    requires = frozenset({"group", "judge"})

    def __init__(self, *, share=0.0):
        self.share = share

    async def score(self, trajectory, ask):
        grades = [float(await ask(f"{trajectory.rollout_id} call {call.index}", temperature=0)) for call in trajectory.transitions]
        return Evidence(calls={"grade": np.array(grades, np.float32)})

    def assign(self, group):
        rewards = [one.reward for one in group.trajectories if one.reward is not None]
        middle = mean(rewards)
        return tuple(
            tuple(
                None
                if one.reward is None or not call.trainable
                else np.full(len(call.completion_ids), one.reward - middle + self.share * one.evidence.calls["grade"][t], np.float32)
                for t, call in enumerate(one.transitions)
            )
            for one in group.trajectories
        )

class GivenUp(Grades):
    async def score(self, trajectory, ask):
        raise asyncio.CancelledError("another task was given up")

class Misfit(Grades):
    async def score(self, trajectory, ask):
        return Evidence(calls={"grade": np.zeros(7, np.float32)})

class Endless(Grades):
    async def score(self, trajectory, ask):
        while True:
            await ask("again")
'''


class JudgeServer(PostServer):
    """Grades call n of a rollout with n. `refuses` says with which status it answers a rollout's next requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.refuses: dict[str, list[int]] = {}
        self.keys: set[str | None] = set()
        self.bodies: list[dict[str, Any]] = []
        self.working = self.most = 0
        self.meet: threading.Barrier | None = None

    def answer(self, body: dict[str, Any], headers: Message) -> tuple[int, bytes]:
        question = body["messages"][-1]["content"]
        rollout = question.split()[0]
        with self.lock:
            self.asked[rollout] += 1
            self.keys.add(headers["authorization"])
            self.bodies.append(body)
            self.working += 1
            self.most = max(self.most, self.working)
            refusals = self.refuses.get(rollout, [])
            status = refusals.pop(0) if len(refusals) > 1 else refusals[0] if refusals else 200
        if self.meet is not None:
            self.meet.wait()
        with self.lock:
            self.working -= 1
        said = {"choices": [{"message": {"content": question.split()[-1]}}], "usage": {"total_tokens": 10}}
        return status, b"busy" if status >= 400 else json.dumps(said).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(judging, "FIRST_PAUSE_S", 0.001)
    with JudgeServer().running() as server:
        yield server
        assert server.paths <= {"/v1/chat/completions"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "judged_credit.py").write_text(FILE, encoding="utf-8")
    return tmp_path


def make_parts(
    folder: Path, server: JudgeServer | None, *, use: str = "Grades", share: float = 1.0, **judge: Any
) -> Parts:
    recipe = Recipe.model_validate(
        {
            "agent": "judged_credit.py:answer",
            "tasks": {"train": "judged_credit.py:tasks"},
            "policy": {"model": "org/model"},
            "rewards": {"right": {"use": "judged_credit.py:right"}},
            "credit": {"use": use}
            if use == "grpo"
            else {"use": f"judged_credit.py:{use}", "options": {"share": share}},
            "judge": None if server is None else {"base_url": server.url, "model": "grader", **judge},
            "outcomes": {"max_failed_rewards": 0.5},
            "folder": folder,
        }
    )
    return Parts.build(recipe, load_plugins())


async def make_store(folder: Path, count: int) -> SqlStore:
    """Rollouts r0 … of two calls each that have ended; r0's reward is 0, r1's is 1 and so on."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    await store.create_rollouts([make_spec(name) for name in names(count)])
    for number in range(count):
        lease = await leased(store)
        for index in range(2):
            await store.append_call(make_call(lease, f"c{number}-{index}", [1], [2, 3], policy="policy"))
        await store.finish_attempt(lease.rollout_id, 1, Outcome.SUCCEEDED, float(number))
    return store


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def grades(trajectory: Trajectory) -> list[float]:
    assert trajectory.evidence is not None
    return list(trajectory.evidence.calls["grade"].tolist())


async def test_evidence_is_found_kept_and_used_and_the_judges_calls_are_recorded_and_not_trained(
    folder: Path, server: JudgeServer
) -> None:
    store = await make_store(folder, 2)
    parts = make_parts(folder, server)
    rewarded = await parts.evaluator.reward(await store.trajectories(names(2)), store.set_scores)
    assert [grades(one) for one in rewarded] == [[0.0, 1.0]] * 2
    assert describe_rollouts(rewarded)["calls_judge"] == 4
    scored = parts.scorer.build(parts.scorer.credit(rewarded))
    firsts = [[float(tokens[0]) for tokens in calls if tokens is not None] for calls in scored.advantages[0]]
    assert firsts == [[-0.5, 0.5], [0.5, 1.5]]
    assert sum(int(sample.mask.sum()) for sample in scored.samples) == 2 * 2 * 2, "the policy's own tokens alone"
    await store.set_scores(scored.scores)
    await store.close()

    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    kept = await store.trajectories(names(2))
    assert [grades(one) for one in kept] == [[0.0, 1.0]] * 2
    for one in kept:
        first, second = one.other_calls
        assert (first.kind, first.model, first.path, first.status) == (
            OtherCallKind.JUDGE,
            "grader",
            "chat/completions",
            200,
        )
        assert first.request["messages"] == [{"role": "user", "content": f"{one.rollout_id} call 0"}]
        assert (first.request["temperature"], second.answer["usage"]["total_tokens"]) == (0, 10)
        assert len(one.transitions) == 2
    again = await make_parts(folder, server).evaluator.reward(kept, store.set_scores)
    assert server.asked == {"r0": 2, "r1": 2}, "nobody is asked twice"
    assert [grades(one) for one in again] == [[0.0, 1.0]] * 2
    await make_parts(folder, server, share=2.0).evaluator.reward(kept, store.set_scores)
    assert server.asked == {"r0": 4, "r1": 4}, "another option may ask otherwise"
    (score,) = await store.scores(["r0"])
    assert score.evidence is not None
    await store.close()


async def test_what_the_judge_does_not_answer_is_tried_again_then_its_rollout_is_left_out_and_counted(
    folder: Path, server: JudgeServer
) -> None:
    store = await make_store(folder, 3)
    server.refuses = {"r0": [429, 503, 200], "r1": [503]}
    rewarded = await make_parts(folder, server, retries=2).evaluator.reward(
        await store.trajectories(names(3)), store.set_scores
    )
    assert grades(rewarded[0]) == [0.0, 1.0]
    failed = rewarded[1]
    assert (failed.reward, failed.evidence, failed.rewards) == (None, None, {"right": 1.0})
    assert failed.unrewarded == f"credit: JudgeError: the judge at '{server.url}': HTTP 503: busy"
    assert describe_rollouts(rewarded)["rewards_failed"] == 1
    assert server.asked == {"r0": 4, "r1": 3, "r2": 2}
    await store.set_scores([score_of(one) for one in rewarded])
    kept = await store.trajectories(names(3))
    assert [call.code for call in kept[0].other_calls] == ["http_429", "http_503", None, None]

    server.refuses = {}
    again = await make_parts(folder, server).evaluator.reward(kept, store.set_scores)
    assert server.asked == {"r0": 4, "r1": 5, "r2": 2}
    assert [one.reward for one in again] == [0.0, 1.0, 2.0]
    await store.close()


async def test_a_task_that_an_assigner_gave_up_is_a_failure_like_others(folder: Path, server: JudgeServer) -> None:
    store = await make_store(folder, 1)
    (one,) = await make_parts(folder, server, use="GivenUp").evaluator.reward(
        await store.trajectories(names(1)), store.set_scores
    )
    assert one.unrewarded == "credit: CancelledError: another task was given up (judged_credit.py, line 58)"
    await store.close()


async def test_a_request_that_the_judge_cannot_read_is_not_tried_again_and_too_many_failures_stop_the_run(
    folder: Path, server: JudgeServer
) -> None:
    store = await make_store(folder, 2)
    server.refuses = {name: [400] for name in names(2)}
    with pytest.raises(
        RewardError, match=r"failed on 2 of 2 rollouts, more than outcomes.max_failed_rewards = 0.5.*HTTP 400: busy"
    ):
        evaluator = make_parts(folder, server).evaluator
        evaluator.check_failures(await evaluator.reward(await store.trajectories(names(2)), store.set_scores))
    assert server.asked == {"r0": 1, "r1": 1}
    await store.close()


@pytest.mark.parametrize(
    ("budget", "says"), [("max_calls", "ask its judge 3 times"), ("max_tokens", "use 30 tokens of its judge")]
)
async def test_a_rollout_has_a_budget(folder: Path, server: JudgeServer, budget: str, says: str) -> None:
    store = await make_store(folder, 2)
    evaluator = make_parts(folder, server, use="Endless", **{budget: 3 if budget == "max_calls" else 30}).evaluator
    with pytest.raises(RewardError, match=rf"credit: JudgeError: a rollout may {says}; raise judge.{budget}"):
        evaluator.check_failures(await evaluator.reward(await store.trajectories(names(2)), store.set_scores))
    assert server.asked["again"] <= 6
    assert server.asked["again"] >= 3
    await store.close()


async def test_at_most_so_many_calls_are_under_way_at_a_time(folder: Path, server: JudgeServer) -> None:
    store = await make_store(folder, 6)
    server.meet = threading.Barrier(3)  # each waits for two others: fewer at a time would wait for ever
    await make_parts(folder, server, concurrency=3).evaluator.reward(
        await store.trajectories(names(6)), store.set_scores
    )
    assert server.most == 3
    await store.close()


async def test_evidence_that_does_not_fit_its_trajectory_is_the_assigners_defect(
    folder: Path, server: JudgeServer
) -> None:
    store = await make_store(folder, 1)
    with pytest.raises(PluginError, match=r"'grade' of shape \(7,\) for rollout 'r0', which needs \(2,\)"):
        await make_parts(folder, server, use="Misfit").evaluator.reward(
            await store.trajectories(names(1)), store.set_scores
        )
    await store.close()


async def test_the_key_is_the_environments(folder: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="judge: the environment variable 'JUDGE_KEY' is not set"):
        make_parts(folder, server, api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    store = await make_store(folder, 1)
    await make_parts(folder, server, api_key_env="JUDGE_KEY").evaluator.reward(
        await store.trajectories(names(1)), store.set_scores
    )
    assert server.keys == {"Bearer secret"}
    assert "secret" not in str((await store.trajectories(names(1)))[0].other_calls)
    await store.close()


def test_a_judge_that_nobody_asks_and_one_that_is_missing_are_refused_at_the_start(
    folder: Path, server: JudgeServer
) -> None:
    with pytest.raises(ConfigError, match=r"needs 'judge'; add a \[judge\] table with base_url and model"):
        make_parts(folder, None)
    with pytest.raises(ConfigError, match=r"\[judge\] is set, and credit.use 'grpo' asks none"):
        make_parts(folder, server, use="grpo")


class TestGrades(CreditConformance):
    """The suite, for an assigner that asks."""

    @pytest.fixture(autouse=True)
    def file(self, folder: Path) -> None:
        self.folder = folder

    def make_assigner(self) -> CreditAssigner:
        assigner: CreditAssigner = load_callable("judged_credit.py:Grades", self.folder)()
        return assigner

    async def ask(self, messages: str | Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
        return str(len(str(messages)))

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return [reward - float(np.mean(rewards)) for reward in rewards]


def test_a_memory_that_no_checkpoint_can_hold_is_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(
        PluginError, match=r"state\(\) of credit assigner 'Odd' gave no JSON .*; return numbers, texts, lists, dicts"
    ):
        make_parts(folder, None, use="Odd").scorer.state()
    assert make_parts(folder, None, use="grpo").scorer.state() is None
