"""A reward is the function that its user tested: it runs in the main thread of a process of its own, which is made
again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended, is_alive, written
from sizes import PATIENCE_S

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Trajectory
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_training.build import build_credit
from lightningrl_training.run_sync import run_sync

EPISODE = make_trajectory("r7", [make_transition("r7/0")], output="$0.5$", answer=r"$\frac{1}{2}$", reward=None)
OWN = """
import asyncio, os, signal, sqlite3, sys, threading, time
from functools import lru_cache

database = sqlite3.connect(":memory:")
database.execute("create table t as select 0.5 as value")
seen = []
pid = os.getpid()
written = []


def by_alarm(task, output, trajectory):
    def late(*_):
        raise TimeoutError("late")
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        time.sleep(30)
    except TimeoutError:
        return 0.5
    return 1.0


def by_loop(task, output, trajectory):
    async def half():
        await asyncio.sleep(0)
        return 0.25
    return asyncio.run(half()) + asyncio.new_event_loop().run_until_complete(half())


def by_database(task, output, trajectory):
    return database.execute("select value from t").fetchone()[0]


def in_main_thread(task, output, trajectory):
    return 0.5 * (threading.current_thread() is threading.main_thread())


def by_program(task, output, trajectory):
    import subprocess
    return float(subprocess.run([sys.executable, "-Ic", "print(0.5)"], capture_output=True, text=True, check=True).stdout)


def counted(task, output, trajectory):
    seen.append(trajectory.rollout_id)
    return float(len(seen))
"""


def one(function: Any, **options: Any) -> RewardSet:
    return RewardSet([NamedReward(name="mine", function=function, **options)])


async def score(rewards: RewardSet, trajectory: Trajectory = EPISODE) -> tuple[float | None, str | None]:
    result = await rewards.score(trajectory)
    return result.total, result.failure


def make_recipe(folder: Path, *names: str) -> Recipe:
    (folder / "own_rewards.py").write_text(OWN, encoding="utf-8")
    return Recipe.model_validate(
        {
            "agent": "own_rewards.py:by_loop",
            "tasks": {"train": "own_rewards.py:by_loop"},
            "policy": {"model": "org/model"},
            "rewards": {name: {"use": f"own_rewards.py:{name}"} for name in names},
            "folder": folder,
        }
    )


BY_HAND = ("by_alarm", "by_loop", "by_database", "in_main_thread", "by_program")


async def test_a_reward_does_in_a_run_what_it_does_by_hand(tmp_path: Path) -> None:
    evaluator, _ = build_credit(make_recipe(tmp_path, *BY_HAND), load_plugins())
    (rewarded,) = await evaluator.reward([EPISODE])
    assert (rewarded.unrewarded, dict(rewarded.rewards)) == (None, dict.fromkeys(BY_HAND, 0.5))


def test_it_does_so_where_a_notebooks_cell_waits_for_the_run(tmp_path: Path) -> None:
    """What a cell made belongs to the notebook's thread, and the run is on a loop in another."""
    database = sqlite3.connect(":memory:")
    recipe = with_settings(
        make_recipe(tmp_path, *BY_HAND),
        {"rewards.cell.use": lambda *_: database.execute("select 0.5").fetchone()[0], "rewards.cell.weight": 2.0},
    )

    async def reward() -> Trajectory:
        evaluator, _ = build_credit(recipe, load_plugins())
        return (await evaluator.reward([EPISODE]))[0]

    async def cell() -> Trajectory:
        return run_sync(reward())

    with contextlib.closing(database):
        rewarded = asyncio.run(cell())
    assert (rewarded.unrewarded, dict(rewarded.rewards)) == (None, dict.fromkeys((*BY_HAND, "cell"), 0.5))


async def test_math_verify_gives_a_right_answer_its_one() -> None:
    import math_verify

    def score_answer(task: Any, output: Any, trajectory: Any) -> float:
        try:
            return float(math_verify.verify(math_verify.parse(task.answer), math_verify.parse(output)))
        except Exception:
            return 0.0

    assert await score(one(score_answer)) == (1.0, None)


