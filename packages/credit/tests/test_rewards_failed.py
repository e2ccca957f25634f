"""A reward that fails is data: tried again, then its rollout is unrewarded, named, counted; what was made is kept and
not asked again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import RewardError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import OutcomesConfig
from lightningrl.records import Score
from lightningrl.types import Outcome, Trajectory
from lightningrl_credit.baselines import IdenticalAssignment
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_credit.rewards import NamedReward, RewardSet, reward_set
from lightningrl_credit.scoring import score_of
from lightningrl_server.store import SqlStore
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.store_conformance import leased, make_call, make_spec
from lightningrl_training.build import Parts, build_credit
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.explanations import explain_failed_rewards

EPISODE = make_trajectory("r7", [make_transition("r7/0")], output="4", answer="4", reward=None)
REWARDS = """
import asyncio

asked = []
broken = set()
held = set()

def tasks():
    return [{"id": "t", "input": 1}]

def answer(number):
    return number

async def judge(task, output, trajectory, *, scale=1.0):
    asked.append(trajectory.rollout_id)
    while trajectory.rollout_id in held:
        await asyncio.sleep(0.001)
    if trajectory.rollout_id in broken:
        raise ConnectionError("no route\\n to the judge")
    return scale * output

async def exact(task, output, trajectory):
    asked.append("exact")
    return 1.0
"""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_set, "FIRST_PAUSE_S", 0.001)


class Unsteady:
    """An async reward that fails so many times for each rollout."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.tries: Counter[str] = Counter()

    async def __call__(self, task: Any, output: Any, trajectory: Trajectory) -> float:
        self.tries[trajectory.rollout_id] += 1
        if self.tries[trajectory.rollout_id] <= self.failures:
            raise ConnectionError("no route")
        return 1.0


NO_ROUTE = f"ConnectionError: no route (test_rewards_failed.py, line {Unsteady.__call__.__code__.co_firstlineno + 3})"


async def test_a_reward_is_tried_again_so_many_times() -> None:
    steady = Unsteady(failures=2)
    assert (await RewardSet([NamedReward(name="judge", function=steady, retries=2)]).score(EPISODE)).total == 1.0
    gone = Unsteady(failures=9)
    result = await RewardSet([NamedReward(name="judge", function=gone, retries=2)]).score(EPISODE)
    assert (result.total, result.failure, gone.tries["r7"]) == (None, f"judge: {NO_ROUTE}", 3)


async def test_what_is_no_number_is_not_tried_again() -> None:
    tries: list[str] = []

    async def says_one(task: Any, output: Any, trajectory: Trajectory) -> Any:
        tries.append(trajectory.rollout_id)
        return "1"

    with pytest.raises(RewardError, match="returned '1' of type str"):
        await RewardSet([NamedReward(name="judge", function=says_one, retries=5)]).score(EPISODE)
    assert len(tries) == 1


async def test_the_reason_is_one_clean_line_of_bounded_length() -> None:
    def fails(*_: Any) -> float:
        raise ValueError("a\n b \ud800" + "x" * 9000)

    result = await RewardSet([NamedReward(name="judge", function=fails)]).score(EPISODE)
    assert result.failure is not None
    assert result.failure.startswith("judge: ValueError: a b \ufffdxxx")
    assert len(result.failure) == 300


async def test_the_first_that_failed_in_order_is_named_and_what_the_others_made_is_kept() -> None:
    kept: dict[str, float | None] = {}

    async def keep(name: str, value: float | None) -> None:
        kept[name] = value

    rewards = [
        NamedReward(name="right", function=lambda *_: 0.5),
        NamedReward(name="judge", function=Unsteady(9)),
        NamedReward(name="critic", function=Unsteady(9)),
    ]
    result = await RewardSet(rewards).score(EPISODE, keep=keep)
    assert result.failure == f"judge: {NO_ROUTE}"
    assert kept == result.values == {"right": 0.5}


async def test_one_without_weight_that_fails_loses_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rewards = [
        NamedReward(name="right", function=lambda *_: 0.5),
        NamedReward(name="shown", function=Unsteady(9), weight=0.0),
    ]
    result = await RewardSet(rewards).score(EPISODE)
    assert (result.total, result.failure, result.values) == (0.5, None, {"right": 0.5})
    assert f"rollout 'r7': reward shown: {NO_ROUTE}; it has no weight" in caplog.text


