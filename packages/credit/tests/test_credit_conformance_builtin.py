"""Every credit assigner of ours that asks nobody passes the conformance suite, options and all; a new one by being
installed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit import Clip, IdenticalAssignment, Part, StateGroups, Sum, TurnReturns, assign_credit
from lightningrl_credit.baselines import Baseline, baseline_advantages
from lightningrl_testing.credit_conformance import CreditConformance, grpo_advantages
from lightningrl_testing.groups import make_group

INSTALLED = load_plugins().credit_assigners
OURS = ("lightningrl", "lightningrl-credit")
ASKS_NOBODY = {"group", "turn_rewards", "agents", "state_key"}
BY_NAME: Mapping[str, Baseline] = {name: name for name in ("dr_grpo", "rloo", "maxrl", "opo")} | {"reinforce": "none"}
MADE_OF_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "sum": {"parts": [{"use": "turns", "weight": 0.25}, {"use": "states", "weight": 0.75}]},
    "clip": {"of": {"use": "states"}, "at": 100.0},
}


def build(part: Mapping[str, Any]) -> CreditAssigner:
    plugin = INSTALLED[part["use"]]
    options = MADE_OF_OTHERS.get(part["use"])
    made: CreditAssigner = plugin.factory() if options is None else plugin.factory(**options, build=build)
    return made


class Suite(CreditConformance):
    """The suite with the baseline that is expected; `opo` weighs by the tokens of `make_group`."""

    is_by_role = False
    is_outcome_method = True
    """Where there are no turn rewards and no repeated states."""
    baseline: Baseline = "grpo"
    is_sized = True
    """False where a recipe asks for turn rewards divided by their own deviation."""

    def test_turn_rewards_keep_their_declared_size(self) -> None:
        if not self.is_sized:
            pytest.xfail("it is asked to divide turn rewards by a deviation")
        super().test_turn_rewards_keep_their_declared_size()

    @property
    def outcomes(self) -> Sequence[float]:  # type: ignore[override]
        return (0.0, 1.0, 0.25, 1.0, 0.5) if self.baseline == "maxrl" else super().outcomes

    @property
    def is_group_relative(self) -> bool:  # type: ignore[override]
        return self.baseline != "none"

    def expected(self, rewards: Sequence[float]) -> list[float]:
        lengths = np.array(
            [sum(1 + (i + t) % 3 for t in range(1 + i % 3)) for i in range(len(rewards))], dtype=np.float64
        )
        returns = np.array(rewards, dtype=np.float64)
        return list(baseline_advantages(returns, np.arange(len(rewards)), baseline=self.baseline, lengths=lengths))

    def test_without_turn_rewards_it_is_the_outcome_method(self) -> None:
        if not self.is_outcome_method:
            pytest.skip("it has no size of its own, or these states repeat")
        if not self.is_by_role:
            super().test_without_turn_rewards_it_is_the_outcome_method()
            return
        group = make_group((0.0, 0.0), (1.0,), (1.0, 1.0), (0.5,))
        credit = assign_credit(self.make_assigner(), group, compare=self.compare)
        write, check = grpo_advantages([0.0, 1.0, 1.0, 0.5]), grpo_advantages([0.0, 1.0])
        for i, advantages in enumerate(credit):
            np.testing.assert_allclose(np.unique(advantages[0]), [write[i]], atol=1e-6)  # type: ignore[arg-type]
        np.testing.assert_allclose([credit[0][1][0], credit[2][1][0]], check, atol=1e-6)  # type: ignore[arg-type, index]


def suite(name: str, make: Callable[[], CreditAssigner], **fields: Any) -> type[CreditConformance]:
    return type(name, (Suite,), {"make_assigner": lambda self: make(), **fields})


for _name, _plugin in INSTALLED.items():
    if _name in MADE_OF_OTHERS or (
        _plugin.distribution.partition(" ")[0] in OURS and _plugin.factory().requires <= ASKS_NOBODY
    ):
        globals()[f"Test_{_name}"] = suite(
            f"Test_{_name}",
            lambda name=_name: build({"use": name}),  # type: ignore[misc]
            baseline=BY_NAME.get(_name, "grpo"),
        )

OPTIONS: Mapping[str, tuple[Callable[[], CreditAssigner], Mapping[str, Any]]] = {
    "DiscountedRLOO": (lambda: TurnReturns(baseline="rloo"), {"baseline": "rloo"}),
    "TurnsLikeMTGRPO": (
        lambda: TurnReturns(gamma=0.0, outcome_gamma=1.0, turn_baseline="grpo"),
        {"is_sized": False},
    ),
    "TurnsOverAll": (lambda: TurnReturns(compared="all", turn_weight=0.5), {}),
    "StatesWithAllOptions": (
        lambda: StateGroups(key="observation", shrinkage=2.0, gate=4.0, lam=0.9),
        {"is_outcome_method": False},
    ),
    "StatesByToolResult": (lambda: StateGroups(key="tool_result", baseline="rloo"), {"is_outcome_method": False}),
    "ByRole": (IdenticalAssignment, {"compare": "role", "is_by_role": True}),
    "ByRoleDiscounted": (TurnReturns, {"compare": "role", "is_by_role": True}),
    "ByRoleStates": (StateGroups, {"compare": "role", "is_by_role": True}),
    "ByRoleSum": (lambda: Sum((TurnReturns(), 0.5), (StateGroups(), 0.5)), {"compare": "role", "is_by_role": True}),
    "EachRole": (lambda: Sum(Part(TurnReturns(), compare="role")), {"is_by_role": True}),
    "Whitened": (lambda: Sum(Part(TurnReturns(), whiten=True)), {"is_outcome_method": False, "is_sized": False}),
    "EachRoleInASum": (
        lambda: Sum(
            Part(IdenticalAssignment(), compare="role"), (Clip(Sum(Part(TurnReturns(), whiten=True)), at=3.0), 0.0)
        ),
        {"is_by_role": True},
    ),
}
for _name, (_make, _fields) in OPTIONS.items():
    globals()[f"Test{_name}"] = suite(f"Test{_name}", _make, **_fields)


class Remembering(IdenticalAssignment):
    """A = R - m, m the mean of the steps before; it is a float that JSON must keep whole."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__(baseline="none")
        self.mean, self.rate = 0.0, rate

    def assign(self, group: TrajectoryGroup) -> Advantages:
        lower = [
            one if one.reward is None else replace(one, reward=one.reward - self.mean) for one in group.trajectories
        ]
        return super().assign(replace(group, trajectories=tuple(lower)))

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        rewards = [one.reward for group in groups for one in group.trajectories if one.reward is not None]
        self.mean += self.rate * (statistics.fmean(rewards) - self.mean)
        return {"mean": self.mean}

    def state(self) -> Any:
        return {"mean": self.mean}

    def load(self, state: Any) -> None:
        self.mean = state["mean"]


