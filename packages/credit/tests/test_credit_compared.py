"""Per-role comparison and paid roles are parameters of the baseline stage: bit for bit what their wrappers computed."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment, TurnReturns, assign_credit
from lightningrl_credit.rewards import NamedReward, RewardWeights
from lightningrl_testing.groups import make_trajectory, make_transition

RECORDED = Path(__file__).with_name("data") / "credit_of_the_wrappers.json"
"""By assigner, comparison, payment: of each group the advantages' first tokens in order, float32, NaN for None, as the
wrapper classes `ByRole` and `PerReward` of 68fb3e1 gave them."""
PAID = RewardWeights(
    [
        NamedReward(name="team", function=lambda *_: 0.0, weight=2.0),
        NamedReward(name="draft", function=lambda *_: 0.0, agents=frozenset({"write"})),
        NamedReward(name="verdict", function=lambda *_: None, weight=0.5, agents=frozenset({"check"})),
    ]
)
ASSIGNERS: dict[str, CreditAssigner] = {
    "grpo": IdenticalAssignment(),
    "dr_grpo": IdenticalAssignment(baseline="dr_grpo"),
    "rloo": IdenticalAssignment(baseline="rloo"),
    "discounted": TurnReturns(gamma=0.9, turn_baseline="grpo"),
    "discounted-rloo": TurnReturns(gamma=0.5, baseline="rloo"),
}


def random_group(seed: int) -> TrajectoryGroup:
    chance = random.Random(seed)

    def maybe(value: float, share: float) -> float | None:
        return None if chance.random() < share else value

    trajectories = []
    for number in range(chance.randint(1, 6)):
        calls = [
            make_transition(
                f"{number}/{t}",
                index=t,
                agent=chance.choice(["write", "check", "write/sql", None]),
                parent=f"{number}/{chance.randrange(t)}" if t and chance.random() < 0.7 else None,
                trainable=chance.random() < 0.9,
                rewards={"turn": maybe(round(chance.uniform(-1, 1), 3), 0.3)},
            )
            for t in range(chance.randint(0, 5))
        ]
        rewards = {
            "team": round(chance.random(), 3),
            "draft": maybe(chance.choice([0.0, 0.3]), 0.2),
            "verdict": maybe(chance.random(), 0.4),
        }
        reward = maybe(round(chance.uniform(-1, 2), 3), 0.15)
        trajectories.append(replace(make_trajectory(str(number), calls, reward=reward), rewards=rewards))
    return TrajectoryGroup(id="g", trajectories=tuple(trajectories))


def firsts(advantages: Advantages) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([np.nan if tokens is None else tokens[0] for calls in advantages for tokens in calls], np.float32)


@pytest.mark.parametrize(("name", "compare", "is_paid"), list(product(ASSIGNERS, ("group", "role"), (False, True))))
def test_what_the_wrappers_computed_is_computed_bit_for_bit(name: str, compare: str, is_paid: bool) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[f"{name} {compare} {'paid' if is_paid else 'plain'}"]
    assert len(recorded) == 30
    for seed, text in enumerate(recorded):
        found = assign_credit(ASSIGNERS[name], random_group(seed), compare=compare, paid=PAID if is_paid else None)  # type: ignore[arg-type]
        assert firsts(found).tobytes() == base64.b64decode(text), seed
