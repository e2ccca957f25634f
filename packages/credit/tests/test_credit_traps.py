"""What is commonly got wrong in credit assignment: each trap has a test that fails when it is stepped into.

The numbers are those of the list that the credit pages are written from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, Part, StateGroups, Sum, TurnReturns, assign_credit, whiten
from lightningrl_credit.baselines import Baseline
from lightningrl_credit.samples import build_samples
from lightningrl_testing.groups import make_group, make_trajectory, make_transition


def firsts(advantages: Advantages) -> list[list[float]]:
    """Each call's advantage (its first token's)."""
    return [[float(tokens[0]) for tokens in credit if tokens is not None] for credit in advantages]


def walk(
    name: str, states: Sequence[int], reward: float, *, says: Sequence[int] = (), agent: str | None = None
) -> Trajectory:
    """An episode through numbered states: the prompt is the state. `says` are its completions, different ones unless
    given."""
    calls = [
        make_transition(
            f"{name}/{t}",
            prompt=[state],
            completion=[says[t] if says else 100 * ord(name[0]) + t],
            index=t,
            agent=agent,
        )
        for t, state in enumerate(states)
    ]
    return make_trajectory(name, calls, reward=reward)


def group_of(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", trajectories=trajectories)


# ------------------------------------------------------------------ 1


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo", "maxrl", "opo"])
def test_trap_01_equal_successes_are_no_signal_under_a_discount(baseline: Baseline) -> None:
    group = make_group(*((0.0,) * 5,) * 4, rewards=(1.0,) * 4)
    assert firsts(TurnReturns(gamma=0.9, baseline=baseline).assign(group)) == [[0.0] * 5] * 4


def test_trap_01_the_outcome_is_compared_before_it_is_discounted() -> None:
    """An early turn of a winner is never punished for being early."""
    group = make_group((0.0,) * 5, (0.0,) * 5, rewards=(1.0, 0.0))
    won, lost = firsts(TurnReturns(gamma=0.9).assign(group))
    assert min(won) > 0.0 > max(lost)
    assert won == sorted(won)


def test_trap_01_all_turns_together_are_still_no_signal_where_only_positions_differ() -> None:
    group = make_group(*((0.1, 0.4, 0.2),) * 3, rewards=(1.0,) * 3)
    assert firsts(TurnReturns(gamma=0.4, compared="all").assign(group)) == [[0.0] * 3] * 3


# ------------------------------------------------------------------ 2


def test_trap_02_the_episode_part_counts_each_rollout_once_and_not_each_of_its_steps() -> None:
    """Across step rows the mean of 1 and 0 would be 0.9: nine turns of a winner against one of a loser."""
    group = group_of(walk("long", range(10, 19), 1.0), walk("short", [20], 0.0))
    long, short = firsts(StateGroups(baseline="dr_grpo").assign(group))
    assert long == [0.5] * 9
    assert short == [-0.5]


# ------------------------------------------------------------------ 3


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo", "rloo"])
def test_trap_03_a_state_that_one_rollout_alone_was_in_has_no_step_credit(baseline: Any) -> None:
    """Neither its raw return nor what its own second visit makes of it."""
    group = group_of(walk("a", [1, 1, 2], 1.0), walk("b", [3], 0.0))
    only_steps = firsts(StateGroups(episode=0.0, baseline=baseline).assign(group))
    assert only_steps == [[0.0] * 3, [0.0]]


def test_trap_03_a_state_where_all_returns_are_equal_has_no_step_credit() -> None:
    group = group_of(walk("a", [1, 5], 1.0), walk("b", [1, 6], 1.0), walk("c", [7, 8], 0.0))
    assert firsts(StateGroups(episode=0.0).assign(group)) == [[0.0, 0.0]] * 3


def test_trap_03_singletons_are_counted() -> None:
    group = group_of(walk("a", [1, 2], 1.0), walk("b", [1, 3], 0.0), walk("c", [4, 5], 0.0))
    assigner = StateGroups()
    metrics = assigner.finish_step([group], [assigner.assign(group)])
    assert metrics == {"anchor_hit_rate": pytest.approx(1 / 3), "zero_step_credit": pytest.approx(2 / 3)}


def test_trap_03_a_rare_action_is_shrunk_to_the_mean_of_its_state() -> None:
    """One lucky call of three: its advantage is n / (n + κ) of what it was."""
    rollouts = [
        walk(name, [1], reward, says=[said]) for name, reward, said in (("a", 1.0, 7), ("b", 0.0, 8), ("c", 0.0, 8))
    ]
    plain, shrunk = (
        firsts(StateGroups(episode=0.0, baseline="dr_grpo", shrinkage=shrinkage).assign(group_of(*rollouts)))
        for shrinkage in (0.0, 2.0)
    )
    np.testing.assert_allclose(plain, [[2 / 3], [-1 / 3], [-1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(shrunk, [[2 / 3 * 1 / 3], [-1 / 3 * 2 / 4], [-1 / 3 * 2 / 4]], rtol=1e-6)


# ------------------------------------------------------------------ 4


def test_trap_04_states_are_compared_within_a_task_only() -> None:
    """The same prompt in two tasks' groups: what one group earned changes nothing in the other."""
    here = group_of(walk("a", [1], 1.0), walk("b", [1], 0.0))
    assigner = StateGroups()
    alone = firsts(assigner.assign(here))
    assigner.assign(group_of(walk("c", [1], 100.0), walk("d", [1], 50.0)))
    assert firsts(assigner.assign(here)) == alone


