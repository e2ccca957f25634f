"""Credit by branching: what each state was worth, worked by hand, and what is trained of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.types import Advantages, BranchPoint, RolloutMode, TrajectoryGroup
from lightningrl_credit import Branches, IdenticalAssignment, Part, Sum, assign_credit
from lightningrl_credit.needs import check_needs
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.samples import build_samples
from lightningrl_testing.credit_conformance import CreditConformance
from lightningrl_testing.groups import make_group


def with_branches(group: TrajectoryGroup, returns: Mapping[tuple[int, int], Sequence[float | None]]) -> TrajectoryGroup:
    """`returns[i, t]`: of the branches that leave trajectory i after t calls; they make as many calls as it."""
    branches = []
    for (i, t), values in returns.items():
        source = group.trajectories[i]
        for number, value in enumerate(values):
            calls = tuple(
                replace(
                    call,
                    id=f"{call.id}/b{t}-{number}",
                    trainable=index >= t,
                    replayed_from=call.id if index < t else None,
                )
                for index, call in enumerate(source.transitions)
            )
            point = BranchPoint(rollout_id=source.rollout_id, attempt=1, calls=t)
            name = f"{source.rollout_id}.after-{t}-{number}"
            branches.append(
                replace(
                    source,
                    rollout_id=name,
                    transitions=calls,
                    reward=value,
                    branch=point,
                    mode=RolloutMode.BRANCH,
                    group_id=name,
                )
            )
    return replace(group, branches=tuple(branches))


def of_calls(advantages: Advantages, i: int) -> list[float | None]:
    """One number for each call of a trajectory; its tokens all have it."""
    assert all(credit is None or np.ptp(credit) == 0 for credit in advantages[i])
    return [None if credit is None else round(float(credit[0]), 6) for credit in advantages[i]]


class TestBranches(CreditConformance):
    """Two of the rollouts have branches. The suite looks at the rollouts' own credit; where nothing branches, that is
    RLOO's."""

    train = False

    def make_assigner(self) -> Branches:
        return Branches(train=self.train)

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]

    def scored_group(self) -> TrajectoryGroup:
        return with_branches(super().scored_group(), {(1, 1): (1.0, 0.0, 0.5), (3, 1): (0.0,), (3, 3): (1.0, 0.25)})

    def _assign(self, group: TrajectoryGroup, assigner: CreditAssigner | None = None) -> Advantages:
        return super()._assign(group, assigner)[: len(group.trajectories)]

    def test_credit_is_identical_under_any_merging_of_rows(self) -> None:
        """That of the branches, too, where they are trained."""
        group = self.scored_group()
        advantages = super()._assign(group)
        per_call, merged = (
            sorted(
                (sample.rollout_id, sample.token_ids[: position + 1].tobytes(), float(sample.advantages[position]))
                for sample in build_samples([group], [advantages], rows=rows)
                for position in np.flatnonzero(sample.mask)
            )
            for rows in ("call", "merged")
        )
        assert per_call == merged
        assert {rollout_id for rollout_id, *_ in merged} == {
            one.rollout_id for one in (group.members if self.train else group.trajectories)
        }


class TestBranchesThatAreTrained(TestBranches):
    train = True


def test_a_call_is_worth_what_the_next_state_is_worth_more_than_its_own() -> None:
    group = make_group((0, 0, 1.0), (0, 0, 0.0), (0, 0, 0.5))
    found = Branches().assign(with_branches(group, {(0, 1): (1.0, 0.0, 0.0, 1.0), (0, 2): (1.0, 1.0, 1.0, 0.0)}))
    #  V̂(s_0) = (0 + 0.5)/2 = 0.25   Q̂(s_0,a_0) = (2+1)/5 = 0.6   V̂(s_1) = 2/4   Q̂(s_1,a_1) = (3+1)/5   V̂(s_2) =
    # 3/4   R = 1
    assert of_calls(found, 0) == [0.35, 0.3, 0.25]
    assert of_calls(found, 1) == [-0.75] * 3  # it was not branched: its return against the others'
    assert of_calls(found, 2) == [0.0] * 3


