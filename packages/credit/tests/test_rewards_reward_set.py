"""Terminal rewards: named, weighted, sync or async, and never a silent zero."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, RewardError
from lightningrl.types import Task, Trajectory
from lightningrl_credit.rewards import NamedReward, ReportedReward, RewardSet
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.reward_conformance import RewardConformance

SHARED = multiprocessing.get_context("fork")
"""What a test and a reward in a process both see."""
EPISODE = make_trajectory("r7", [make_transition("r7/0")], output="4", answer="4", reward=None)


def match(task: Task, output: Any, trajectory: Trajectory) -> float:
    return float(output == task.answer)


async def slow_match(task: Task, output: Any, trajectory: Trajectory) -> float:
    await asyncio.sleep(0.001)
    return match(task, output, trajectory)


def returning(value: Any) -> Any:
    return lambda task, output, trajectory: value


def one(function: Any, **options: Any) -> RewardSet:
    return RewardSet([NamedReward(name="exact", function=function, **options)])


async def score(rewards: RewardSet, trajectory: Trajectory = EPISODE) -> tuple[dict[str, float | None], float | None]:
    result = await rewards.score(trajectory)
    assert result.failure is None, result.failure
    return dict(result.values), result.total


async def failure_of(rewards: RewardSet) -> str:
    result = await rewards.score(EPISODE)
    assert result.total is None
    assert result.failure is not None
    return result.failure


class TestSyncReward(RewardConformance):
    def make_reward(self) -> Any:
        return match

    def trajectories(self) -> list[Trajectory]:
        return [EPISODE]


class TestAsyncReward(RewardConformance):
    def make_reward(self) -> Any:
        return slow_match

    def trajectories(self) -> list[Trajectory]:
        return [EPISODE]


async def test_return_is_the_weighted_sum() -> None:
    rewards = RewardSet(
        [
            NamedReward(name="exact", function=match, weight=2.0),
            NamedReward(name="async", function=slow_match, weight=0.5),
            NamedReward(name="shown", function=returning(9.0), weight=0.0),
        ]
    )
    assert await score(rewards) == ({"exact": 1.0, "async": 1.0, "shown": 9.0}, 2.5)
    assert rewards.weights.names == ("exact", "async", "shown")


async def test_missing_term_leaves_the_return_missing() -> None:
    some = [NamedReward(name="exact", function=match), NamedReward(name="judge", function=returning(None))]
    assert await score(RewardSet(some)) == ({"exact": 1.0, "judge": None}, None)


async def test_missing_reward_without_weight_is_no_loss() -> None:
    some = [NamedReward(name="exact", function=match), NamedReward(name="judge", function=returning(None), weight=0.0)]
    assert await score(RewardSet(some)) == ({"exact": 1.0, "judge": None}, 1.0)


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0), Decimal(1)])
async def test_numbers_of_all_kinds_are_floats(value: Any) -> None:
    values, total = await score(one(returning(value)))
    assert (type(values["exact"]), total) == (float, 1.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.5", "returned '0.5' of type str"),
        ({"score": 1.0}, "of type dict"),
        (np.zeros(2), "of type ndarray"),
        (np.array("1"), "returned '1' of type str"),
        (1j, "of type complex"),
    ],
)
async def test_what_is_no_number_is_the_functions_defect_and_names_reward_and_rollout(value: Any, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        await one(returning(value)).score(EPISODE)
    assert words in str(caught.value)
    assert "reward 'exact'" in str(caught.value)
    assert "rollout 'r7'" in str(caught.value)
    assert "return a f" in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
async def test_no_finite_number_is_a_failure(value: Any) -> None:
    shown = "nan" if value != value else "inf"
    assert await failure_of(one(returning(value))) == (
        f"exact: returned {shown}; return a finite float, or None where it has nothing to say"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no table"),
        TimeoutError("database"),
        SystemExit(3),
        KeyError("answer"),
        asyncio.CancelledError("given up"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_reward_that_raises_is_named(error: BaseException, is_async: bool) -> None:
    def fails(task: Task, output: Any, trajectory: Trajectory) -> float:
        raise type(error)(*error.args)

    async def fails_later(task: Task, output: Any, trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        raise type(error)(*error.args)

    function = fails_later if is_async else fails
    last = function.__code__.co_firstlineno + (2 if is_async else 1)
    assert (
        await failure_of(one(function))
        == f"exact: {type(error).__name__}: {error} (test_rewards_reward_set.py, line {last})"
    )


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_that_cannot_be_shown_is_named_by_its_type(is_async: bool) -> None:
    def judge(task: Any, output: Any, trajectory: Any) -> float:
        raise Unspeakable

    async def judge_async(task: Any, output: Any, trajectory: Any) -> float:
        raise Unspeakable

    result = await RewardSet([NamedReward(name="judge", function=judge_async if is_async else judge)]).score(EPISODE)
    assert result.failure is not None and result.failure.startswith(
        "judge: Unspeakable: which cannot be shown: ValueError (test_"
    )


async def test_reward_that_runs_out_of_an_iterator_is_named() -> None:
    assert "StopIteration" in await failure_of(one(lambda *_: next(iter(()))))


async def test_first_defect_in_order_is_reported_and_the_rest_is_awaited() -> None:
    finished = []

    async def slow(task: Task, output: Any, trajectory: Trajectory) -> float:
        await asyncio.sleep(0.02)
        finished.append(True)
        return 1.0

    rewards = [NamedReward(name=name, function=returning(value)) for name, value in (("first", "x"), ("second", "y"))]
    with pytest.raises(RewardError, match="'first'"):
        await RewardSet([NamedReward(name="slow", function=slow), *rewards]).score(EPISODE)
    assert finished == [True]


@pytest.mark.parametrize("is_async", [False, True])
async def test_reward_that_hangs_times_out(is_async: bool) -> None:
    async def hangs_async(task: Task, output: Any, trajectory: Trajectory) -> float:
        await asyncio.Event().wait()
        return 1.0

    def hangs(task: Task, output: Any, trajectory: Trajectory) -> float:
        time.sleep(100_000)
        return 1.0

    hanging = one(hangs_async if is_async else hangs, timeout_s=0.05)
    assert await failure_of(hanging) == "exact: no answer within 0.05 s; raise rewards.exact.timeout_s"


async def test_slow_sync_reward_leaves_the_loop_free() -> None:
    begun, release = SHARED.Event(), SHARED.Event()

    def slow(*_: Any) -> float:
        begun.set()
        release.wait()
        return 1.0

    scoring = asyncio.create_task(score(one(slow)))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    release.set()  # nobody could, if the reward held the loop
    assert (await scoring)[1] == 1.0


async def test_at_most_so_many_sync_rewards_work_at_a_time_and_waiting_is_no_timeout() -> None:
    lock, working, most = SHARED.Lock(), SHARED.RawValue("i", 0), SHARED.RawValue("i", 0)

    def work(task: Task, output: Any, trajectory: Trajectory) -> float:
        with lock:
            working.value += 1
            most.value = max(most.value, working.value)
        time.sleep(0.05)
        with lock:
            working.value -= 1
        return 1.0

    rewards = one(work, timeout_s=1.0, concurrency=2)
    assert await asyncio.gather(*(score(rewards) for _ in range(80))) == [({"exact": 1.0}, 1.0)] * 80
    assert most.value == 2


async def test_hanging_rewards_do_not_take_places_for_ever() -> None:
    rewards = one(lambda *_: time.sleep(PATIENCE_S), timeout_s=0.05, concurrency=1)
    for _ in range(3):
        assert "no answer within" in await failure_of(rewards)


def test_one_reward_set_serves_several_event_loops() -> None:
    rewards = one(match)
    for _ in range(2):
        asyncio.run(score(rewards))


async def test_object_with_async_call_and_function_returning_a_coroutine() -> None:
    class Judge:
        async def __call__(self, task: Task, output: Any, trajectory: Trajectory) -> float:
            return 0.25

    assert (await score(one(Judge())))[1] == 0.25
    assert (await score(one(lambda *arguments: slow_match(*arguments))))[1] == 1.0


async def test_cancelling_the_scoring_cancels_it() -> None:
    task = asyncio.create_task(one(lambda *_: time.sleep(0.2)).score(EPISODE))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_reported_reward_is_what_the_agent_said() -> None:
    from dataclasses import replace

    episode = replace(EPISODE, reported={"success": 0.75}, rewards={"speed": 0.5})
    assert await score(one(ReportedReward(name="success")), episode) == ({"exact": 0.75}, 0.75)
    assert await score(one(ReportedReward(name="speed")), episode) == ({"exact": None}, None), (
        "what the run computed is not reported"
    )


def test_reward_that_never_returns_does_not_keep_the_process_alive() -> None:
    program = """
