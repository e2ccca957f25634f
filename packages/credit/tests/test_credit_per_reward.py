"""Rewards that pay some roles alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightningrl.types import Trajectory, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, assign_credit
from lightningrl_credit.rewards import NamedReward, RewardSet, RewardWeights
from lightningrl_testing.groups import make_trajectory, make_transition

REWARDS = RewardWeights(
    [
        NamedReward(name="team", function=lambda *_: 0.0, weight=2.0),
        NamedReward(name="draft", function=lambda *_: 0.0, agents=frozenset({"write"})),
        NamedReward(name="verdict", function=lambda *_: None, weight=0.5, agents=frozenset({"check"})),
    ]
)


def episode(name: str, **rewards: float | None) -> Trajectory:
    calls = [
        replace(make_transition(f"{name}/{index}"), agent=agent) for index, agent in enumerate(("write", "check", None))
    ]
    return replace(make_trajectory(name, calls, reward=1.0), rewards=rewards)


def group_of(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", trajectories=trajectories)


def test_each_role_is_compared_by_the_rewards_that_it_is_paid() -> None:
    group = group_of(episode("a", team=1.0, draft=1.0, verdict=0.0), episode("b", team=1.0, draft=0.0, verdict=4.0))
    first, second = assign_credit(IdenticalAssignment(baseline="dr_grpo"), group, paid=REWARDS)
    assert [float(credit[0]) for credit in first if credit is not None] == pytest.approx([0.5, -1.0, 0.0])
    assert [float(credit[0]) for credit in second if credit is not None] == pytest.approx([-0.5, 1.0, 0.0])


def test_a_role_whose_reward_is_missing_is_not_scored_and_the_others_are() -> None:
    group = group_of(episode("a", team=1.0, draft=1.0, verdict=None), episode("b", team=0.0, draft=0.0, verdict=None))
    first, _ = assign_credit(IdenticalAssignment(baseline="dr_grpo"), group, paid=REWARDS)
    assert first[0] is not None and first[2] is not None
    assert first[1] is None


def test_it_goes_together_with_comparing_by_role() -> None:
    group = group_of(episode("a", team=1.0, draft=1.0, verdict=0.0), episode("b", team=0.0, draft=0.0, verdict=1.0))
    for credit in (calls[0] for calls in assign_credit(IdenticalAssignment(), group, compare="role", paid=REWARDS)):
        assert credit is not None
        np.testing.assert_allclose(np.abs(credit), 1 / np.sqrt(2), rtol=1e-4)


async def test_a_reward_for_one_role_may_be_none_and_one_for_all_may_not() -> None:
    def reward(value: float | None, *roles: str) -> NamedReward:
        return NamedReward(name=f"{value}-{roles}", function=lambda *_: value, agents=frozenset(roles) or None)

    some = make_trajectory("r", [make_transition("r/0")], reward=None)
    assert (await RewardSet([reward(1.0), reward(None, "check")]).score(some)).total == 1.0
    assert (await RewardSet([reward(None), reward(1.0, "check")]).score(some)).total is None
    assert (await RewardSet([reward(None, "write"), reward(None, "check")]).score(some)).total is None
