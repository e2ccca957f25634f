"""Equal returns are no signal, whatever the discount and the rounding; a discount stays within what came of a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from lightningrl.advantages import center, mean, teaching_rows
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.types import Advantages, TrajectoryGroup, Transition
from lightningrl_credit import (
    IdenticalAssignment,
    TurnReturns,
    assign_credit,
    has_signal,
    whiten,
)
from lightningrl_credit.baselines import Baseline
from lightningrl_credit.rewards import RewardWeights, WeightedReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing.credit_conformance import CreditConformance
from lightningrl_testing.groups import make_group, make_trajectory, make_transition
from lightningrl_testing.live_gateway import live_gateway

CREDIT_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "plugins" / "credit.md"
RELATIVE: list[Baseline] = ["grpo", "dr_grpo", "rloo"]


def firsts(advantages: Advantages) -> list[list[float]]:
    """Each call's advantage (its first token's)."""
    return [[float(tokens[0]) for tokens in credit if tokens is not None] for credit in advantages]


def values_of(advantages: Advantages) -> set[float]:
    return {value for credit in firsts(advantages) for value in credit}


def last_call(**names: Any) -> CreditAssigner:
    """The credit assigner that docs/how-to/plugins/credit.md shows, as it is printed there, but for `names` of its module."""
    block = re.search(r"```python title=my_credit\.py\n(.*?)```", CREDIT_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    namespace: dict[str, Any] = {}
    exec(block[1], namespace)
    namespace.update(names)
    made: CreditAssigner = namespace["LastCall"]()
    return made


@pytest.mark.parametrize("baseline", RELATIVE)
def test_four_equal_successes_of_five_turns_are_no_signal_under_a_discount(baseline: Baseline) -> None:
    group = make_group(*((0.0,) * 5,) * 4, rewards=(1.0,) * 4)
    assigner = TurnReturns(gamma=0.9, baseline=baseline)
    assert values_of(assigner.assign(group)) == {0.0}
    assert values_of(assign_credit(assigner, group, compare="role")) == {0.0}


@pytest.mark.parametrize("baseline", RELATIVE)
def test_turn_rewards_that_only_the_position_tells_apart_are_no_signal(baseline: Baseline) -> None:
    group = make_group(*((0.1, 0.2, 0.3, 0.1),) * 3, rewards=(0.7,) * 3)
    assert values_of(TurnReturns(gamma=0.9, baseline=baseline).assign(group)) == {0.0}


def test_outcomes_are_compared_first_and_discounted_then() -> None:
    group = make_group((0.0,) * 3, (0.0,), rewards=(1.0, 0.0))
    credit = firsts(TurnReturns(gamma=0.5, epsilon=0.0).assign(group))
    high = 2**-0.5  # (1 - 1/2) / σ, ddof = 1
    np.testing.assert_allclose(credit[0], [high / 4, high / 2, high], rtol=1e-6)
    np.testing.assert_allclose(credit[1], [-high], rtol=1e-6)


def test_turn_rewards_are_compared_with_the_same_turn_of_the_others_and_an_episode_that_is_over_has_nothing_to_come() -> (
    None
):
    group = make_group((0.0, 1.0, 2.0), (4.0,), (0.0, 1.0), rewards=(1.0,) * 3)
    credit = firsts(TurnReturns(gamma=0.5, baseline="dr_grpo").assign(group))
    np.testing.assert_allclose(
        credit[0], [1.0 - (1.0 + 4.0 + 0.5) / 3, 2.0 - (2.0 + 0.0 + 1.0) / 3, 2.0 - 2.0 / 3], rtol=1e-6
    )
    np.testing.assert_allclose(credit[1], [4.0 - (1.0 + 4.0 + 0.5) / 3], rtol=1e-6)
    np.testing.assert_allclose(credit[2], [0.5 - (1.0 + 4.0 + 0.5) / 3, 1.0 - (2.0 + 0.0 + 1.0) / 3], rtol=1e-6)


def test_outcome_and_turn_rewards_have_baselines_of_their_own() -> None:
    group = make_group((5.0, 0.0), (3.0, 0.0), rewards=(0.0, 1.0))
    both = firsts(TurnReturns().assign(group))
    (lost, _), (won, _) = firsts(IdenticalAssignment().assign(make_group((0.0, 0.0), (0.0, 1.0))))
    np.testing.assert_allclose(both, [[lost + 1.0, lost], [won - 1.0, won]], atol=1e-6)


def choice(name: str, reward: float, **fields: Any) -> Transition:
    return replace(make_transition(name, rewards={"turn": reward}, **fields), started_at=100.0)


def test_choices_of_one_call_are_no_sequence() -> None:
    calls = [choice("r/0", 0.0), choice("r/0-1", 5.0)]
    np.testing.assert_allclose(TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=0.0)), [0.0, 5.0])
    np.testing.assert_allclose(TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=1.0)), [1.0, 6.0])


async def test_choices_that_the_gateway_kept_are_no_sequence(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        gateway.engine.enqueue("one", "two", "three", "four")
        attempt = await gateway.attempt()
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            for question in ("a?", "b?"):
                await client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}], n=2)
        calls = [replace(call, rewards={"turn": float(t)}) for t, call in enumerate(await attempt.transitions())]
    assert len(calls) == 4
    np.testing.assert_allclose(
        TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=0.0)),
        [0 + 2 / 2 + 3 / 4, 1 + 2 / 2 + 3 / 4, 2, 3],
    )


def test_what_follows_a_choice_is_credited_to_it_and_not_to_those_beside_it() -> None:
    calls = [
        choice("r/0", 0.0),
        choice("r/0-1", 0.0),
        replace(
            make_transition("r/1", prompt=[1, 2, 3, 4, 5, 6], parent="r/0-1", rewards={"turn": 4.0}), started_at=101.0
        ),
    ]
    np.testing.assert_allclose(TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=0.0)), [0.0, 2.0, 4.0])


def test_equal_prompts_one_after_the_other_are_a_sequence() -> None:
    calls = [replace(choice("r/0", 0.0), started_at=99.0), choice("r/1", 5.0)]
    np.testing.assert_allclose(TurnReturns(gamma=0.5).returns(make_trajectory("r", calls, reward=0.0)), [2.5, 5.0])


@pytest.mark.parametrize("values", [[0.1] * 3, [0.1] * 7, [-3.7e5] * 6, [1 / 3] * 11])
def test_the_mean_of_equal_values_is_that_value(values: list[float]) -> None:
    assert mean(values) == values[0]
    assert mean(iter(values)) == values[0]
    assert center(values).tolist() == [0.0] * len(values)


def test_what_rounding_tells_apart_is_equal() -> None:
    values = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(values)) == 2
    assert center(values).tolist() == [0.0] * 3
    assert center([]).tolist() == []
    assert mean([]) == 0.0
    for baseline in RELATIVE:
        credit = IdenticalAssignment(baseline=baseline, epsilon=0.0).assign(make_group(*((value,) for value in values)))
        assert values_of(credit) == {0.0}


def test_whitening_equal_advantages_leaves_exact_zeros() -> None:
    group = make_group((0.1, 0.1), (0.1,), (0.1, 0.1, 0.1))
    (credit,) = whiten([group], [IdenticalAssignment(baseline="none").assign(group)])
    assert values_of(credit) == {0.0}


def test_small_differences_of_small_rewards_are_signal() -> None:
    group = make_group((1e-9,), (2e-9,))
    assert has_signal(group, IdenticalAssignment(baseline="dr_grpo").assign(group))
    far = make_group((1e6,), (1e6 + 1,))
    assert has_signal(far, IdenticalAssignment(baseline="dr_grpo").assign(far))


class TestLastCall(CreditConformance):
    """The page's own."""

    def make_assigner(self) -> CreditAssigner:
        return last_call()

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return list(center(rewards))


