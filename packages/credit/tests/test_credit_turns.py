"""Turn rewards and outcome with baselines of their own: the papers' forms, on numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Advantages, ToolCall, ToolStatus, TrajectoryGroup
from lightningrl_credit import TurnReturns, whiten
from lightningrl_credit.baselines import Baseline
from lightningrl_credit.rewards import RewardWeights, ToolStatusReward, TurnReward, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing.groups import make_group, make_trajectory, make_transition

ROOT = math.sqrt(0.5)
"""(1 - ½) over the sample's deviation of 0 and 1."""


def firsts(advantages: Advantages) -> list[list[float]]:
    """Each call's advantage (its first token's)."""
    return [[float(tokens[0]) for tokens in credit if tokens is not None] for credit in advantages]


def test_mt_grpo_worked_by_hand() -> None:
    """Turn 1 found something in b alone, turn 2 answers: A_1 = A^T + A^O, A_2 = A^O  (arXiv 2505.11821)."""
    group = make_group((0.0, None), (1.0, None), rewards=(1.0, 0.0))
    found = firsts(TurnReturns(gamma=0.0, outcome_gamma=1.0, turn_baseline="grpo", epsilon=0.0).assign(group))
    np.testing.assert_allclose(found, [[-ROOT + ROOT, ROOT], [ROOT - ROOT, -ROOT]], atol=1e-6)
    halved = TurnReturns(gamma=0.0, outcome_gamma=1.0, turn_weight=0.5, turn_baseline="grpo", epsilon=0.0)
    half = firsts(halved.assign(group))
    np.testing.assert_allclose(half, [[-0.5 * ROOT + ROOT, ROOT], [0.5 * ROOT - ROOT, -ROOT]], atol=1e-6)


def test_the_outcome_is_discounted_by_its_own_gamma() -> None:
    group = make_group((None,) * 3, (None,), rewards=(1.0, 0.0))
    found = firsts(TurnReturns(gamma=0.1, outcome_gamma=0.5, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose(found[0], [0.125, 0.25, 0.5], rtol=1e-6)
    assert found[1] == [-0.5]


def test_all_turns_of_the_group_have_one_mean_where_it_is_asked_for() -> None:
    """Kevin (arXiv 2507.11948), γ = 0.5: G is 2 2 and 1 0, their mean 1.25; the outcome is equal and says nothing."""
    group = make_group((1.0, 2.0), (1.0, 0.0), rewards=(1.0, 1.0))
    found = firsts(TurnReturns(gamma=0.5, baseline="dr_grpo", compared="all").assign(group))
    np.testing.assert_allclose(found, [[0.75, 0.75], [-0.25, -1.25]], rtol=1e-6)


def test_rebn_is_returns_normalised_over_the_tokens_of_the_batch() -> None:
    """Two tasks, one token for each call: (G - mean) / std of all six returns  (arXiv 2510.01051)."""

    def episode(name: str, rewards: tuple[float, ...], outcome: float) -> TrajectoryGroup:
        calls = [
            make_transition(f"{name}/{t}", index=t, completion=[7], rewards={"turn": reward})
            for t, reward in enumerate(rewards)
        ]
        return TrajectoryGroup(id=name, trajectories=(make_trajectory(name, calls, reward=outcome, group_id=name),))

    groups = [episode("a", (0.0, 1.0), 1.0), episode("b", (0.5, 0.0, 0.0), 0.0), episode("c", (0.0,), 1.0)]
    assigner = TurnReturns(gamma=0.5, baseline="none")
    assert assigner.requires == {"turn_rewards"}, "it compares with nobody"
    found = whiten(groups, [assigner.assign(group) for group in groups])
    returns = np.array([0.5 * 2.0, 2.0, 0.5, 0.0, 0.0, 1.0])
    ours = np.concatenate([tokens for group in found for calls in group for tokens in calls if tokens is not None])
    np.testing.assert_allclose(ours, (returns - returns.mean()) / returns.std(), rtol=1e-5)


def test_the_turns_may_have_another_baseline_than_the_outcome() -> None:
    group = make_group((0.0,), (1.0,), rewards=(4.0, 0.0))
    found = firsts(TurnReturns(baseline="maxrl", turn_baseline="none", epsilon=0.0).assign(group))
    np.testing.assert_allclose(found, [[1.0 + 0.0], [-1.0 + 1.0]], atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_branch_that_earned_nothing_changes_no_return(gamma: float) -> None:
    """Returns of a chain are summed backwards, others over what follows: both ways agree."""
    rewards = [0.3, None, -1.0, 0.25, 2.0]
    chain = make_group(rewards, rewards=(0.5,)).trajectories[0]
    forked = make_trajectory(
        "r",
        [
            *chain.transitions,
            make_transition("beside", index=9, prompt=[1], parent=chain.transitions[0].id, rewards={"turn": 0.0}),
        ],
        reward=0.5,
    )
    whole = TurnReturns(gamma=gamma, outcome_gamma=0.0)
    np.testing.assert_allclose(whole.returns(chain)[:-1], whole.returns(forked)[: len(rewards) - 1], rtol=1e-12)


def credit_of_calls(pay: float, **options: Any) -> list[float]:
    """Credit of eight calls through the whole Scorer: four of them are right, and the tool of the first, a right one,
    fails, for which it is charged `pay`."""
    reward = TurnReward(name="tools", function=ToolStatusReward(ok=0.0, error=-pay))
    rollouts = []
    for i in range(8):
        tool = ToolCall(
            id=f"t{i}",
            name="search",
            arguments="{}",
            status=ToolStatus.OK if i else ToolStatus.ERROR,
            transition_id=f"r{i}/0",
        )
        call = make_transition(f"r{i}/0", tool_call_ids=(tool.id,))
        rollout = make_trajectory(f"r{i}", [call], reward=float(i < 4), tool_calls=[tool])
        paid = replace(call, rewards={"tools": reward(rollout)[0]})
        rollouts.append(replace(rollout, transitions=(paid,)))
    scorer = Scorer(
        credit=TurnReturns(**options),
        rewards=RewardWeights([WeightedReward(name="reward")]),
        samples=SamplesConfig(),
        trained={"policy": TrainedCalls()},
    )
    step = scorer.build(scorer.credit(rollouts))
    return [float(calls[0][0]) for calls in step.advantages[0] if calls[0] is not None]


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "maxrl", "none"])
def test_a_hundredth_of_the_pay_is_a_hundredth_of_the_credit(baseline: Baseline) -> None:
    """Divided by their own deviation 0.1 and 0.001 were credited alike, -1.54 for a right call."""
    unpaid, large, small = (np.array(credit_of_calls(pay, baseline=baseline)) for pay in (0.0, 0.1, 0.001))
    np.testing.assert_allclose(small - unpaid, (large - unpaid) / 100, atol=1e-6)
    if baseline == "grpo":
        assert large[0] == pytest.approx(math.sqrt(7 / 8) - 0.1 * 7 / 8, abs=1e-5)
    assert large[0] > max(large[4:])


def test_a_paper_that_divides_turn_rewards_by_their_deviation_is_an_option() -> None:
    small, large = (credit_of_calls(pay, turn_baseline="grpo", epsilon=0.0) for pay in (0.001, 0.1))
    np.testing.assert_allclose(small, large, rtol=1e-5)
    assert large[0] == pytest.approx(-1.54, abs=0.01)
