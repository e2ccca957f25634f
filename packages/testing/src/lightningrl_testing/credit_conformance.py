"""The conformance suite of credit assigners: subclass it in a test file, give it the assigner, and pytest runs it.

    class TestMine(CreditConformance):
        def make_assigner(self) -> CreditAssigner:
            return Mine()

A deviation is an override marked `xfail(reason="…")`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit import Compare, assign_credit, has_signal
from lightningrl_credit.evidence import check_evidence
from lightningrl_credit.needs import installed_needs
from lightningrl_credit.samples import Rows, build_samples
from lightningrl_testing._pytest import call_factories, pytest
from lightningrl_testing.groups import make_group, make_trajectory, make_transition
from lightningrl_testing.scripted_services import ScriptedServices

__all__ = ["CreditConformance", "grpo_advantages"]


def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """Return GRPO's advantages, one per trajectory: the distance from the mean, in standard deviations."""
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


class CreditConformance:
    """The specification of a credit assigner, as tests."""

    is_group_relative: bool = True
    """True where advantages compare with the group, so that one trajectory alone, or equal rewards, give 0.0."""

    compare: Compare = "group"
    """Calls that a run compares a call with."""

    outcomes: Sequence[float] = (0.0, 1.0, 0.25, 1.0, -0.5)
    """Returns that `expected` is asked for."""

    def make_assigner(self) -> CreditAssigner:
        """Make a fresh assigner."""
        raise NotImplementedError

    def expected(self, rewards: Sequence[float]) -> list[float] | None:
        """Return a group's advantages without turn rewards, one per trajectory; if calls differ, of one-call rollouts.
        None, unless overridden = only what holds for every assigner is asked."""
        return None

    def scored_group(self) -> TrajectoryGroup:
        """Make a group with different lengths, turn rewards and returns."""
        return make_group((0.1, None, -0.2), (0.0, 0.3), (None,), (0.5, 0.5, 0.1, 0.0), rewards=(0.0, 1.0, 0.25, 1.0))

    async def ask(self, messages: str | Sequence[Mapping[str, Any]], /, **settings: Any) -> str:
        """The judge's answer to an assigner that asks."""
        raise NotImplementedError

    def services(self) -> Services:
        """Return what an assigner asks: the judge is `ask`."""
        return ScriptedServices(judge=self.ask)

    def _assign(self, group: TrajectoryGroup, assigner: CreditAssigner | None = None) -> Advantages:
        """Assign credit as a run does: first the evidence, then the arithmetic."""
        assigner = assigner or self.make_assigner()
        asked = [one for one in group.trajectories if one.reward is not None and one.transitions]
        if asked and assigner.has("score", "score_group"):
            together = replace(group, trajectories=tuple(asked))
            evidences = asyncio.run(assigner.score_group(together, self.services()))
            heard = dict(zip((trajectory.rollout_id for trajectory in asked), evidences, strict=True))
            for trajectory in asked:
                check_evidence(heard[trajectory.rollout_id], trajectory)
            scored = (replace(one, evidence=heard.get(one.rollout_id)) for one in group.trajectories)
            group = replace(group, trajectories=tuple(scored))
        return assign_credit(assigner, group, compare=self.compare)

    def test_installed_factories_make_it(self) -> None:
        call_factories("lightningrl_credit_assigners", self.make_assigner())

    def test_requirements_are_known(self) -> None:
        requires = self.make_assigner().requires
        assert isinstance(requires, frozenset)
        needs = installed_needs(load_plugins()).keys()
        assert requires <= needs, f"unknown requirement: {sorted(requires - needs)}"

    def test_one_float32_number_per_completion_token(self) -> None:
        group = self.scored_group()
        for trajectory, credit in zip(group.trajectories, self._assign(group), strict=True):
            for transition, advantages in zip(trajectory.transitions, credit, strict=True):
                assert advantages is not None
                assert advantages.dtype == np.float32
                assert advantages.shape == transition.completion_ids.shape
                assert np.isfinite(advantages).all()

    def test_order_of_trajectories_does_not_matter(self) -> None:
        group = self.scored_group()
        order = [2, 0, 3, 1]
        shuffled = replace(group, trajectories=tuple(group.trajectories[i] for i in order))
        straight = self._assign(group)
        _assert_equal(self._assign(shuffled), tuple(straight[i] for i in order))

    def test_same_group_gives_same_credit(self) -> None:
        group = self.scored_group()
        assigner = self.make_assigner()
        _assert_equal(self._assign(group, assigner), self._assign(group, assigner), tolerance=0.0)

    def test_group_stays_as_it_was(self) -> None:
        group = self.scored_group()
        before = _snapshot(group)
        self._assign(group)
        assert _snapshot(group) == before

    def test_credit_is_identical_under_any_merging_of_rows(self) -> None:
        group = self.scored_group()
        advantages = self._assign(group)
        per_call, merged = (_trained_tokens(group, advantages, rows) for rows in ("call", "merged"))
        assert per_call == merged

    def test_group_of_one_is_finite(self) -> None:
        group = self.scored_group()
        alone = replace(group, trajectories=group.trajectories[:1])
        values = _values(self._assign(alone))
        assert all(math.isfinite(value) for value in values)
        if self.is_group_relative:
            assert set(values) == {0.0}

    def test_equal_rewards_are_scored_without_gradient(self) -> None:
        for reward in (0.0, 1.0, 0.1, -3.7e5):
            group = make_group((reward,) * 3, (reward,), (reward,) * 2)
            advantages = self._assign(group)
            values = _values(advantages)
            assert len(values) > 0
            assert all(math.isfinite(value) for value in values)
            assert not self.is_group_relative or not has_signal(group, advantages), (
                f"equal rewards of {reward:g} gave an advantage of {max(values, key=abs):g}; "
                "take their mean with lightningrl.mean, or lightningrl.center, which leaves exactly 0.0"
            )

    def test_equal_turns_of_equal_episodes_are_scored_without_gradient(self) -> None:
        turns = make_group(*((0.1, 0.3, None, 0.0, 0.2),) * 4, rewards=(1.0,) * 4)
        for group in (turns, _with_repeated_states(turns)):
            values = _values(self._assign(group))
            assert len(values) > 0
            assert not self.is_group_relative or set(values) == {0.0}, (
                "four equal episodes differ by the position of their turns alone"
            )

    def test_trajectory_without_reward_gets_none_and_changes_nobody(self) -> None:
        group = self.scored_group()
        failed = make_group((9.0, -9.0), rewards=(None,), id="failed").trajectories
        with_failed = replace(group, trajectories=failed + group.trajectories)
        credit = self._assign(with_failed)
        assert credit[0] == (None, None)
        _assert_equal(credit[1:], self._assign(group))

    def test_a_reward_of_none_is_not_a_reward_of_zero(self) -> None:
        group = self.scored_group()
        first = group.trajectories[0]
        for reward in (None, 0.0):
            changed = (replace(first, reward=reward), *group.trajectories[1:])
            credit = self._assign(replace(group, trajectories=changed))[0]
            assert all((advantages is None) == (reward is None) for advantages in credit), (
                f"reward {reward!r} was taken for another"
            )

    def test_credit_never_crosses_branches(self) -> None:
        """Two branches that earned the same are credited the same, whatever came of those beside them."""

        def fork(name: str, *rewards: float) -> Trajectory:
            calls = [make_transition(f"{name}/0", rewards={"turn": 0.0})]
            for n, reward in enumerate(rewards, start=1):
                place: Any = {"prompt": [1, 2, 3, 4, 5, n], "completion": [7, n], "index": n, "parent": f"{name}/0"}
                calls.append(make_transition(f"{name}/{n}", **place, rewards={"turn": reward}))
            return make_trajectory(name, calls, reward=1.0)

        forks = fork("a", -4.0, 0.0, 4.0), fork("b", 0.0, 0.0, 0.0)
        credit = self._assign(TrajectoryGroup(id="g", trajectories=forks))
        _assert_equal((credit[0][2:3],), (credit[1][2:3],))

    def test_turn_rewards_keep_their_declared_size(self) -> None:
        """A hundredth of the pay of calls is a hundredth of the credit that comes of it, beside the outcome's."""
        group = self.scored_group()
        equal = replace(group, trajectories=tuple(replace(one, reward=1.0) for one in group.trajectories))
        for scored in (group, equal):
            unpaid, small, large = (_values(self._assign(_paid(scored, size))) for size in (0.0, 0.01, 1.0))
            credited, declared = 100.0 * np.subtract(small, unpaid), np.subtract(large, unpaid)
            assert np.allclose(credited, declared, atol=1e-4, rtol=1e-3), (
                "pay of 0.01 is credited like pay of "
                f"{float(np.abs(credited).max() / np.abs(declared).max()):.2g}; take the turns' distance from their "
                "mean, and divide it by nothing of their own"
            )

    def test_metrics_of_a_step_are_finite(self) -> None:
        assigner = self.make_assigner()
        if not assigner.has("finish_step"):
            pytest.skip("it reports no metrics")
        group = self.scored_group()
        metrics = assigner.finish_step([group], [self._assign(group, assigner)])
        assert all(math.isfinite(value) for value in metrics.values()), metrics

    def test_state_is_restored_bit_for_bit(self) -> None:
        assigner, restored = self.make_assigner(), self.make_assigner()
        if not assigner.has("state"):
            pytest.skip("it remembers nothing")
        group = self.scored_group()
        for _ in range(3):
            advantages = self._assign(group, assigner)
            assigner.finish_step([group], [advantages])
        restored.load(json.loads(json.dumps(assigner.state())))
        assert restored.state() == assigner.state()
        _assert_equal(self._assign(group, assigner), self._assign(group, restored), tolerance=0.0)

    def test_group_without_any_reward_gets_none(self) -> None:
        group = make_group((0.0, 0.0), (0.0,), rewards=(None, None))
        assert self._assign(group) == ((None, None), (None,))

    def test_call_that_is_not_trainable_gets_none(self) -> None:
        group = self.scored_group()
        first = group.trajectories[0]
        frozen = (replace(first.transitions[0], trainable=False), *first.transitions[1:])
        changed = replace(group, trajectories=(replace(first, transitions=frozen), *group.trajectories[1:]))
        credit = self._assign(changed)
        assert credit[0][0] is None
        assert all(advantages is not None for advantages in credit[0][1:])

    def test_trajectory_without_calls_gets_no_entries(self) -> None:
        group = self.scored_group()
        silent = replace(group.trajectories[0], rollout_id="silent", transitions=())
        credit = self._assign(replace(group, trajectories=(*group.trajectories, silent)))
        assert credit[-1] == ()
        assert all(math.isfinite(value) for value in _values(credit))

    def test_empty_group_gets_no_entries(self) -> None:
        assert self._assign(TrajectoryGroup(id="empty", trajectories=())) == ()

    def test_without_turn_rewards_it_is_the_outcome_method(self) -> None:
        """Where nothing tells calls apart: of rollouts with one call, where the assigner does by their position."""
        expected = self.expected(self.outcomes)
        if expected is None:
            pytest.skip("it does not say what it expects")
        advantages = self._assign(make_group(*((reward,) * (1 + i % 3) for i, reward in enumerate(self.outcomes))))
        scored = [[tokens for tokens in credit if tokens is not None] for credit in advantages]
        distinct = [{float(value) for tokens in credit for value in tokens} for credit in scored]
        if any(len(values) > 1 for values in distinct):
            advantages = self._assign(make_group(*((reward,) for reward in self.outcomes)))
        for credit, value in zip(advantages, expected, strict=True):
            for tokens in credit:
                assert tokens is not None
                np.testing.assert_allclose(tokens, value, atol=1e-6, rtol=1e-6)

    def test_a_better_outcome_is_credited_no_less(self) -> None:
        """Rollouts of one length without turn rewards are ordered as their outcomes, whatever share each call has."""
        advantages = self._assign(make_group(*((reward,) * 3 for reward in self.outcomes)))
        totals = [sum(float(np.mean(tokens)) for tokens in credit if tokens is not None) for credit in advantages]
        ranked = sorted(range(len(totals)), key=lambda rollout: self.outcomes[rollout])
        for worse, better in itertools.pairwise(ranked):
            credited = f"{totals[better]:g} in all, and {self.outcomes[worse]:g} {totals[worse]:g}"
            assert totals[worse] <= totals[better] + 1e-5, f"outcome {self.outcomes[better]:g} is credited {credited}"


