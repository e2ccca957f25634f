"""What are importance weights for? A small policy learns from what it sampled eight steps before.

    python benchmarks/stale_tokens.py            four losses, five seeds: two minutes on an idle core

The policy has four prompts, and is paid for the share of four tokens that are of the prompt's kind (the token modulo 4;
0.25 is chance). 60 steps of 64 rollouts, advantages from the mean of each prompt. Printed: the mean reward of the last
five steps of each seed, and a control with learning rate 0.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from lightningrl.backends import GenerateRequest
from lightningrl.types import Sample, SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, save_policy

LOSSES: Final = ("reinforce", "ppo_clip", "gspo", "cispo")
STEPS, AGE, PROMPTS, GROUP, TOKENS = 60, 8, 4, 16, 4
RATE: Final = 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    seeds = range(parser.parse_args().seeds)
    print("| loss | on-policy | old, weighed | old, not weighed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder))
        for loss in LOSSES:
            cells = [
                " ".join(f"{learn(policy, seed, loss=loss, age=age, cap=cap):.2f}" for seed in seeds)
                for age, cap in ((0, 0.0), (AGE, 2.0), (AGE, 0.0))
            ]
            print(f"| `{loss}` | {' | '.join(cells)} |", flush=True)
        control = " ".join(f"{learn(policy, seed, loss=LOSSES[0], age=0, cap=0.0, rate=0.0):.2f}" for seed in seeds)
        print(f"| control: learning rate 0 | {control} | | |")


def learn(policy: str, seed: int, *, loss: str, age: int, cap: float, rate: float = RATE) -> float:
    """Train; return the mean reward of the last five steps."""
    backend = TorchBackend(
        policy=policy, seed=seed, threads=1, learning_rate=rate, loss=loss, importance_cap=cap, max_staleness=age
    )
    waiting: deque[list[Sample]] = deque()
    rewards: list[float] = []
    try:
        for step in range(STEPS):
            samples, reward = asyncio.run(sample(backend, step))
            rewards.append(reward)
            waiting.append(samples)
            if len(waiting) > age:
                backend.learn(waiting.popleft())
    finally:
        backend.close()
    return fmean(rewards[-5:])


async def sample(backend: TorchBackend, step: int) -> tuple[list[Sample], float]:
    """Sample a step's rollouts; return its rows and its mean reward."""

    async def rollout(number: int) -> tuple[list[int], list[float], int, float]:
        kind = number % PROMPTS
        request = GenerateRequest(
            id=f"{step}/{number}", prompt_ids=(kind,) * 8, sampling=SamplingSettings(max_tokens=TOKENS)
        )
        chunks = [chunk async for chunk in backend.engine.generate(request)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        return tokens, logprobs, chunks[0].policy_version, fmean(float(token % PROMPTS == kind) for token in tokens)

    rollouts = await asyncio.gather(*(rollout(number) for number in range(PROMPTS * GROUP)))
    rewards = np.array([reward for *_, reward in rollouts])
    baselines = [rewards[kind::PROMPTS].mean() for kind in range(PROMPTS)]
    samples = [
        make_sample(
            (number % PROMPTS,) * 8,
            tokens,
            reward - baselines[number % PROMPTS],
            rollout=str(number),
            weight=1 / (PROMPTS * GROUP * TOKENS),
            logprobs=logprobs,
            version=version,
        )
        for number, (tokens, logprobs, version, reward) in enumerate(rollouts)
    ]
    return samples, float(rewards.mean())


if __name__ == "__main__":
    main()