class TestRemembering(suite("TestRemembering", Remembering, baseline="none")):  # type: ignore[misc]
    pass


def make_remembering_sum() -> Sum:
    return Sum((Remembering(), 0.5), (Remembering(0.3), 0.5))


class TestSumOfWhatRemembers(suite("TestSumOfWhatRemembers", make_remembering_sum, baseline="none")):  # type: ignore[misc]
    pass


# ------------------------------------------------------------------ the suite sees what is planted


class Crossing(IdenticalAssignment):
    """Discounts by order of arrival, branches or not."""

    def returns(self, trajectory: Any) -> Any:
        rewards = [sum(value or 0.0 for value in call.rewards.values()) for call in trajectory.transitions]
        return trajectory.reward + np.array(
            [sum(0.9**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
        )


class ZeroForNone(IdenticalAssignment):
    def assign(self, group: TrajectoryGroup) -> Advantages:
        return super().assign(
            replace(group, trajectories=tuple(replace(one, reward=one.reward or 0.0) for one in group.trajectories))
        )


class Rounding(Remembering):
    def state(self) -> Any:
        return {"mean": round(self.mean, 3)}


@pytest.mark.parametrize(
    ("planted", "test"),
    [
        (Crossing, "test_credit_never_crosses_branches"),
        (Crossing, "test_equal_turns_of_equal_episodes_are_scored_without_gradient"),
        (ZeroForNone, "test_a_reward_of_none_is_not_a_reward_of_zero"),
        (lambda: TurnReturns(turn_baseline="grpo"), "test_turn_rewards_keep_their_declared_size"),
        (Rounding, "test_state_is_restored_bit_for_bit"),
    ],
)
def test_the_suite_fails_what_is_planted(planted: Callable[[], CreditAssigner], test: str) -> None:
    run = getattr(suite("Planted", planted)(), test)
    with pytest.raises(AssertionError):
        run()


def test_every_assigner_of_ours_is_among_them() -> None:
    names = {name for name, plugin in INSTALLED.items() if plugin.distribution.partition(" ")[0] in OURS}
    assert len(names) == 14
    assert {f"Test_{name}" for name in names if build({"use": name}).requires <= ASKS_NOBODY} <= globals().keys()
    assert json.dumps(sorted(MADE_OF_OTHERS)) == '["clip", "sum"]'