def test_calls_between_two_known_states_share_their_difference() -> None:
    group = make_group((0, 0, 0, 1.0), (0, 0, 0, 0.0))
    known_in_the_middle = with_branches(group, {(0, 2): (0.5, 0.5)})
    assert of_calls(Branches().assign(known_in_the_middle), 0) == [0.666667, 0.666667, 0.5, 0.5]
    all_diverged = with_branches(group, {(0, 1): (None, None), (0, 2): (0.5, 0.5)})
    assert of_calls(Branches().assign(all_diverged), 0) == [0.666667, 0.666667, 0.5, 0.5]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1 + 0.2])
def test_equal_returns_teach_exactly_nothing(value: float) -> None:
    group = make_group(*[(0, 0, value)] * 3)
    found = Branches(train=True).assign(with_branches(group, {(0, 1): (value,) * 3, (1, 2): (value,) * 3}))
    assert all((credit == 0.0).all() for calls in found for credit in calls if credit is not None)


def test_a_rollout_alone_is_finite_and_one_without_a_reward_is_left_out() -> None:
    assert of_calls(Branches().assign(make_group((0, 1.0))), 0) == [0.0, 0.0]
    alone = with_branches(make_group((0, 1.0)), {(0, 0): (0.0, 0.0), (0, 1): (1.0, 0.0)})
    assert of_calls(Branches().assign(alone), 0) == [0.666667, 0.5]
    group = make_group((0, None), (0, 1.0), (0, 0.0), rewards=(None, 1.0, 0.0))
    assert of_calls(Branches().assign(group), 0) == [None, None]


def test_where_and_how_often_to_branch() -> None:
    group = make_group((0, 0, 1.0), (0, 0.0))
    calls = {
        (point.rollout_id, point.calls): samples
        for point, samples in Branches(samples=7).branch_points(group.trajectories).items()
    }
    assert calls == {("g-0", 1): 7, ("g-0", 2): 7, ("g-1", 1): 7}
    assert [point.rollout_id for point in Branches(rollouts=1, points=1).branch_points(group.trajectories)] == ["g-0"]
    equal = make_group((0, 0, 1.0), (0, 1.0))
    assert not Branches().branch_points(equal.trajectories)
    assert len(Branches(equal=True).branch_points(equal.trajectories)) == 3


def test_the_states_to_branch_at_are_those_after_the_least_likely_calls() -> None:
    (one, other) = make_group((0, 0, 0, 1.0), (0.0,)).trajectories
    likely = (-0.1, -3.0, -0.2, -9.0)
    calls = tuple(
        replace(call, logprobs=np.full_like(call.logprobs, logprob))
        for call, logprob in zip(one.transitions, likely, strict=True)
    )
    points = Branches(points=2).branch_points([replace(one, transitions=calls), other])
    assert [point.calls for point in points] == [2, 3]


def test_no_state_lies_between_the_choices_of_one_call_nor_between_calls_that_nobody_trains() -> None:
    (one, other) = make_group((0, 0, 0, 1.0), (0.0,)).trajectories
    a, b, c, d = one.transitions
    choices = (a, replace(b, prompt_ids=a.prompt_ids, started_at=a.started_at, agent=a.agent), c, d)
    assert [point.calls for point in Branches().branch_points([replace(one, transitions=choices), other])] == [2, 3]
    frozen = tuple(replace(call, trainable=False) for call in (b, c, d))
    assert [point.calls for point in Branches().branch_points([replace(one, transitions=(a, *frozen)), other])] == [1]


