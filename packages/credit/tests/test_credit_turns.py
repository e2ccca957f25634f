"""Turn rewards and outcome with baselines of their own: the papers' forms, on numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit import TurnReturns, whiten
from lightningrl_testing.groups import make_group, make_trajectory, make_transition

ROOT = math.sqrt(0.5)
"""(1 - ½) over the sample's deviation of 0 and 1."""


def firsts(advantages: Advantages) -> list[list[float]]:
    """Each call's advantage (its first token's)."""
    return [[float(tokens[0]) for tokens in credit if tokens is not None] for credit in advantages]


def test_mt_grpo_worked_by_hand() -> None:
    """Turn 1 found something in b alone, turn 2 answers: A_1 = A^T + A^O, A_2 = A^O  (arXiv 2505.11821)."""
    group = make_group((0.0, None), (1.0, None), rewards=(1.0, 0.0))
    found = firsts(TurnReturns(gamma=0.0, outcome_gamma=1.0, epsilon=0.0).assign(group))
    np.testing.assert_allclose(found, [[-ROOT + ROOT, ROOT], [ROOT - ROOT, -ROOT]], atol=1e-6)
    half = firsts(TurnReturns(gamma=0.0, outcome_gamma=1.0, turn_weight=0.5, epsilon=0.0).assign(group))
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
