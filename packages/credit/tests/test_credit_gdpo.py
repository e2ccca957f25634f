"""Several rewards, each compared by itself in its group, then added and whitened (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, TurnReturns, assign_credit, has_signal
from lightningrl_credit.baselines import Baseline
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_testing.groups import make_group, make_trajectory, make_transition
from lightningrl_training.build import build_credit

WEIGHTS = {"right": 1.0, "format": 0.5}


def episode(
    name: str, *, agents: tuple[str | None, ...] = (None,), group: str = "g", **rewards: float | None
) -> Trajectory:
    calls = [
        make_transition(f"{name}/{t}", index=t, agent=agent, completion=range(1, 2 + len(name) % 3))
        for t, agent in enumerate(agents)
    ]
    total = sum(WEIGHTS.get(key, 1.0) * (value or 0.0) for key, value in rewards.items())
    return replace(make_trajectory(name, calls, reward=total, group_id=group), rewards=rewards)


def group_of(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id=trajectories[0].group_id, trajectories=trajectories)


def firsts(advantages: Advantages) -> list[float | None]:
    """Of each trajectory its first call's."""
    return [None if calls[0] is None else float(calls[0][0]) for calls in advantages]


def test_rewards_of_another_scale_and_the_same_sum_are_told_apart() -> None:
    """By hand, eq. 4 and 5: right (1, 1, 0) has mean 2/3 and deviation 1/√3, format (0, 2, 2) has 4/3 and 2/√3; sums
    (1, 2, 1).

    A_right = (1/√3, 1/√3, -2/√3)     A_format = (-2/√3, 1/√3, 1/√3)     A = A_right + A_format / 2 = (0, 1.5/√3, -1.5/√3)
    """
    group = group_of(
        episode("a", right=1.0, format=0.0), episode("b", right=1.0, format=2.0), episode("c", right=0.0, format=2.0)
    )
    assert [one.reward for one in group.trajectories] == [1.0, 2.0, 1.0], "GRPO takes the first for the third's equal"
    together = firsts(assign_credit(IdenticalAssignment(epsilon=0.0), group))
    assert together[0] == together[2]
    apart = firsts(assign_credit(IdenticalAssignment(epsilon=0.0), group, weights=WEIGHTS))
    assert apart == pytest.approx([0.0, 1.5 / 3**0.5, -1.5 / 3**0.5], abs=1e-7)


def test_equal_rewards_give_exact_zeros() -> None:
    for value in (0.0, 0.1, -3.7e5):
        group = group_of(*(episode(name, right=value, format=value / 3) for name in ("a", "bb", "ccc")))
        advantages = assign_credit(IdenticalAssignment(), group, weights=WEIGHTS)
        assert set(firsts(advantages)) == {0.0}
        assert not has_signal(group, advantages)


def test_a_reward_that_is_equal_throughout_says_nothing_beside_one_that_is_not() -> None:
    group = group_of(episode("a", right=1.0, format=0.3), episode("b", right=0.0, format=0.3))
    both = assign_credit(IdenticalAssignment(), group, weights=WEIGHTS)
    alone = assign_credit(IdenticalAssignment(), group, weights={"right": 1.0})
    assert firsts(both) == firsts(alone)
    assert firsts(both)[0] == pytest.approx(2**-0.5, abs=1e-5)


@pytest.mark.parametrize("baseline", ["dr_grpo", "rloo", "none"])
def test_for_a_baseline_that_divides_by_nothing_it_is_the_same_as_the_sum(baseline: Baseline) -> None:
    group = group_of(
        episode("a", right=1.0, format=0.5), episode("b", right=0.0, format=1.0), episode("c", right=0.5, format=0.0)
    )
    apart, together = (
        firsts(assign_credit(IdenticalAssignment(baseline=baseline), group, weights=weights))
        for weights in (WEIGHTS, None)
    )
    assert apart == pytest.approx(together, abs=1e-6)


def test_a_rollout_without_a_reward_stays_out_of_every_mean() -> None:
    group = group_of(episode("a", right=1.0, format=0.0), episode("b", right=0.0, format=1.0))
    failed = replace(episode("c", right=9.0, format=None), reward=None)
    with_failed = assign_credit(IdenticalAssignment(), group_of(*group.trajectories, failed), weights=WEIGHTS)
    assert firsts(with_failed) == [*firsts(assign_credit(IdenticalAssignment(), group, weights=WEIGHTS)), None]


def test_turn_rewards_count_once_however_many_rewards_there_are() -> None:
    group = make_group((0.5, 0.0), (0.0, 0.25), rewards=(0.0, 0.0))
    group = replace(
        group, trajectories=tuple(replace(one, rewards={"right": 0.0, "format": 0.0}) for one in group.trajectories)
    )
    plain = assign_credit(TurnReturns(gamma=0.9), group)
    apart = assign_credit(TurnReturns(gamma=0.9), group, weights=WEIGHTS)
    for calls, others in zip(plain, apart, strict=True):
        for credit, other in zip(calls, others, strict=True):
            assert credit is not None and other is not None
            np.testing.assert_allclose(credit, other, atol=1e-6)


def test_each_role_is_credited_with_its_own_rewards_each_by_itself() -> None:
    roles = ("write", "check")
    paid = RewardWeights(
        [
            WeightedReward(name="right"),
            WeightedReward(name="format", weight=0.5, agents=frozenset({"check"})),
        ]
    )
    group = group_of(
        episode("a", agents=roles, right=1.0, format=0.0), episode("b", agents=roles, right=0.0, format=7.0)
    )
    first, second = assign_credit(IdenticalAssignment(epsilon=0.0), group, paid=paid, weights=paid.by_name)
    half = 2**-0.5
    assert [float(credit[0]) for credit in first if credit is not None] == pytest.approx([half, half - 0.5 * half])
    assert [float(credit[0]) for credit in second if credit is not None] == pytest.approx([-half, -half + 0.5 * half])


async def test_a_recipe_asks_for_it_with_one_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def tasks():\n    return [{'id': 't', 'input': 1}]\n"
        "def right(task, output, trajectory):\n    return output[0]\n"
        "def form(task, output, trajectory):\n    return output[1]\n",
        encoding="utf-8",
    )
    recipe = {
        "agent": "mine.py:right",
        "tasks": {"train": "mine.py:tasks"},
        "policy": {"model": "org/model"},
        "rewards": {"right": {"use": "mine.py:right"}, "format": {"use": "mine.py:form", "weight": 0.5}},
        "credit": {"use": "grpo", "per_reward": True, "options": {"epsilon": 0.0}},
        "folder": tmp_path,
    }
    evaluator, scorer = build_credit(Recipe.model_validate(recipe), load_plugins())
    played = [
        make_trajectory(name, [make_transition(f"{name}/0")], output=output, reward=None)
        for name, output in (("a", [1, 0]), ("b", [1, 2]), ("c", [0, 2]))
    ]
    (credited,) = scorer.credit(await evaluator.evaluate(played))
    assert firsts(credited.advantages) == pytest.approx([0.0, 1.5 / 3**0.5, -1.5 / 3**0.5], abs=1e-7)
