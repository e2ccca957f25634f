"""How fast a policy is here: a few random tokens are read, sampled, and learned from, which leaves no trace in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from lightningrl.protocols import Speed
from lightningrl.types import GenerateRequest, Sample, SamplingSettings
from lightningrl_torch._packing import make_row
from lightningrl_torch.engine import TorchEngine

__all__ = ["measure"]

CALLS: Final = 8
"""At once."""
READ, SAMPLED, LEARNED = 16, 6, 32
"""Tokens of each."""
WORDS: Final = 200
"""Of the vocabulary; which ones does not matter."""


def measure(engine: TorchEngine, rehearse: Callable[[Sequence[Sample]], None], *, parameters: int, trained: int) -> Speed:
    """Takes some seconds where a policy is slow. `rehearse` computes rows' gradient."""
    rng = random.Random(0)  # noqa: S311 - which tokens does not matter

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(WORDS) for _ in range(count))

    _ask(engine, 1, words, prompt=2, tokens=1)  # what is made once
    reading = _seconds(lambda: _ask(engine, CALLS, words, prompt=READ, tokens=1))
    first = _seconds(lambda: _ask(engine, CALLS, words, prompt=2, tokens=1))
    began = time.monotonic()
    sampled = _ask(engine, CALLS, words, prompt=2, tokens=1 + SAMPLED) - CALLS  # fewer than asked for where one ends early
    sampling = time.monotonic() - began - first
    rows = [_row(words(1 + LEARNED)) for _ in range(CALLS // 2)]
    learning = _seconds(lambda: rehearse(rows))
    return Speed(
        parameters=parameters,
        trained=trained,
        read=CALLS * READ / reading,
        sampled=max(sampled, 1) / max(sampling, 1e-9),
        calls=CALLS,
        learned=len(rows) * LEARNED / learning,
    )


def _ask(engine: TorchEngine, calls: int, words: Callable[[int], tuple[int, ...]], *, prompt: int, tokens: int) -> int:
    """Tokens that were sampled."""

    async def call(number: int) -> int:
        request = GenerateRequest(id=f"speed-{number}", prompt_ids=words(prompt), sampling=SamplingSettings(max_tokens=tokens, seed=number))
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*map(call, range(calls))))

    return asyncio.run(all_of_them())


def _row(tokens: tuple[int, ...]) -> Sample:
    """All but the first are learned."""
    return make_row(np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32), 1.0)


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