def test_trap_06_what_was_repeated_is_never_trained_again_and_what_was_sampled_once() -> None:
    group = with_branches(make_group((0, 0, 1.0), (0, 0, 0.0)), {(0, 1): (1.0, 0.0), (0, 2): (1.0,)})
    found = Branches(train=True).assign(group)
    assert of_calls(found, 2) == [None, 0.5, 0.5]  # 1.0 against 0.0 and the rollout's own 1.0
    samples = build_samples([group], [found], rows="merged")
    tokens_of = {
        one.rollout_id: sum(len(call.completion_ids) for call in one.transitions if call.trainable)
        for one in group.members
    }
    trained: dict[str, int] = {}
    for sample in samples:
        trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + int(sample.mask.sum())
    assert trained == tokens_of


def test_trap_06_all_samples_from_a_state_are_by_the_weights_of_the_rollout_that_they_leave() -> None:
    """Else V̂ would mix policies: while they branch, no weights may change."""

    def recipe(max_staleness: int) -> Recipe:
        task = {
            "agent": "agent.py:answer",
            "tasks": {"train": "data.py:tasks"},
            "policy": {"model": "m"},
            "rewards": {"right": {"use": "exact"}},
        }
        return Recipe.model_validate({**task, "loop": {"max_staleness": max_staleness}})

    check_needs(recipe(0), "branches", Branches().requires)
    with pytest.raises(
        ConfigError,
        match=r"'branches' needs 'branches'; a branch is sampled by the weights .*: set loop\.max_staleness = 0",
    ):
        check_needs(recipe(1), "branches", Branches().requires)


def test_trap_07_a_branch_alone_is_compared_with_the_rollout_that_it_left() -> None:
    group = with_branches(make_group((0, 0, 1.0), (0, 0, 0.0)), {(0, 1): (0.0,)})
    assert of_calls(Branches(train=True).assign(group), 2) == [None, -1.0, -1.0]


@pytest.mark.parametrize(
    ("options", "what"), [({"samples": 0}, "samples"), ({"points": -1}, "points"), ({"rollouts": -1}, "rollouts")]
)
def test_options_that_make_no_sense_are_one_sentence(options: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=f"'branches': {what} is"):
        Branches(**options)  # type: ignore[arg-type]


def test_a_sum_branches_where_a_part_does_and_its_other_parts_see_no_branch() -> None:
    group = with_branches(make_group((0, 0, 1.0), (0, 0, 0.0)), {(0, 1): (1.0, 0.0), (0, 2): (1.0,)})
    both = Sum((Branches(), 1.0), (IdenticalAssignment(baseline="dr_grpo"), 0.5))
    assert both.branch_points(group.trajectories) == Branches().branch_points(group.trajectories)
    alone, plain, found = (
        Branches().assign(group),
        IdenticalAssignment(baseline="dr_grpo").assign(group),
        both.assign(group),
    )
    for i, calls in enumerate(alone):
        for t, credit in enumerate(calls):
            other, summed = plain[i][t], found[i][t]
            assert credit is not None and other is not None and summed is not None
            np.testing.assert_allclose(summed, credit + 0.5 * other, atol=1e-6)
    assert all(credit is None for calls in found[2:] for credit in calls)
    trained = Sum(Part(Branches(train=True), whiten=True)).assign(group)
    assert len(trained) == 5 and trained[2][0] is None and trained[2][1] is not None


def test_roles_that_are_paid_apart_see_the_branches_with_their_own_rewards() -> None:
    paid = RewardWeights([WeightedReward(name=role, agents=frozenset({role})) for role in ("write", "check")])
    group = make_group((0, 1.0), (0, 0.0))
    earned = ({"write": 1.0, "check": 0.0}, {"write": 0.0, "check": 0.0})
    group = replace(
        group,
        trajectories=tuple(
            replace(one, rewards=rewards) for one, rewards in zip(group.trajectories, earned, strict=True)
        ),
    )
    group = with_branches(group, {(0, 1): (1.0, 1.0)})
    group = replace(group, branches=tuple(replace(one, rewards={"write": 0.0, "check": 1.0}) for one in group.branches))
    found = assign_credit(Branches(), group, paid=paid)
    assert of_calls(found, 0) == [round(1 / 3, 6), -1.0], (
        "the writer's call led to 0, 0 and 1; the checker's to 0, and might have to 1"
    )