async def test_at_most_so_many_async_rewards_are_asked_at_a_time_and_waiting_is_no_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the loop's own clock, which each of them puts forward by half a second: the last waits for four minutes."""
    loop = asyncio.get_running_loop()
    working, most, now = 0, 0, loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def judge(*_: Any) -> float:
        nonlocal working, most, now
        working += 1
        most = max(most, working)
        await asyncio.sleep(0)
        now += 0.5
        working -= 1
        return 1.0

    rewards = RewardSet([NamedReward(name="judge", function=judge, concurrency=3, timeout_s=5.0)])
    results = await asyncio.gather(*(rewards.score(EPISODE) for _ in range(512)))
    assert {result.total for result in results} == {1.0}
    assert most == 3


# ---------------------------------------------------------------------- a run's rewards, kept as they are made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "judged.py").write_text(REWARDS, encoding="utf-8")
    yield tmp_path


def make_evaluator(folder: Path, **tables: Any) -> Evaluator:
    recipe = Recipe.model_validate(
        {
            "agent": "judged.py:answer",
            "tasks": {"train": "judged.py:tasks"},
            "policy": {"model": "org/model"},
            "rewards": {
                "judge": {"use": "judged.py:judge", "options": {"scale": tables.pop("scale", 1.0)}},
                "exact": {"use": "judged.py:exact", "weight": 0.5},
            },
            "outcomes": {"max_failed_rewards": tables.pop("max_failed", 0.25)},
            "folder": folder,
        }
    )
    return Parts.build(recipe, load_plugins()).evaluator


def judged() -> Any:
    return sys.modules["judged"]