import asyncio, time
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_testing.groups import make_trajectory
hanging = RewardSet([NamedReward(name="hang", function=lambda *_: time.sleep(100_000), timeout_s=0.1)])
print(asyncio.run(hanging.score(make_trajectory("r", []))).failure)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "no answer within 0.1 s" in result.stdout
    assert result.stderr == ""


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match="two rewards are named 'a'"):
        RewardSet([NamedReward(name="a", function=match), NamedReward(name="a", function=match)])
    with pytest.raises(ConfigError, match="no reward is configured"):
        RewardSet([])
    with pytest.raises(ConfigError, match="'a': weight nan"):
        NamedReward(name="a", function=match, weight=float("nan"))
    with pytest.raises(ConfigError, match="'a': timeout_s 0"):
        NamedReward(name="a", function=match, timeout_s=0)
    with pytest.raises(ConfigError, match="'a' is a int, not callable"):
        NamedReward(name="a", function=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reward_that_changes_its_task_changes_it_for_nobody_else(*, is_async: bool) -> None:
    def spoil(task: Task, output: Any, trajectory: Trajectory) -> float:
        before = len(task.metadata) + len(trajectory.task.metadata) + len(output["said"])
        task.metadata["seen"] = trajectory.task.metadata["seen"] = True  # type: ignore[index]
        output["said"].append("more")
        return float(before)

    async def spoil_async(task: Task, output: Any, trajectory: Trajectory) -> float:
        return spoil(task, output, trajectory)

    episode = make_trajectory("r", [make_transition("r/0")], output={"said": []}, answer="4", reward=None)
    rewards = one(spoil_async if is_async else spoil)
    before: tuple[Any, Any] = (dict(episode.task.metadata), {"said": []})
    assert [(await score(rewards, episode))[1] for _ in range(2)] == [0.0, 0.0]
    assert (episode.task.metadata, episode.output) == before
