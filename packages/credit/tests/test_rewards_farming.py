"""Intermediate rewards cannot be gamed unnoticed: a small policy learns, through the real Scorer, in a task where tools
are of no use.

    turn 1, 2, 3    call the tool (it always works)  |  answer (right: reward 1, the episode ends)
    turn 4          too late: reward 0

A policy that is paid for tools that work learns to call them to the end, unless the pay is small beside the outcome, or
only what fails is charged for: what the warning says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from sizes import sized

from lightningrl.plugins import load_plugins
from lightningrl.recipe_tables import OutcomesConfig, SamplesConfig
from lightningrl.types import ToolCall, ToolStatus, Trajectory
from lightningrl_credit import TurnReturns
from lightningrl_credit.baselines import Baseline
from lightningrl_credit.metrics import FarmingWatch
from lightningrl_credit.rewards import NamedReward, RewardSet, ToolStatusReward, TurnReward
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing.groups import make_group, make_trajectory, make_transition
from lightningrl_training.evaluator import Evaluator

TURNS = 3
STEPS = sized(40, 150)


class Policy:
    """The logit of calling the tool, for each turn."""

    def __init__(self) -> None:
        self.logits = np.zeros(TURNS)

    @property
    def farms(self) -> np.ndarray:
        """The probability that it calls the tool, for each turn."""
        return 1 / (1 + np.exp(-self.logits))

    def play(self, name: str, group: str, step: int, random: np.random.Generator) -> Trajectory:
        calls, tools = [], []
        for turn in range(TURNS):
            farms = bool(random.random() < self.farms[turn])
            calls.append(make_transition(f"{name}/{turn}", index=turn, completion=(int(farms),)))
            if not farms:
                break
            tools.append(
                ToolCall(
                    id=f"{name}-{turn}",
                    name="sql",
                    arguments="{}",
                    status=ToolStatus.OK,
                    transition_id=f"{name}/{turn}",
                )
            )
        has_answered = len(tools) < len(calls)
        found = make_trajectory(name, calls, reward=None, group_id=group, output=has_answered, tool_calls=tools)
        return replace(found, rewards={}, step=step)

    def learn(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[np.ndarray | None]], rate: float
    ) -> None:
        """∇ log π · A, summed over the calls and divided by the rollouts."""
        gradient = np.zeros(TURNS)
        for trajectory, of_calls in zip(trajectories, advantages, strict=True):
            for turn, (call, credit) in enumerate(zip(trajectory.transitions, of_calls, strict=True)):
                assert credit is not None
                gradient[turn] += (call.completion_ids[0] - self.farms[turn]) * float(credit[0])
        self.logits += rate * gradient / len(trajectories)


def make_scorers(reward: TurnReward, gamma: float, baseline: Baseline) -> tuple[Evaluator, Scorer]:
    rewards = RewardSet([NamedReward(name="right", function=lambda task, output, trajectory: float(output))])
    credit = TurnReturns(gamma=gamma, baseline=baseline)
    evaluator = Evaluator(
        rewards=rewards,
        intermediate={reward.name: reward},
        credit=credit,
        outcomes=OutcomesConfig(),
        plugins=load_plugins(),
    )
    return evaluator, Scorer(
        credit=credit,
        rewards=rewards.weights,
        samples=SamplesConfig(),
        trained={"policy": TrainedCalls()},
        farmed=[] if reward.is_potential else [reward.name],
    )


def train(
    *, ok: float, weight: float = 1.0, gamma: float = 1.0, baseline: Baseline = "grpo"
) -> tuple[Policy, list[dict[str, float]]]:
    """A policy after so many steps of four groups of eight, and the metrics of each step."""
    reward = TurnReward(name="tools", function=ToolStatusReward(ok=ok), weight=weight)
    evaluator, scorer = make_scorers(reward, gamma, baseline)
    policy, random, metrics = Policy(), np.random.default_rng(7), []

    async def run() -> None:
        for step in range(STEPS):
            played = [policy.play(f"{step}-{g}-{i}", f"{step}-{g}", step, random) for g in range(4) for i in range(8)]
            scored = scorer.build(scorer.credit(await evaluator.evaluate(played)))
            metrics.append(dict(scored.metrics))
            members = [one for group in scored.groups for one in group.trajectories]
            policy.learn(members, [calls for group in scored.advantages for calls in group], rate=3.0)

    asyncio.run(run())
    return policy, metrics


def test_a_policy_that_is_paid_for_tools_farms_them_and_the_run_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightningrl"):
        policy, metrics = train(ok=1.2, baseline="dr_grpo")
    assert policy.farms.min() > 0.8, "else this shows nothing"
    assert metrics[-1]["reward"] < metrics[0]["reward"]
    assert metrics[-1]["air/tools"] > 2 * metrics[0]["air/tools"]
    (warning,) = [record.getMessage() for record in caplog.records if "may farm" in record.getMessage()]
    assert warning.startswith("step ")
    assert "intermediate rewards grew from" in warning
    assert (
        "the policy may farm 'tools'; lower intermediate_rewards.tools.weight, or charge for what fails and pay nothing "
        "for what works"
    ) in warning


@pytest.mark.parametrize("baseline", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("remedy", [{"ok": 1.2, "weight": 0.04}, {"ok": 0.0}], ids=["a lower weight", "charges alone"])
def test_with_either_remedy_of_the_warning_the_same_policy_learns_to_answer(
    remedy: dict[str, float], baseline: Baseline
) -> None:
    """While turn rewards were divided by their own deviation, no weight changed anything."""
    policy, metrics = train(**remedy, baseline=baseline)
    assert policy.farms[-1] < 0.25
    assert metrics[-1]["reward"] > max(0.9, metrics[0]["reward"])


def test_a_plain_reward_that_leaves_the_outcome_worth_more_is_no_farming(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightningrl"):
        _, metrics = train(ok=0.05, baseline="dr_grpo")
    assert metrics[-1]["reward"] > 0.9
    assert not [record for record in caplog.records if "may farm" in record.getMessage()]


# ---------------------------------------------------------------------- what is seen, step by step


def watch(steps: Sequence[tuple[Sequence[float], Sequence[float]]]) -> FarmingWatch:
    """After steps of one group each: what each rollout is paid, and its outcome."""
    seen = FarmingWatch(["turn"])
    for paid, outcomes in steps:
        seen.finish_step([make_group(*((value,) for value in paid), rewards=outcomes)])
    return seen


def test_both_grow_and_nobody_is_warned() -> None:
    assert (
        watch([((0.1 * step, 0.1 * step + 0.1), (0.05 * step, 0.05 * step + 0.1)) for step in range(20)]).explain()
        is None
    )


def test_pay_grows_while_the_outcome_stands_still() -> None:
    sentence = watch([((0.1 * step, 0.1 * step + 0.1), (0.5, 0.5)) for step in range(20)]).explain()
    assert sentence is not None
    assert "(0.5, now 0.5); rollouts that are paid more do no better (all do equally well)" in sentence


def test_pay_that_goes_with_the_outcome_is_no_farming_though_both_stand_still() -> None:
    assert watch([((0.1 * step, 0.1 * step + 0.1), (0.4, 0.6)) for step in range(20)]).explain() is None
    assert watch([((0.1 * step, 0.1 * step + 0.1), (0.6, 0.4)) for step in range(20)]).explain() is not None


def test_noise_is_no_growth() -> None:
    random = np.random.default_rng(0)

    def step() -> tuple[list[float], list[float]]:
        return random.normal(1.0, 0.5, 8).tolist(), random.normal(0.0, 1.0, 8).tolist()

    assert [watch([step() for _ in range(40)]).explain() for _ in range(20)] == [None] * 20


def test_a_shaping_reward_is_not_watched_and_a_run_without_any_has_no_metric() -> None:
    assert TurnReward(name="a", function=ToolStatusReward(), form="potential").is_potential
    assert FarmingWatch([]).finish_step([make_group((0.1,), rewards=(1.0,))]) == {}
    seen = FarmingWatch(["turn"])
    assert seen.finish_step([make_group((0.1,), (0.3,), rewards=(0.0, 1.0))]) == pytest.approx(
        {"air/turn": 0.2, "air/correlation": 1.0}
    )
    assert seen.finish_step([make_group((0.1,), (0.1,), rewards=(0.0, 1.0))]) == pytest.approx({"air/turn": 0.1})
    assert seen.finish_step([make_group((0.1,), (0.1,), rewards=(None, None))]) == {}