async def test_an_intermediate_reward_does_in_a_run_what_it_does_by_hand(tmp_path: Path) -> None:
    def pay(trajectory: Trajectory) -> list[float]:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [0.5 for _ in trajectory.transitions]

    recipe = with_settings(make_recipe(tmp_path, "by_loop"), {"intermediate_rewards.mine.use": pay})
    evaluator, _ = build_credit(recipe, load_plugins())
    (rewarded,) = await evaluator.reward([EPISODE])
    assert (rewarded.unrewarded, dict(rewarded.transitions[0].rewards)) == (None, {"mine": 0.5})


async def test_a_quick_reward_keeps_what_it_has_seen(tmp_path: Path) -> None:
    evaluator, _ = build_credit(make_recipe(tmp_path, "counted"), load_plugins())
    episodes = [
        make_trajectory(f"r{number}", [make_transition(f"r{number}/0")], output="x", reward=None)
        for number in range(64)
    ]
    rewarded = await evaluator.reward(episodes)
    assert sorted(one.reward or 0.0 for one in rewarded) == [float(number) for number in range(1, 65)]
    (again,) = await evaluator.reward(episodes[:1])
    assert again.reward == 65.0


async def test_one_that_hangs_is_ended_with_all_that_it_started_and_is_asked_again(tmp_path: Path) -> None:
    first = tmp_path / "first"

    def hangs_once(task: Any, output: Any, trajectory: Any) -> float:
        if first.exists():
            return 1.0
        started = subprocess.Popen([sys.executable, "-Ic", "import time; time.sleep(100_000)"], start_new_session=True)
        first.write_text(f"{os.getpid()} {started.pid}", encoding="utf-8")
        with contextlib.suppress(BaseException):
            time.sleep(100_000)
        return 0.0

    rewards = one(hangs_once, timeout_s=1.0, concurrency=1)
    async with all_ended(first):
        while not first.exists():
            assert await score(rewards) == (None, "mine: no answer within 1 s; raise rewards.mine.timeout_s")
        await written(first, words=2)
    assert await score(rewards) == (1.0, None)


async def test_one_that_uses_the_trainers_gpu_is_told_what_to_do() -> None:
    def scores_on_a_gpu(task: Any, output: Any, trajectory: Any) -> float:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'"
        )

    _, failure = await score(one(scores_on_a_gpu))
    assert (failure or "").endswith("; make the reward async, or start anew and load its model in its first call")


def exits() -> None:
    os._exit(3)


def crashes() -> None:
    faulthandler.disable()  # pytest's would write where each thread was
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (exits, "mine: its process ended with status 3"),
        (crashes, "mine: its process was ended by SIGSEGV"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt()), "mine: KeyboardInterrupt: "),
        (lambda: sys.exit("no"), "mine: SystemExit: no"),
        (lambda: (_ for _ in ()).throw(GeneratorExit()), "mine: GeneratorExit: "),
    ],
)
async def test_one_that_ends_its_process_is_a_failure_with_the_reason_and_the_next_call_has_another(
    end: Any, said: str, tmp_path: Path
) -> None:
    def ends(task: Any, output: Any, trajectory: Any) -> float:
        if output == "end":
            end()
        return 1.0

    rewards = one(ends)
    total, failure = await score(rewards, make_trajectory("r8", [make_transition("r8/0")], output="end", reward=None))
    assert total is None
    assert failure is not None
    assert failure.startswith(said)
    assert await score(rewards) == (1.0, None)


async def test_a_process_that_a_reward_forks_answers_nothing(tmp_path: Path) -> None:
    def forks(task: Any, output: Any, trajectory: Any) -> float:
        return 1.0 if os.fork() else 9.0

    rewards = one(forks)
    assert [await score(rewards) for _ in range(3)] == [(1.0, None)] * 3