def _paid(group: TrajectoryGroup, size: float) -> TrajectoryGroup:
    """The group with its turn rewards times `size`."""

    def pay(call: Transition) -> Transition:
        rewards = {name: None if value is None else size * value for name, value in call.rewards.items()}
        return replace(call, rewards=rewards)

    paid = (replace(one, transitions=tuple(map(pay, one.transitions))) for one in group.trajectories)
    return replace(group, trajectories=tuple(paid))


def _with_repeated_states(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with the same prompts in all its trajectories, and one prompt that comes twice in each."""

    def repeat(trajectory: Trajectory) -> Trajectory:
        prompts = [np.array([1, 2, min(t, 3)], dtype=np.int32) for t in range(len(trajectory.transitions))]
        pairs = zip(trajectory.transitions, prompts, strict=True)
        return replace(trajectory, transitions=tuple(replace(call, prompt_ids=prompt) for call, prompt in pairs))

    return replace(group, trajectories=tuple(map(repeat, group.trajectories)))


def _values(advantages: Advantages) -> list[float]:
    return [float(value) for credit in advantages for tokens in credit if tokens is not None for value in tokens]


def _assert_equal(left: Advantages, right: Advantages, *, tolerance: float = 1e-6) -> None:
    assert len(left) == len(right)
    for left_credit, right_credit in zip(left, right, strict=True):
        for a, b in zip(left_credit, right_credit, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def _snapshot(group: TrajectoryGroup) -> list[object]:
    def call(transition: Transition) -> object:
        arrays = (transition.prompt_ids, transition.completion_ids, transition.logprobs)
        return transition.id, dict(transition.rewards), transition.trainable, *(array.tobytes() for array in arrays)

    return [
        (trajectory.rollout_id, trajectory.reward, dict(trajectory.rewards), [*map(call, trajectory.transitions)])
        for trajectory in group.trajectories
    ]


def _trained_tokens(
    group: TrajectoryGroup, advantages: Advantages, rows: Rows
) -> list[tuple[str, bytes, float, float]]:
    """List every trained token with all that came before it, its advantage and its weight."""
    return sorted(
        (
            sample.rollout_id,
            sample.token_ids[: position + 1].tobytes(),
            float(sample.advantages[position]),
            float(sample.weights[position]),
        )
        for sample in build_samples([group], [advantages], rows=rows)
        for position in np.flatnonzero(sample.mask)
    )