class TestLastCallOfWhichNothingIsSaid(CreditConformance):
    def make_assigner(self) -> CreditAssigner:
        return last_call()


class Backwards(CreditAssigner):
    """Pays for the worse."""

    requires = frozenset({"group"})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        credit = IdenticalAssignment().assign(group)
        return tuple(tuple(None if tokens is None else -tokens for tokens in of_rollout) for of_rollout in credit)


def test_the_suite_says_that_a_better_outcome_is_credited_less() -> None:
    class Suite(CreditConformance):
        def make_assigner(self) -> CreditAssigner:
            return Backwards()

    with pytest.raises(AssertionError, match=r"outcome 0 is credited .* in all, and -0.5 "):
        Suite().test_a_better_outcome_is_credited_no_less()


class Loud(CreditAssigner):
    """Takes any rounding for signal."""

    requires = frozenset({"group"})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return IdenticalAssignment(baseline="none").assign(group)


def test_the_suite_says_what_is_wrong_with_equal_rewards() -> None:
    class Suite(CreditConformance):
        def make_assigner(self) -> CreditAssigner:
            return Loud()

    with pytest.raises(
        AssertionError, match=r"equal rewards of 1 gave an advantage of 1; take their mean with lightningrl\.mean"
    ):
        Suite().test_equal_rewards_are_scored_without_gradient()


def make_scorer(credit: CreditAssigner, *, whitened: bool = False) -> Scorer:
    return Scorer(
        rewards=RewardWeights([WeightedReward(name="none")]),
        credit=credit,
        whitened=whitened,
        samples=SamplesConfig(),
        trained={"policy": TrainedCalls()},
    )


@pytest.mark.parametrize("whitened", [False, True])
def test_a_rounding_is_no_signal_of_a_group_and_no_gradient(whitened: bool) -> None:
    group = make_group((0.1,), (0.1,), (0.1,))
    rounding = last_call(mean=lambda rewards: sum(rewards) / len(rewards))
    assert values_of(rounding.assign(group)) != {0.0}, "else this shows nothing"
    scorer = make_scorer(rounding, whitened=whitened)
    scored = scorer.build(scorer.credit(group.trajectories))
    assert scored.metrics["groups_without_signal"] == scored.metrics["groups"] == 1
    assert len(scored.samples) == 3
    assert teaching_rows(scored.samples) == []
    assert sum(one.has_signal for one in scorer.credit(group.trajectories)) == 0
