"""What a critic of trainer-torch costs beside none: memory, time of a step, time of a step's values; and the CPU of its credit.

python benchmarks/critic_cost.py
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightningrl.advantages.samples import build_samples
from lightningrl.credit.turn_gae import Level, TurnGae
from lightningrl.testing.groups import make_trajectory, make_transition
from lightningrl.testing.scripted_services import ScriptedServices
from lightningrl.training.services import PolicyQueries, RolloutServices
from lightningrl.types import Sample, Trajectory, TrajectoryGroup
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import save_policy

ROLLOUTS, TURNS, READ, SAID = 16, 8, 40, 24
"""Of what is learned from: tokens that a turn reads anew and says."""
CREDITED = 128
"""Rollouts of a step whose credit is timed."""
REPEATS = 3
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "head on the policy's layers": {},
    "the same, joint": {"joint": True},
    "a model of its own": {"model": "policy"},
}


def make_rollout(number: int) -> Trajectory:
    random = np.random.default_rng(number)
    history: list[int] = [number % 250]
    calls = []
    for turn in range(TURNS):
        history = [*history, *random.integers(0, 250, READ).tolist()]
        said = random.integers(0, 250, SAID).tolist()
        parent = f"{number}/{turn - 1}" if turn else None
        calls.append(make_transition(f"{number}/{turn}", prompt=history, completion=said, index=turn, parent=parent))
        history = [*history, *said]
    return make_trajectory(str(number), calls, reward=float(number % 2), group_id=str(number))


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Median of one call, of all threads."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def credited(rollouts: list[Trajectory], assigner: TurnGae) -> list[Sample]:
    services = ScriptedServices(values=lambda context: 0.25)
    heard = [replace(one, evidence=asyncio.run(assigner.score(one, services))) for one in rollouts]
    groups = [TrajectoryGroup(id=one.group_id, trajectories=(one,)) for one in heard]
    targets = [assigner.value_targets(group) for group in groups]
    return build_samples(groups, [assigner.assign(group) for group in groups], rows="merged", value_targets=targets)


def megabytes(backend: TorchBackend) -> float:
    """Weights, gradients and both moments of all that learns."""
    critic = backend.learner.critic
    learning = [*backend.learner.parameters.values(), *(critic.parameters.values() if critic else ())]
    return 4 * float(sum(one.numel() * one.element_size() for one in learning)) / 1e6


def step_values(backend: TorchBackend, rollouts: list[Trajectory], assigner: TurnGae) -> None:
    policies = PolicyQueries({})
    policies.connect("policy", backend)

    async def ask() -> None:
        await asyncio.gather(*(assigner.score(one, RolloutServices(None, policies, one)) for one in rollouts))

    asyncio.run(ask())


def credit_ms(level: Level) -> float:
    assigner = TurnGae(level=level)
    services = ScriptedServices(values=lambda context: 0.25)
    scored = [replace(one, evidence=asyncio.run(assigner.score(one, services))) for one in map(make_rollout, range(CREDITED))]
    groups = [TrajectoryGroup(id="g", trajectories=tuple(scored[start : start + 8])) for start in range(0, CREDITED, 8)]
    return 1e3 * cpu_seconds(lambda: [(assigner.assign(group), assigner.value_targets(group)) for group in groups])


def main() -> None:
    torch.set_num_threads(1)
    rollouts = [make_rollout(number) for number in range(ROLLOUTS)]
    samples = credited(rollouts, TurnGae())
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
    first: tuple[float, float] | None = None
    print(f"{ROLLOUTS} rollouts x {TURNS} turns, rows of {TURNS * (READ + SAID)} tokens; times and memory beside no critic")
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder), max_position_embeddings=1024, num_key_value_heads=2, **shape)
        for kind, table in KINDS.items():
            critic = None if table is None else {**table, **({"model": policy} if "model" in table else {})}
            backend = TorchBackend(policy=policy, device="cpu", threads=1, critic=critic)
            backend.learn(samples)
            learn, memory = cpu_seconds(lambda: backend.learn(samples)), megabytes(backend)  # noqa: B023  called at once
            first = first or (learn, memory)
            line = f"{kind:28} step {learn / first[0]:.2f}x  memory {memory / first[1]:.4f}x"
            if critic is not None:
                for name, assigner in {"turns": TurnGae(), "tokens": TurnGae(level="token")}.items():
                    line += f"  values of {name} {cpu_seconds(lambda: step_values(backend, rollouts, assigner)) / first[0]:.2f}x"  # noqa: B023
            print(line, flush=True)
            backend.close()
    slowest = 0.0
    for level in ("turn", "token", "both"):
        spent = credit_ms(level)
        slowest = max(slowest, spent)
        print(f"credit of {CREDITED} rollouts x {TURNS} turns, level {level!r}: {spent:.1f} ms CPU")
    print(f"RESULT {slowest:.1f}")


if __name__ == "__main__":
    main()
