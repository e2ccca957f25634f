"""Asynchronous against synchronous collection on the torch backend, and what importance weights are for.

    python benchmarks/asynchronous.py            a quick look: one seed, a few steps
    python benchmarks/asynchronous.py --full     three seeds of 40 steps each; half an hour on two idle cores
    python benchmarks/asynchronous.py --report   only read what earlier calls left in runs/asynchronous
    python benchmarks/asynchronous.py --forced   only the second table: less than a minute

1. examples/text_to_sql with a tool that takes 0.05 to 2 s (benchmarks/slow_sql.py), the modes in turns, seed by seed: rollouts per
   minute (steps alone, the first left out), how old the tokens were that were learned from, accuracy before and after.
2. Staleness forced: a small policy learns from what it sampled eight steps before, with importance weights and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.types import GenerateRequest, Sample, SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, save_policy

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs" / "asynchronous"
STALENESS = 2
QUICK, FULL = 8, 40
"""Steps."""
MODES = {
    "synchronous": (),
    "asynchronous": (f"loop.max_staleness={STALENESS}", "loop.asynchronous=true"),
}
RECIPE = """\
name = "slow_tools"
agent = "{root}/benchmarks/slow_sql.py:answer"
adapters = ["langchain"]

[tasks]
train = "{root}/examples/text_to_sql/data.py:train_tasks"
validation = "{root}/examples/text_to_sql/data.py:validation_tasks"

[policy]
model = "{root}/examples/text_to_sql/starter"
trained_agents = ["write", "rewrite"]

[rewards.execution_match]
use = "{root}/examples/text_to_sql/reward.py:execution_match"

[credit]
use = "dr_grpo"

[sampling]
temperature = 1.0
max_tokens = 48

[validation]
every = {steps}
tasks = {validation}

[runtime]
workers = 2
concurrency = 48

[loop]
steps = {steps}
tasks_per_step = 4
group_size = 8
checkpoint_every = {steps}

[learner]
learning_rate = 4e-4
betas = [0.9, 0.99]
warmup_steps = 3
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="three seeds of 40 steps each")
    parser.add_argument("--report", action="store_true", help="run nothing of the first table; print the runs that are there")
    parser.add_argument("--forced", action="store_true", help="only the second table")
    options = parser.parse_args()
    if not options.forced:
        seeds, steps = ((0, 1, 2), FULL) if options.full else ((0,), QUICK)
        for seed in () if options.report else seeds:
            for mode in MODES:
                train(mode, seed, steps)
        report()
    if not options.report:
        report_forced()


# ---------------------------------------------------------------------- slow tools


def train(mode: str, seed: int, steps: int) -> None:
    """One run; one that is done is left as it is, one that was cut off goes on."""
    folder = RUNS / f"{steps}-steps" / f"{mode}-{seed}"
    if is_done(folder):
        return
    command = [sys.executable, "-m", "lightningrl", "train"]
    if (folder / "run.json").is_file():
        command += ["--resume", "--run", str(folder)]
    else:
        recipe = RUNS / f"{steps}-steps" / "recipe.toml"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(RECIPE.format(root=ROOT, steps=steps, validation=160 if steps > QUICK else 24))
        command += [str(recipe), "--run", str(folder), "--seed", str(seed)]
        command += [part for setting in MODES[mode] for part in ("--set", setting)]
    print(f"{mode}, seed {seed}: {steps} steps", flush=True)
    with (RUNS / "log.txt").open("a") as log:
        subprocess.run(command, check=True, cwd=ROOT, stdout=log, stderr=log)


def is_done(folder: Path) -> bool:
    """Validated after its last step."""
    steps = folder.parent.name.split("-")[0]
    is_begun = (folder / "metrics.jsonl").is_file()
    return is_begun and any(str(line["step"]) == steps and "validation/reward" in line for line in lines(folder))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def step_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "seconds" in line]


