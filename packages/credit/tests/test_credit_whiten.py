"""Whitening: one mean and deviation for a step's trained tokens; with it, group baselines become REINFORCE++'s."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, whiten
from lightningrl_testing.groups import make_trajectory, make_transition


def make_step() -> tuple[list[TrajectoryGroup], list[Advantages]]:
    """Two groups of rollouts whose completions differ in length."""
    groups, number = [], 0
    for group, rewards in enumerate(((1.0, 0.0, 0.5), (0.0, 0.0, 1.0))):
        members = []
        for reward in rewards:
            number += 1
            call = make_transition(f"{number}/0", completion=tuple(range(10, 10 + number)))
            members.append(make_trajectory(str(number), [call], reward=reward, group_id=f"g{group}"))
        groups.append(TrajectoryGroup(id=f"g{group}", trajectories=tuple(members)))
    assigner = IdenticalAssignment(baseline="dr_grpo")
    return groups, [assigner.assign(group) for group in groups]


def tokens_of(advantages: tuple[Advantages, ...]) -> np.ndarray:
    return np.concatenate([credit for group in advantages for calls in group for credit in calls if credit is not None])


def test_trained_tokens_have_mean_zero_and_deviation_one() -> None:
    groups, advantages = make_step()
    tokens = tokens_of(whiten(groups, advantages))
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std() == pytest.approx(1.0, abs=1e-5)


def test_what_is_not_trained_does_not_count_and_what_nobody_scored_stays_so() -> None:
    silent = make_transition("a/1", completion=(5, 6), trainable=False)
    unscored = make_transition("a/2", completion=(7,))
    loud = make_transition("a/0", completion=(4, 8))
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("a", [loud, silent, unscored]),))
    credit: Advantages = ((np.array([1.0, 3.0], np.float32), np.array([100.0, 100.0], np.float32), None),)
    whitened = whiten([group], [credit])
    first, second = whitened[0][0][0], whitened[0][0][2]
    assert first is not None
    assert first.tolist() == pytest.approx([-1.0, 1.0])
    assert second is None


def test_equal_advantages_become_zero_not_infinite() -> None:
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("a", [make_transition("a/0", completion=(4, 8))]),))
    whitened = whiten([group], [((np.array([2.0, 2.0], np.float32),),)])
    assert tokens_of(whitened).tolist() == [0.0, 0.0]
    assert whiten([], []) == ()


def test_dr_grpo_whitened_is_verls_reinforce_plus_plus_baseline(core_algos: ModuleType) -> None:
    import torch

    groups, advantages = make_step()
    rollouts = [trajectory for group in groups for trajectory in group.trajectories]
    longest = max(len(rollout.transitions[0].completion_ids) for rollout in rollouts)
    mask, rewards = torch.zeros(len(rollouts), longest), torch.zeros(len(rollouts), longest)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.transitions[0].completion_ids)
        mask[row, :length] = 1.0
        rewards[row, length - 1] = float(rollout.reward or 0.0)
    index = np.array([rollout.group_id for rollout in rollouts], dtype=object)
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    ours = tokens_of(whiten(groups, advantages))
    # verl's deviation divides by n - 1
    count = len(ours)
    np.testing.assert_allclose(ours * np.sqrt((count - 1) / count), theirs[mask.bool()].numpy(), atol=1e-4)


def test_tokens_that_a_grammar_forced_do_not_count() -> None:
    """They are not trained (logprob 0.0): a long forced frame pulled mean and deviation to its calls."""
    free = make_transition("a/0", completion=(4, 8))
    frame = make_transition("a/1", index=1, completion=(5, 6, 7, 9))
    forced = replace(
        frame,
        sampling=replace(frame.sampling, grammar="root ::= [a-z]+"),
        logprobs=np.array([-0.1, 0.0, 0.0, 0.0], np.float32),
    )
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("a", [free, forced]),))
    credit: Advantages = ((np.array([1.0, 1.0], np.float32), np.full(4, 4.0, np.float32)),)
    first, second = whiten([group], [credit])[0][0]
    assert first is not None and second is not None
    trained = np.concatenate([first, second[forced.chosen]])
    assert (trained.mean(), trained.std()) == pytest.approx((0.0, 1.0), abs=1e-6)
