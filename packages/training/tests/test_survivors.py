"""What a policy breaks costs it: of two actions it takes the one that truly pays more, and the curve shows that pay."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.plugins import load_plugins
from lightningrl.recipe_tables import OutcomesConfig, SamplesConfig
from lightningrl.types import Outcome, Trajectory
from lightningrl_credit.baselines import IdenticalAssignment
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_training.evaluator import Evaluator

SAFE, RISKY = 1, 2
"""Tokens: one pays 0.6; the other pays 1, and crashes half of the time."""
GROUPS, SIZE, STEPS, RATE = 8, 8, 300, 0.3


async def paid(task: object, output: float, trajectory: Trajectory) -> float:
    return output


def act(rng: np.random.Generator, risky: float, group: int, number: int) -> Trajectory:
    action = RISKY if rng.random() < risky else SAFE
    has_crashed = action == RISKY and rng.random() < 0.5
    made = make_trajectory(
        f"g{group}-{number}",
        [make_transition(f"g{group}-{number}/0", prompt=[0], completion=[action])],
        group_id=f"g{group}",
        output=None if has_crashed else {SAFE: 0.6, RISKY: 1.0}[action],
        reward=None,
    )
    return replace(made, outcome=Outcome.AGENT_ERROR, error="ValueError: no JSON") if has_crashed else made


async def learn(seed: int) -> tuple[float, float]:
    """Probability of the risky action in the end, and the mean of the last rewards that were shown."""
    rng, logit, shown = np.random.default_rng(seed), 0.0, []
    rewards = RewardSet([NamedReward(name="paid", function=paid)])
    credit = IdenticalAssignment()
    evaluator = Evaluator(
        rewards=rewards, intermediate={}, credit=credit, outcomes=OutcomesConfig(), plugins=load_plugins()
    )
    scorer = Scorer(credit=credit, rewards=rewards.weights, samples=SamplesConfig(), trained={"policy": TrainedCalls()})
    for _ in range(STEPS):
        risky = 1 / (1 + np.exp(-logit))
        rollouts = [act(rng, risky, group, number) for group in range(GROUPS) for number in range(SIZE)]
        step = scorer.build(scorer.credit(await evaluator.reward(rollouts)))
        shown.append(step.metrics["reward"])
        for row in step.samples:
            trained = row.mask.nonzero()[0]
            chose = row.token_ids[trained] == RISKY
            logit += RATE * float(np.sum(row.weights[trained] * row.advantages[trained] * (chose - risky))) * SIZE
    return 1 / (1 + np.exp(-logit)), float(np.mean(shown[-50:]))


@pytest.mark.parametrize("seed", range(5))
def test_an_action_that_crashes_half_of_the_time_is_unlearned_and_the_curve_shows_what_it_truly_pays(seed: int) -> None:
    """With crashes left out it ended at 0.998, and the curve showed 0.998 where the truth was 0.50."""
    risky, shown = asyncio.run(learn(seed))
    assert risky < 0.05
    assert shown == pytest.approx(0.6, abs=0.03)