def test_trap_04_the_key_is_what_the_policy_saw_before_the_turn() -> None:
    """Equal completions from other prompts are other states; equal prompts are one, whatever was said there."""
    assigner = StateGroups(episode=0.0)
    assert firsts(assigner.assign(group_of(walk("a", [1], 1.0, says=[7]), walk("b", [2], 0.0, says=[7])))) == [
        [0.0],
        [0.0],
    ]
    assert firsts(assigner.assign(group_of(walk("a", [1], 1.0, says=[7]), walk("b", [1], 0.0, says=[8]))))[0][0] > 0.0


def test_trap_04_two_roles_are_never_in_one_state() -> None:
    group = group_of(walk("a", [1], 1.0, agent="write"), walk("b", [1], 0.0, agent="check"))
    assert firsts(StateGroups(episode=0.0).assign(group)) == [[0.0], [0.0]]


# ------------------------------------------------------------------ 12


def test_trap_12_whitening_is_over_the_tokens_of_the_batch_that_are_trained() -> None:
    """Not over groups, not over rows: long completions count by their tokens, frozen ones not at all."""
    groups = [
        group_of(
            make_trajectory("a", [make_transition("a/0", completion=range(9))], reward=1.0),
            make_trajectory(
                "b", [make_transition("b/0"), make_transition("b/1", completion=range(50), trainable=False)], reward=0.0
            ),
        ),
        group_of(
            make_trajectory("c", [make_transition("c/0")], reward=5.0),
            make_trajectory("d", [make_transition("d/0")], reward=3.0),
        ),
    ]
    found = whiten(groups, [IdenticalAssignment(baseline="dr_grpo").assign(group) for group in groups])
    raw = np.array([0.5] * 9 + [-0.5] * 2 + [1.0] * 2 + [-1.0] * 2)
    tokens = np.concatenate([credit for group in found for calls in group for credit in calls if credit is not None])
    np.testing.assert_allclose(tokens, (raw - raw.mean()) / raw.std(), rtol=1e-5)


def test_trap_12_whether_a_role_is_compared_by_rollouts_or_by_its_calls_is_chosen() -> None:
    """Dr. MAS takes the calls: a role that acted thrice in the winner has a higher mean."""

    def episode(name: str, acts: int, reward: float) -> Trajectory:
        return make_trajectory(
            name, [make_transition(f"{name}/{t}", agent="solve", index=t) for t in range(acts)], reward=reward
        )

    group = group_of(episode("a", 3, 1.0), episode("b", 1, 0.0))
    by_rollout, by_call = (
        firsts(Sum(Part(IdenticalAssignment(baseline="dr_grpo"), compare="role", counted=counted)).assign(group))
        for counted in ("rollouts", "calls")
    )
    assert by_rollout == [[0.5] * 3, [-0.5]]
    assert by_call == [[0.25] * 3, [-0.75]]
    paper = (np.array([1.0, 1.0, 1.0, 0.0]) - 0.75) / np.std([1.0, 1.0, 1.0, 0.0], ddof=1)
    np.testing.assert_allclose(
        np.concatenate(firsts(Sum(Part(IdenticalAssignment(), compare="role", counted="calls")).assign(group))),
        paper,
        rtol=1e-5,
    )