def test_its_processes_end_with_the_set_and_with_the_trainer_however_that_ends(tmp_path: Path) -> None:
    program = """
import asyncio, os, sys
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_testing.groups import make_trajectory

other = RewardSet([NamedReward(name="other", function=lambda *_: 0.0)])
rewards = RewardSet([NamedReward(name="mine", function=lambda *_: os.getpid() * 1.0)])
another = RewardSet([NamedReward(name="another", function=lambda *_: 0.0)])
pid = asyncio.run(rewards.score(make_trajectory("r", []))).total
print(f"{pid:.0f}", flush=True)
if sys.argv[1] == "dropped":
    del rewards
    print("dropped", flush=True)
    sys.stdin.readline()
elif sys.argv[1] == "killed":
    sys.stdin.readline()
"""
    for how in ("dropped", "killed", "returned"):
        trainer = subprocess.Popen(
            [sys.executable, "-c", program, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        if how == "dropped":
            assert trainer.stdout.readline() == "dropped\n"
            assert not is_alive(pid)
        if how != "returned":
            trainer.kill()
        trainer.communicate(timeout=PATIENCE_S)  # and whoever had its output is gone
        until = time.monotonic() + PATIENCE_S
        while is_alive(pid):
            assert time.monotonic() < until, how
            time.sleep(0.01)


async def test_slow_ones_are_given_more_processes_up_to_the_limit_and_each_call_its_own(tmp_path: Path) -> None:
    def slow(task: Any, output: Any, trajectory: Any) -> float:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(0.3)
        return 1.0

    rewards = one(slow, concurrency=3)
    assert await asyncio.gather(*(score(rewards) for _ in range(16))) == [(1.0, None)] * 16
    assert len(list(tmp_path.iterdir())) == 3


async def test_a_first_call_that_imports_much_makes_no_more_processes_that_do_so(tmp_path: Path) -> None:
    """A game's reward took 3 s to import and milliseconds to call; 16 processes imported it at a time, for 30 s."""
    loaded: list[int] = []

    def imports(task: Any, output: Any, trajectory: Any) -> float:
        if not loaded:
            (tmp_path / str(os.getpid())).touch()
            time.sleep(2.5)
            loaded.append(1)
        return 1.0

    rewards = one(imports)
    assert await asyncio.gather(*(score(rewards) for _ in range(40))) == [(1.0, None)] * 40
    assert len(list(tmp_path.iterdir())) == 1


async def test_where_the_first_call_ends_its_process_the_others_have_another(tmp_path: Path) -> None:
    def ends_once(task: Any, output: Any, trajectory: Any) -> float:
        if not list(tmp_path.iterdir()):
            (tmp_path / str(os.getpid())).touch()
            time.sleep(1.5)
            os._exit(3)
        return 1.0

    rewards = one(ends_once)
    values = await asyncio.wait_for(asyncio.gather(*(score(rewards) for _ in range(8))), PATIENCE_S)
    assert sorted(value or 0.0 for value, _ in values) == [0.0, *[1.0] * 7]


async def test_cancelled_calls_leave_no_place_taken(tmp_path: Path) -> None:
    def takes_a_moment(task: Any, output: Any, trajectory: Any) -> float:
        time.sleep(0.01)
        return 1.0

    rewards = one(takes_a_moment, concurrency=1)
    for _ in range(5):
        asked = [asyncio.create_task(score(rewards)) for _ in range(8)]
        await asyncio.sleep(0.015)
        for number, task in enumerate(asked):
            if number % 2:
                task.cancel()
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert all(done[number] == (1.0, None) for number in range(0, 8, 2))


async def test_what_a_reward_prints_is_printed_once(tmp_path: Path) -> None:
    program = """
import asyncio
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_testing.groups import make_trajectory
print("before")
rewards = RewardSet([NamedReward(name="mine", function=lambda *_: print("looking") or 1.0)])
for _ in range(2):
    asyncio.run(rewards.score(make_trajectory("r", [])))
print("after")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.split() == ["before", "looking", "looking", "after"]
    assert done.stderr == ""