def describe(folder: Path) -> dict[str, float]:
    steps = step_lines(folder)
    accuracies = [line["validation/reward"] for line in lines(folder) if "validation/reward" in line]
    counted = steps[1:]  # the first has processes that start beside it
    return {
        "rollouts per minute": 60 * sum(line["rollouts"] for line in counted) / sum(line["seconds"] for line in counted),
        "waiting for rollouts": sum(line["seconds_collect"] for line in counted) / sum(line["seconds"] for line in counted),
        "staleness, mean": statistics.mean(line.get("learn/staleness_mean", 0.0) for line in counted),
        "staleness, most": max(line.get("learn/staleness_max", 0.0) for line in counted),
        "groups too old": sum(line.get("groups_stale", 0.0) for line in counted),
        "swap, seconds a step": statistics.mean(line.get("learn/seconds_swap", 0.0) for line in counted),
        "accuracy before": accuracies[0],
        "accuracy after": accuracies[-1],
    }


def report() -> None:
    for runs in sorted(RUNS.glob("*-steps"), key=lambda path: int(path.name.split("-")[0])):
        found = {folder.name: describe(folder) for folder in sorted(runs.iterdir()) if is_done(folder)}
        if not found:
            continue
        columns = list(next(iter(found.values())))
        print(f"\n{runs.name}\n\n| run | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for name, numbers in found.items():
            print(f"| {name} | {' | '.join(f'{numbers[column]:.3g}' for column in columns)} |")
        means: dict[str, dict[str, float]] = {}
        for mode in MODES:
            if of_mode := [numbers for name, numbers in found.items() if name.startswith(mode)]:
                means[mode] = {column: statistics.mean(numbers[column] for numbers in of_mode) for column in columns}
        for mode, numbers in means.items():
            print(f"| **{mode}, mean** | {' | '.join(f'{numbers[column]:.3g}' for column in columns)} |")
        if len(means) == len(MODES):
            ratio = means["asynchronous"]["rollouts per minute"] / means["synchronous"]["rollouts per minute"]
            print(f"\nRESULT asynchronous / synchronous, rollouts per minute: {ratio:.2f}; bound of staleness: {STALENESS}")


# ---------------------------------------------------------------------- staleness forced

STEPS, AGE, PROMPTS, GROUP, TOKENS = 60, 8, 4, 16, 4


def report_forced() -> None:
    print(f"\nreward after {STEPS} steps that learn from what was sampled {AGE} steps before (three seeds; on-policy: the same step)\n")
    print("| loss | on-policy | old, weighed | old, not weighed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder))
        for loss in ("reinforce", "ppo_clip"):
            cells = []
            for age, cap in ((0, 0.0), (AGE, 2.0), (AGE, 0.0)):
                rewards = [learn_from_old(policy, seed, loss=loss, age=age, cap=cap) for seed in range(3)]
                cells.append(" ".join(f"{reward:.2f}" for reward in rewards))
            print(f"| {loss} | {' | '.join(cells)} |", flush=True)


def learn_from_old(policy: str, seed: int, *, loss: str, age: int, cap: float) -> float:
    """The mean reward of the last five steps: the share of a completion's tokens of the prompt's kind, which is the token modulo 4."""
    backend = TorchBackend(policy=policy, seed=seed, threads=1, learning_rate=1e-2, loss=loss, importance_cap=cap, max_staleness=age)
    waiting: deque[list[Sample]] = deque()
    rewards = []
    for step in range(STEPS):
        samples, reward = asyncio.run(sample(backend, step))
        rewards.append(reward)
        waiting.append(samples)
        if len(waiting) > age:
            backend.learn(waiting.popleft())
    backend.close()
    return statistics.mean(rewards[-5:])


async def sample(backend: TorchBackend, step: int) -> tuple[list[Sample], float]:
    async def one(number: int) -> tuple[list[int], list[float], int, float]:
        kind = number % PROMPTS
        request = GenerateRequest(id=f"{step}/{number}", prompt_ids=(kind,) * 8, sampling=SamplingSettings(max_tokens=TOKENS))
        chunks = [chunk async for chunk in backend.engine.generate(request)]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        reward = statistics.mean(float(token % 4 == kind) for token in tokens)
        return tokens, [value for chunk in chunks for value in chunk.logprobs], chunks[0].policy_version, reward

    found = await asyncio.gather(*(one(number) for number in range(PROMPTS * GROUP)))
    rewards = np.array([reward for *_, reward in found])
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
        for number, (tokens, logprobs, version, reward) in enumerate(found)
    ]
    return samples, float(rewards.mean())


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
