"""Rollouts that a method needs: one run is one game, one method, one seed, one learning rate, from the same
weights.

    until the policy wins the target share of held-out cases, or the rollouts are used up

Success is counted out, so it has no noise of its own: as the policy is sampled, which the target is of, and greedily.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Study
from methods import Method
from tasks import held_out_tasks, train_tasks

from lightningrl.plugins import PluginManager
from lightningrl_torch.backend import TorchBackend

__all__ = ["GROUP_SIZE", "LEARNER", "PLANS", "Plan", "Run", "learn"]

TASKS_PER_STEP: Final = 8
GROUP_SIZE: Final = 8
LEARNER: Final[dict[str, Any]] = {"betas": (0.9, 0.99), "threads": 1}
"""The same for all; the learning rates are in `study.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a game is learned, the same for every method."""

    skill: float
    """Of the policy that it starts from."""
    target: float
    """Share of held-out cases that are won."""
    rollouts: int
    """At most, branches counted like any other."""


PLANS: Final = {
    "guess": Plan(skill=0.0, target=0.7, rollouts=4096),
    "sql": Plan(skill=0.3, target=0.8, rollouts=4096),
    "door": Plan(skill=0.1, target=0.8, rollouts=4096),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What came of one run."""

    game: str
    method: str
    rate: float
    seed: int
    reached: bool
    rollouts: int
    """Until the target, or all of them."""
    tokens: int
    """Sampled until then."""
    steps: int
    cpu_s: float
    curve: tuple[tuple[int, float, float], ...]
    """Rollouts, greedy success, success as it is sampled, after each step."""


def learn(
    plugins: PluginManager,
    starter: Path,
    game: str,
    method: Method,
    *,
    rate: float,
    seed: int,
    budget: int | None = None,
) -> Run:
    """`budget`: rollouts at most; None = the plan's."""
    started = time.process_time()
    critic: dict[str, Any] = {"critic": {}} if method.has_critic else {}
    backend = TorchBackend(policy=str(starter), seed=seed, learning_rate=rate, **LEARNER, **critic)
    try:
        study = Study(backend, method, plugins, group_size=GROUP_SIZE, seed=seed)
        return asyncio.run(_learn(study, game, method.name, rate, seed, budget or PLANS[game].rollouts, started))
    finally:
        backend.close()


async def _learn(study: Study, game: str, method: str, rate: float, seed: int, budget: int, started: float) -> Run:
    rng = np.random.default_rng(seed)
    train, held_out = list(train_tasks(game)), list(held_out_tasks(game))
    curve: list[tuple[int, float, float]] = []

    def validate() -> None:
        greedy, sampled = (study.success(held_out, is_greedy=is_greedy) for is_greedy in (True, False))
        curve.append((study.player.rollouts, greedy, sampled))

    target = PLANS[game].target
    validate()
    while study.player.rollouts < budget and curve[-1][2] < target:
        chosen = rng.choice(len(train), TASKS_PER_STEP, replace=False)
        scored = await study.credit([train[number] for number in chosen])
        study.backend.learn(scored.samples)
        validate()
    return Run(
        game=game,
        method=method,
        rate=rate,
        seed=seed,
        reached=curve[-1][2] >= target,
        rollouts=curve[-1][0],
        tokens=study.player.calls,
        steps=len(curve) - 1,
        cpu_s=time.process_time() - started,
        curve=tuple(curve),
    )
