"""Advantages agree with verl's `core_algos`, an independent implementation, on random groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightningrl.types import TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, assign_credit, whiten
from lightningrl_testing.groups import make_trajectory, make_transition


def random_groups(seed: int) -> list[TrajectoryGroup]:
    """Five tasks, groups of 1 to 9 single-call episodes; binary, graded or equal rewards."""
    random = np.random.default_rng(seed)
    groups = []
    for g in range(5):
        size = int(random.integers(1, 10))
        rewards = (
            np.full(size, random.normal()),
            random.integers(0, 2, size).astype(float),
            random.normal(size=size) * 10,
        )[int(random.integers(0, 3))]
        groups.append(
            TrajectoryGroup(
                id=f"g{g}",
                trajectories=tuple(
                    make_trajectory(
                        f"g{g}/{i}",
                        [make_transition(f"g{g}/{i}/0", completion=range(1, 2 + int(random.integers(0, 6))))],
                        reward=float(r),
                    )
                    for i, r in enumerate(rewards)
                ),
            )
        )
    return groups


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "opo"])
def test_advantages_agree_with_verl(core_algos: Any, baseline: Any, seed: int) -> None:
    import torch

    groups = [group for group in random_groups(seed) if len(group.trajectories) > 1]
    members = [(g, trajectory) for g, group in enumerate(groups) for trajectory in group.trajectories]
    lengths = [len(trajectory.transitions[0].completion_ids) for _, trajectory in members]
    mask = torch.tensor([[float(t < length) for t in range(max(lengths))] for length in lengths], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    for row, ((_, trajectory), length) in enumerate(zip(members, lengths, strict=True)):
        rewards[row, length - 1] = trajectory.reward or 0.0
    index = np.array([g for g, _ in members])
    if baseline == "rloo":
        theirs, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
    elif baseline == "opo":
        theirs, _ = core_algos.compute_opo_outcome_advantage(rewards, mask, index)
    else:
        theirs, _ = core_algos.compute_grpo_outcome_advantage(
            rewards, mask, index, norm_adv_by_std_in_grpo=baseline == "grpo"
        )
    ours = [credit[0] for group in groups for credit in IdenticalAssignment(baseline=baseline).assign(group)]
    for row, (advantages, length) in enumerate(zip(ours, lengths, strict=True)):
        assert advantages is not None
        np.testing.assert_allclose(advantages, theirs[row, :length].numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("baseline", ["none", "dr_grpo"])
def test_whitened_advantages_agree_with_verls_reinforce_plus_plus(core_algos: Any, baseline: Any, seed: int) -> None:
    """Without a baseline REINFORCE++, with the group's mean REINFORCE++-baseline. verl's variance divides by n - 1,
    ours by n."""
    import torch

    groups = [group for group in random_groups(seed) if len(group.trajectories) > 1]
    members = [(g, trajectory) for g, group in enumerate(groups) for trajectory in group.trajectories]
    lengths = [len(trajectory.transitions[0].completion_ids) for _, trajectory in members]
    mask = torch.tensor([[float(t < length) for t in range(max(lengths))] for length in lengths], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    for row, ((_, trajectory), length) in enumerate(zip(members, lengths, strict=True)):
        rewards[row, length - 1] = trajectory.reward or 0.0
    if baseline == "none":
        theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=SimpleNamespace(gamma=1.0)
        )
    else:
        index = np.array([g for g, _ in members])
        theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    found = whiten(groups, [IdenticalAssignment(baseline=baseline).assign(group) for group in groups])
    ours = np.concatenate([tokens for group in found for calls in group for tokens in calls if tokens is not None])
    count = len(ours)
    np.testing.assert_allclose(ours * np.sqrt((count - 1) / count), theirs[mask.bool()].numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_maxrl_agrees_with_the_authors_formula(seed: int) -> None:
    """verl has none. The authors' `compute_maxrl_outcome_advantage` is (score - mean) / (mean + 1e-6) within a prompt's
    scores."""
    for group in random_groups(seed):
        rewards = np.abs([trajectory.reward or 0.0 for trajectory in group.trajectories])
        if len(rewards) < 2 or np.ptp(rewards) == 0.0:
            continue
        positive = [
            replace(trajectory, reward=float(r)) for trajectory, r in zip(group.trajectories, rewards, strict=True)
        ]
        credit = IdenticalAssignment(baseline="maxrl").assign(replace(group, trajectories=tuple(positive)))
        ours = [float(tokens[0]) for calls in credit for tokens in calls if tokens is not None]
        np.testing.assert_allclose(ours, (rewards - rewards.mean()) / (rewards.mean() + 1e-6), atol=1e-6, rtol=1e-6)


def test_group_of_one_differs_from_verl_on_purpose(core_algos: Any) -> None:
    """verl sets the mean of a single trajectory to 0, so its raw reward becomes the advantage; ours says 0.0: nothing
    to compare with."""
    import torch

    theirs, _ = core_algos.compute_grpo_outcome_advantage(torch.tensor([[5.0]]), torch.ones(1, 1), np.array([0]))
    ours = IdenticalAssignment().assign(
        TrajectoryGroup(id="g", trajectories=(make_trajectory("r", [make_transition("t")], reward=5.0),))
    )
    assert float(theirs[0, 0]) == pytest.approx(5.0, rel=1e-5)
    assert ours[0][0] is not None
    assert set(ours[0][0].tolist()) == {0.0}


@pytest.mark.parametrize("seed", range(5))
def test_rewards_compared_each_by_itself_agree_with_verls_gdpo(core_algos: Any, seed: int) -> None:
    """Whitening included: verl's divides by the sample's deviation, ours by the population's."""
    import torch

    random = np.random.default_rng(seed)
    weights = {"right": 1.0, "format": 0.5}
    groups = [group for group in random_groups(seed) if len(group.trajectories) > 1]
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(one, rewards={"right": float(random.integers(0, 2)), "format": 10 * float(random.normal())})
                for one in group.trajectories
            ),
        )
        for group in groups
    ]
    members = [(g, one) for g, group in enumerate(groups) for one in group.trajectories]
    lengths = [len(one.transitions[0].completion_ids) for _, one in members]
    mask = torch.tensor([[float(t < length) for t in range(max(lengths))] for length in lengths])
    prompts = torch.ones(len(members), 1)
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros_like(mask),
        response_mask=mask,
        index=np.array([g for g, _ in members]),
        config={"gdpo_reward_keys": list(weights), "gdpo_reward_weights": list(weights.values())},
        non_tensor_batch={name: np.array([one.rewards[name] for _, one in members], np.float32) for name in weights},
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, mask], dim=1).long()},
    )
    count = int(mask.sum())
    advantages = whiten(groups, [assign_credit(IdenticalAssignment(), group, weights=weights) for group in groups])
    ours = [calls[0] for group in advantages for calls in group]
    for row, (credit, length) in enumerate(zip(ours, lengths, strict=True)):
        assert credit is not None
        np.testing.assert_allclose(
            credit * np.sqrt((count - 1) / count), theirs[row, :length].numpy(), atol=1e-6, rtol=1e-6
        )