# ------------------------------------------------------------------ 13


def test_trap_13_the_deviation_is_the_samples_and_epsilon_stands_outside_of_it() -> None:
    """N = 2: ddof = 0 would give ±1; ε within the root would give 0.5 / sqrt(0.5 + ε)."""
    low, high = firsts(IdenticalAssignment(epsilon=0.5).assign(make_group((0.0,), (1.0,))))
    assert high[0] == pytest.approx(0.5 / (0.5**0.5 + 0.5))
    assert low[0] == -high[0]


def test_trap_13_without_the_deviation_hard_and_easy_tasks_count_by_what_is_to_be_learned() -> None:
    """σ blows up the group with the smallest difference; dr_grpo, rloo, opo and reinforce leave it small."""
    near, far = make_group((0.99,), (1.0,)), make_group((0.0,), (1.0,))
    for baseline in ("dr_grpo", "rloo", "opo"):
        small, large = (firsts(IdenticalAssignment(baseline=baseline).assign(group))[1][0] for group in (near, far))
        assert small == pytest.approx(large / 100, rel=1e-3)
    small, large = (firsts(IdenticalAssignment().assign(group))[1][0] for group in (near, far))
    assert small == pytest.approx(large, rel=1e-3)


def test_trap_13_returns_are_not_rounded_to_bfloat16() -> None:
    """At 256 and above bfloat16 cannot tell numbers apart that differ by less than 2."""
    rewards = [1000.0, 1000.5, 1001.0]
    found = [
        calls[0]
        for calls in firsts(
            IdenticalAssignment(baseline="dr_grpo").assign(make_group(*((reward,) for reward in rewards)))
        )
    ]
    assert found == [-0.5, 0.0, 0.5]


# ------------------------------------------------------------------ 14


@pytest.mark.parametrize("assigner", [IdenticalAssignment(), TurnReturns(gamma=0.9), StateGroups(key="observation")])
def test_trap_14_credit_is_assigned_before_rows_and_splitting_a_rollout_changes_no_weight(
    assigner: CreditAssigner,
) -> None:
    group = make_group((0.1, 0.2, 0.3), (0.0, 0.5), (0.2,), rewards=(1.0, 0.0, 0.5))
    advantages = assigner.assign(group)
    sums = {}
    for rows in ("call", "merged"):
        samples = build_samples([group], [advantages], rows=rows, aggregation="rollout_mean")
        sums[rows] = [
            (
                sum(float(sample.weights.sum()) for sample in samples if sample.rollout_id == one.rollout_id),
                sum(
                    float(sample.weights @ sample.advantages)
                    for sample in samples
                    if sample.rollout_id == one.rollout_id
                ),
            )
            for one in group.trajectories
        ]
    np.testing.assert_allclose(sums["call"], sums["merged"], rtol=1e-6)
    np.testing.assert_allclose([weight for weight, _ in sums["call"]], 1 / 3, rtol=1e-6)


def test_trap_14_none_is_not_zero() -> None:
    """A rollout that nobody scored is in no mean; a turn reward of None is not a bad turn."""
    scored = make_group((None,), (None,), (None,), rewards=(1.0, 0.0, None))
    assert firsts(IdenticalAssignment(baseline="dr_grpo").assign(scored)) == [[0.5], [-0.5], []]
    counted = replace(scored, trajectories=(*scored.trajectories[:2], replace(scored.trajectories[2], reward=0.0)))
    assert firsts(IdenticalAssignment(baseline="dr_grpo").assign(counted))[0] == pytest.approx([2 / 3])
    for key in ("prompt", "observation"):
        assert assign_credit(StateGroups(key=key), scored)[2] == (None,)