async def make_store(folder: Path, count: int) -> SqlStore:
    """With rollouts r0 … that have ended."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    await store.create_rollouts([make_spec(f"r{number}") for number in range(count)])
    for number in range(count):
        lease = await leased(store)
        await store.append_call(make_call(lease, f"c{number}", [1], [2]))
        await store.add_rewards(lease.rollout_id, 1, {"judge": -7.0})  # the agent has names of its own
        await store.finish_attempt(lease.rollout_id, 1, Outcome.SUCCEEDED, float(number))
    return store


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


async def test_a_rollout_whose_reward_failed_is_left_out_named_and_counted_and_asked_again_alone(folder: Path) -> None:
    store = await make_store(folder, 10)
    evaluator = make_evaluator(folder)
    judged().broken.add("r3")
    rewarded = await evaluator.reward(await store.trajectories(names(10)), store.set_scores)
    assert rewarded[3].reward is None
    assert rewarded[3].unrewarded == "judge: ConnectionError: no route to the judge (judged.py, line 19)"
    assert [one.reward for one in rewarded if one.rollout_id != "r3"] == [
        number + 0.5 for number in range(10) if number != 3
    ]
    metrics = describe_rollouts(rewarded)
    assert (metrics["rewards_failed"], metrics["rollouts_unrewarded"], metrics["rollouts"]) == (1, 1, 10)
    assert explain_failed_rewards(rewarded[3:4]) == (
        "a reward or evidence failed on 1 rollouts; first, on 'r3': judge: ConnectionError: no route to the judge (judged.py, line 19)"
    )
    await store.set_scores([score_of(one) for one in rewarded])
    kept = await store.trajectories(names(10))
    assert kept[3].unrewarded == rewarded[3].unrewarded, "and shown later"
    assert all(one.reported == {"judge": -7.0} for one in kept)

    judged().asked.clear()
    judged().broken.clear()
    again = await make_evaluator(folder).reward(kept, store.set_scores)
    assert judged().asked == ["r3"]
    assert [one.reward for one in again] == [number + 0.5 for number in range(10)]
    assert again[3].unrewarded is None
    await store.close()


async def test_values_are_durable_as_they_are_made_so_that_a_step_that_is_cut_off_asks_nobody_twice(
    folder: Path,
) -> None:
    store = await make_store(folder, 8)
    evaluator = make_evaluator(folder)
    judged().held.update(["r6", "r7"])
    rewarding = asyncio.create_task(evaluator.reward(await store.trajectories(names(8)), store.set_scores))
    while (
        sum(len(one.rewards) for one in await store.trajectories(names(8))) < 6 + 8
    ):  # six verdicts, and each that is exact
        await asyncio.sleep(0.001)
    rewarding.cancel()
    await asyncio.gather(rewarding, return_exceptions=True)
    judged().held.clear()
    judged().asked.clear()
    rewarded = await make_evaluator(folder).reward(await store.trajectories(names(8)), store.set_scores)
    assert sorted(judged().asked) == ["r6", "r7"]
    assert [one.reward for one in rewarded] == [number + 0.5 for number in range(8)]
    await store.close()


async def test_above_the_limit_it_stops_with_a_sentence_and_keeps_what_was_made(folder: Path) -> None:
    store = await make_store(folder, 8)
    evaluator = make_evaluator(folder)
    judged().broken.update(names(3))
    rewarded = await evaluator.reward(await store.trajectories(names(8)), store.set_scores)
    evaluator.check_failures(rewarded[1:4], to_come=5)  # two of eight may fail
    with pytest.raises(RewardError) as caught:
        evaluator.check_failures(rewarded[:4], to_come=4)
    said = str(caught.value)
    assert said.startswith(
        "a reward or evidence failed on 3 of 8 rollouts, more than outcomes.max_failed_rewards = 0.25 of them; last, on 'r2'"
    )
    assert "judge: ConnectionError: no route to the judge (judged.py, line 19); mend it, or raise the limit" in said
    assert all("exact" in one.rewards for one in await store.trajectories(names(8)))
    judged().asked.clear()
    judged().broken.clear()
    await evaluator.reward(await store.trajectories(names(8)), store.set_scores)
    assert sorted(judged().asked) == names(3), "what was rewarded is kept and not asked again"
    make_evaluator(folder, max_failed=1.0).check_failures(rewarded)
    make_evaluator(folder).check_failures([])
    await store.close()


async def test_a_recorded_run_is_rescored_by_what_has_changed_alone(folder: Path) -> None:
    store = await make_store(folder, 3)
    trajectories = await store.trajectories(names(3))
    rewarded = await make_evaluator(folder).reward(trajectories, store.set_scores)
    await store.set_scores([score_of(one) for one in rewarded])
    await store.close()

    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    recorded = await store.trajectories(names(3))
    judged().asked.clear()
    assert [one.reward for one in await make_evaluator(folder).reward(recorded)] == [0.5, 1.5, 2.5]
    assert judged().asked == []
    rescored = await make_evaluator(folder, scale=10.0).reward(recorded, store.set_scores)
    assert [one.reward for one in rescored] == [0.5, 10.5, 20.5]
    assert judged().asked == names(3), "its options changed; the other reward's did not"
    judged().asked.clear()
    (folder / "judged.py").write_text(REWARDS + "\n# mended\n", encoding="utf-8")
    await make_evaluator(folder).reward(await store.trajectories(names(3)))
    assert sorted(judged().asked) == ["exact"] * 3 + names(3), "the file changed"
    await store.close()


async def test_what_fails_while_it_is_kept_stops_the_run(folder: Path) -> None:
    async def keep(scores: Sequence[Score]) -> None:
        raise RewardError("the store is full")

    with pytest.raises(RewardError, match="the store is full"):
        await make_evaluator(folder).reward([EPISODE], keep)


@pytest.mark.parametrize(
    ("declared", "value", "reward"), [(None, 1e9, None), (None, 0.5, 0.5), ([0, 10], 7.0, 7.0), ([0, 10], -1.0, None)]
)
async def test_what_an_agent_reports_is_a_reward_within_its_range_alone(
    tmp_path: Path, declared: Any, value: float, reward: float | None
) -> None:
    (tmp_path / "data.py").write_text("def tasks(): return []\ndef answer(number): return number\n", encoding="utf-8")
    recipe = Recipe.model_validate(
        {
            "agent": "data.py:answer",
            "tasks": {"train": "data.py:tasks"},
            "policy": {"model": "m"},
            "rewards": {"told": {"use": "reported", "range": declared, "options": {"name": "told"}}},
            "intermediate_rewards": {"of_calls": {"use": "reported", "range": declared}},
            "credit": {"use": "turns"},
            "outcomes": {"max_failed_rewards": 1.0},
            "folder": tmp_path,
        }
    )
    evaluator, _ = build_credit(recipe, load_plugins(), {"policy": "m"})
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a"), make_spec("b")])
    for name, of_call in (("a", {}), ("b", {"c0": {"x": value}})):
        lease = await leased(store)
        await store.append_call(make_call(lease, "c0" if name == "b" else "c1", [1], [2], policy="policy"))
        for call, told in ((None, {"told": value if name == "a" else 1.0}), *of_call.items()):
            await store.add_rewards(name, 1, told, call)
        await store.finish_attempt(name, 1, Outcome.SUCCEEDED, 1)
    rewarded = await evaluator.reward(await store.trajectories(["a", "b"]), store.set_scores)
    assert [one.reward for one in rewarded] == [0.0 if reward is None else reward, 0.0 if reward is None else 1.0]
    assert describe_rollouts(rewarded)["rewards_failed"] == (2.0 if reward is None else 0.0)
    await store.close()


async def right_or_garbage(task: Any, output: Any, trajectory: Trajectory) -> float:
    return float(json.loads(output)["value"])


def of_output(output: str, outcome: Outcome = Outcome.SUCCEEDED) -> Trajectory:
    return make_trajectory(output, [make_transition(f"{output}/0")], output=output, reward=None, outcome=outcome)


def evaluator_of(function: Any, **settings: Any) -> Evaluator:
    return Evaluator(
        rewards=RewardSet([NamedReward(name="right", function=function, **settings)]),
        intermediate={},
        credit=IdenticalAssignment(),
        outcomes=OutcomesConfig(),
        plugins=load_plugins(),
    )


@pytest.mark.parametrize(
    ("settings", "lowest"),
    [({}, 0.0), ({"range": (-1.0, 1.0)}, -1.0), ({"range": (0.0, 2.0), "weight": -1.0}, -2.0)],
)
async def test_an_output_that_no_reward_can_read_earns_the_lowest_where_others_can_be_read(
    settings: dict[str, Any], lowest: float
) -> None:
    """Left out, garbage was never punished; so does a rollout that the policy broke, whose rewards are not asked."""
    evaluator, broken = evaluator_of(right_or_garbage, **settings), of_output("late", Outcome.TIMEOUT)
    (alone,) = await evaluator.reward([of_output("garbage")])
    assert alone.reward is None, "a reward that has never worked is the defect itself"
    rewarded = await evaluator.reward([of_output("garbage"), of_output('{"value": 1}'), broken])
    assert [rollout.reward for rollout in rewarded] == [lowest, settings.get("weight", 1.0), lowest]
    assert (rewarded[0].unrewarded or "").startswith("right: JSONDecodeError")
    assert rewarded[2].unrewarded is None
    assert describe_rollouts(rewarded)["rewards_failed"] == 1


async def test_without_a_declared_range_the_lowest_is_no_more_than_what_was_earned() -> None:
    rollouts = [of_output("garbage"), of_output('{"value": -3}'), of_output("late", Outcome.AGENT_ERROR)]
    rewarded = await evaluator_of(right_or_garbage).reward(rollouts)
    assert [rollout.reward for rollout in rewarded] == [-3.0, -3.0, -3.0]


async def test_a_judge_that_cannot_be_reached_says_nothing_of_the_output() -> None:
    async def judge(task: Any, output: Any, trajectory: Trajectory) -> float:
        if output == "4":
            raise ConnectionError("no route")
        return 1.0

    rewarded = await evaluator_of(judge).reward([of_output("4"), of_output("5")])
    assert [rollout.reward for rollout in rewarded] == [None, 1.0]


async def test_more_than_a_small_share_of_unreadable_outputs_stops_the_run() -> None:
    evaluator = evaluator_of(right_or_garbage)
    right = [of_output(f'{{"value": {number}}}') for number in range(31)]
    evaluator.check_failures(await evaluator.reward([*right, of_output("garbage")]))
    with pytest.raises(
        RewardError, match=r"failed on 2 of 32 rollouts, more than outcomes\.max_failed_rewards = 0\.05"
    ):
        evaluator.check_failures(await evaluator.reward([*right[1:], of_output("garbage"), of_output("more")]))
