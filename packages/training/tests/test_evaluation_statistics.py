"""What evaluations may claim: pass@k without bias, intervals that cover, a test that may be looked at after every
task."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from lightningrl.figures import (
    Verdict,
    bet,
    holm,
    mean_interval,
    pass_at_k,
    rank_sum_p,
    sign_flip_p,
    t_quantile,
)
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import PolicyConfig, RewardConfig, TasksConfig
from lightningrl.types import Outcome
from lightningrl_training.evaluation.certificate import FEWEST, Gap, judge_gaps
from lightningrl_training.evaluation.result import EvaluatedSample, EvaluatedTask, Evaluation, compare

DIFFERENCES = (-1.0, 1.0)
FRESH = 0.1
"""Share of tasks whose success rate under one policy says nothing of that under the other: the rates correlate by 0.9,
as those of two checkpoints of one run do. With rates from Beta(0.6, 0.4) most tasks are nearly always or nearly never
solved."""


def make_differences(chance: np.random.Generator, *, tasks: int, samples: int, gain: float) -> np.ndarray:
    """Per task: the first policy's share of successes less the second's."""
    second = chance.beta(0.6, 0.4, tasks)
    first = np.where(chance.random(tasks) < FRESH, chance.beta(0.6, 0.4, tasks), second)
    first += gain / 0.4 * (1 - first)  # mean 0.6, so on average `gain`
    return np.asarray((chance.binomial(samples, first) - chance.binomial(samples, second)) / samples)


def make_evaluation(
    rates: dict[str, float], *, name: str, samples: int = 4, slices: dict[str, str] | None = None, seed: int
) -> Evaluation:
    chance = np.random.default_rng(seed)

    def sample(task: str, number: int) -> EvaluatedSample:
        return EvaluatedSample(
            rollout_id=f"{task}-{number}",
            reward=float(chance.random() < rates[task]),
            outcome=Outcome.SUCCEEDED,
            calls=1,
            prompt_tokens=10,
            completion_tokens=2,
            seconds=0.5,
        )

    return Evaluation(
        policy=name,
        step=None,
        recipe="r",
        samples=samples,
        sampling=None,
        bounds=(0.0, 1.0),
        passes=1.0,
        tasks=tuple(
            EvaluatedTask(
                id=task,
                slices={} if slices is None else {"kind": slices[task]},
                samples=tuple(sample(task, number) for number in range(samples)),
            )
            for task in rates
        ),
        asked=len(rates),
    )


def test_pass_at_k_is_the_share_of_draws_that_have_a_pass() -> None:
    for passed in range(6):
        draws = list(combinations([True] * passed + [False] * (5 - passed), 3))
        assert pass_at_k(5, passed, 3) == pytest.approx(np.mean([any(draw) for draw in draws]))
    with pytest.raises(ValueError, match="pass@4 wants at least 4 samples of a task, and there are 3"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("freedom", "level", "table"), [(1, 0.95, 12.7062), (5, 0.99, 4.0321), (10, 0.95, 2.2281), (10**5, 0.95, 1.95999)]
)
def test_students_t_is_that_of_the_tables(freedom: int, level: float, table: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(table, rel=1e-4)


def test_an_interval_holds_its_mean_95_times_in_100() -> None:
    chance = np.random.default_rng(1)
    found = [mean_interval(make_differences(chance, tasks=60, samples=4, gain=0.0)) for _ in range(1000)]
    covered = sum(one.low is not None and one.high is not None and one.low <= 0.0 <= one.high for one in found)
    assert 930 <= covered <= 970


def test_equal_values_claim_no_certainty() -> None:
    assert mean_interval([1.0] * 8).low is None
    certain = mean_interval([1.0] * 8, bounds=(0.0, 1.0))
    assert certain.low is not None and 0.3 < certain.low < 0.9 and certain.high == 1.0
    assert mean_interval([0.5], bounds=(0.0, 1.0)).low is None


@pytest.mark.parametrize(("tasks", "samples"), [(40, 1), (100, 4)])
def test_of_1000_pairs_without_a_difference_at_most_5_in_100_are_called_different_at_any_look(
    tasks: int, samples: int
) -> None:
    chance = np.random.default_rng(2)
    called = sum(
        bet(
            make_differences(chance, tasks=tasks, samples=samples, gain=0.0), bounds=DIFFERENCES, horizon=tasks
        ).decided_after
        is not None
        for _ in range(1000)
    )
    assert called <= 50, "a decision after any task counts, not only after the last"
    assert called > 0, "else the test would be of no use"


def test_a_gain_of_5_points_is_found_in_400_tasks_of_8_samples() -> None:
    chance = np.random.default_rng(3)
    found = [
        bet(make_differences(chance, tasks=400, samples=8, gain=0.05), bounds=DIFFERENCES, horizon=400)
        for _ in range(100)
    ]
    assert sum(one.verdict is Verdict.BETTER for one in found) >= 88, "80 of 100, with three deviations to spare"
    assert not any(one.verdict is Verdict.WORSE for one in found)
    decided = [one.decided_after for one in found if one.decided_after is not None]
    assert np.median(decided) < 300, "and mostly earlier"


def test_the_verdict_is_that_of_the_interval_and_stays() -> None:
    rewards = np.tile([-1.0, 0.0, -1.0, 1.0, 0.0, -1.0], 60)
    whole = bet(rewards, bounds=DIFFERENCES, horizon=len(rewards))
    assert whole.verdict is Verdict.WORSE and whole.decided_after is not None
    assert whole.interval.high is not None and whole.interval.high <= 0.0
    before = bet(rewards[: whole.decided_after - 1], bounds=DIFFERENCES, horizon=len(rewards))
    assert before.verdict is Verdict.NOT_ENOUGH
    assert (
        before.interval.low is not None
        and before.interval.high is not None
        and before.interval.low <= 0.0 <= before.interval.high
    )
    turned = bet(np.concatenate([rewards, np.ones(9)]), bounds=DIFFERENCES, horizon=len(rewards))
    assert (turned.verdict, turned.decided_after) == (whole.verdict, whole.decided_after)


def test_flipped_signs_count_every_flip_of_few_and_are_near_it_for_many() -> None:
    assert sign_flip_p([1.0] * 5) == 2 / 32
    assert sign_flip_p([0.0, 0.0]) == 1.0
    chance = np.random.default_rng(5)
    few = chance.normal(0.5, 1.0, 12)
    assert sign_flip_p(np.append(few, 0.0)) == pytest.approx(sign_flip_p(few), abs=0.02), (
        "a 13th that says nothing: drawn, not counted"
    )


def test_ranks_of_runs_are_compared_exactly_and_those_that_never_arrived_are_equal() -> None:
    assert rank_sum_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert rank_sum_p([math.inf] * 3, [math.inf] * 4) == 1.0
    assert rank_sum_p([512, 640, math.inf], [math.inf] * 3) == pytest.approx(0.4)
    assert rank_sum_p([3, 1], [2, 2]) == 1.0
    assert rank_sum_p(range(10), range(10, 50)) == pytest.approx(2 / math.comb(50, 10)), "of ten thousand million hands"


def test_holm_multiplies_the_smallest_by_all_and_keeps_the_order() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_a_regression_in_one_slice_is_shown_and_the_others_are_not() -> None:
    kinds = {f"t{number}": f"kind-{number % 10}" for number in range(300)}
    before = dict(zip(kinds, np.random.default_rng(6).beta(0.6, 0.4, 300), strict=True))
    after = {task: rate * (0.3 if kinds[task] == "kind-7" else 1.0) for task, rate in before.items()}
    found = compare(
        make_evaluation(after, name="after", slices=kinds, seed=7),
        make_evaluation(before, name="before", slices=kinds, seed=8),
        ["kind"],
    )
    assert {part.value for part in found.slices if part.verdict is Verdict.WORSE} == {"kind-7"}
    assert not any(part.verdict is Verdict.BETTER for part in found.slices)
    same: list[Verdict] = []
    for seed in range(20):
        first, second = (
            make_evaluation(before, name="same", slices=kinds, seed=number) for number in (seed, 100 + seed)
        )
        same += [part.verdict for part in compare(first, second, ["kind"]).slices]
    assert sum(verdict is not Verdict.NOT_ENOUGH for verdict in same) <= 3, "of 20 evaluations with 10 slices each"


def test_what_the_agent_breaks_is_the_lowest_reward_and_what_we_break_is_nothing() -> None:
    whole = make_evaluation({"a": 1.0, "b": 1.0}, name="p", samples=2, seed=9)
    broken = EvaluatedSample(
        rollout_id="x", reward=None, outcome=Outcome.TIMEOUT, calls=0, prompt_tokens=0, completion_tokens=0, seconds=1.0
    )
    lost = EvaluatedSample(
        rollout_id="y",
        reward=None,
        outcome=Outcome.INFRASTRUCTURE_ERROR,
        calls=0,
        prompt_tokens=None,
        completion_tokens=None,
        seconds=1.0,
    )
    tasks = [
        EvaluatedTask(id=name, slices={}, samples=(whole.tasks[0].samples[0], one))
        for name, one in (("a", broken), ("b", lost))
    ]
    found = replace(whole, tasks=tuple(tasks), price=(1.0, 2.0))
    assert found.means() == {"a": 0.5, "b": 1.0}
    assert (found.failed, found.without_result) == (1, 1)
    wrong = replace(whole.tasks[0].samples[0], reward=-1.0)
    minus = replace(whole, tasks=(replace(tasks[0], samples=(wrong, broken)),))
    assert minus.means() == {"a": -1.0}, (
        "an error is no better than a wrong answer that costs more than the recipe says"
    )
    right = replace(whole, tasks=(replace(tasks[0], samples=(broken, broken)),))
    assert compare(right, minus).difference.mean == 0.0, "also where the other policy alone was wrong"
    at_two = found.pass_at(2)
    assert at_two is not None and at_two.mean == 1.0, "of the one task that has two results"
    assert found.tokens is None and found.cost is None, "where one call's tokens are not known, their sum is not"


def test_rewards_beyond_their_range_get_no_sequential_verdict() -> None:
    first, second = (make_evaluation({"a": 1.0, "b": 0.0}, name=name, samples=1, seed=1) for name in "ab")
    high = replace(first.tasks[0], samples=(replace(first.tasks[0].samples[0], reward=7.0),))
    wild = replace(first, tasks=(high, first.tasks[1]))
    found = compare(wild, second)
    assert found.sequential is None and found.verdict is Verdict.NOT_ENOUGH and found.difference.mean == 3.0


def test_equal_differences_that_rounding_sets_apart_make_nothing_certain() -> None:
    found = mean_interval([0.9 - 0.8, 0.8 - 0.7], bounds=DIFFERENCES)
    assert (found.low, found.high) == DIFFERENCES


def test_a_gap_that_is_no_number_is_no_rounding_of_few_tokens_either() -> None:
    recipe = Recipe(
        agent="agent.py:answer",
        tasks=TasksConfig(train="tasks.py:train"),
        policy=PolicyConfig(model="org/model"),
        rewards={"right": RewardConfig(use="exact")},
        backend="verl",
    )
    gap = Gap(part="all", tokens=FEWEST - 1, mean=math.nan, p99=math.nan, largest=math.nan, far=0.0)
    assert [check.is_passed for check in judge_gaps({"policy": [gap]}, recipe)] == [False]
