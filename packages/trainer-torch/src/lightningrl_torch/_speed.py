"""Speed of a policy here: a few random tokens are read, sampled and learned from, which leaves no trace in it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from lightningrl.backends import GenerateRequest, Speed
from lightningrl.types import Sample, SamplingSettings
from lightningrl_torch._packing import make_row
from lightningrl_torch.engine import TorchEngine

__all__ = ["Memory", "measure"]

T = TypeVar("T")

CALLS: Final = 8
"""At once."""
READ, SAMPLED, LEARNED = 16, 6, 32
"""Tokens of each."""
WORDS: Final = 200
"""Tokens of the vocabulary; which ones does not matter."""


class Memory(NamedTuple):
    """Memory of weights, in bytes, and of the optimiser, in bytes for each number that learns."""

    weights: int
    moments: float


def measure(
    engine: TorchEngine, rehearse: Callable[[Sequence[Sample]], None], *, parameters: int, trained: int, memory: Memory
) -> Speed:
    """Takes some seconds where a policy is slow. `rehearse` computes rows' gradient."""
    rng = random.Random(0)  # noqa: S311 - which tokens does not matter

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(WORDS) for _ in range(count))

    _ask(engine, 1, words, prompt=2, tokens=1)  # what is made once
    _, reading = _timed(lambda: _ask(engine, CALLS, words, prompt=READ, tokens=1))
    # fewer than asked for where one ends early; a prompt of two tokens takes about as long as a token
    sampled, sampling = _timed(lambda: _ask(engine, CALLS, words, prompt=2, tokens=SAMPLED))
    rows = [_row(words(1 + LEARNED)) for _ in range(CALLS // 2)]
    _, learning = _timed(lambda: rehearse(rows))

    def speed(tokens: int, took: float) -> float:
        return tokens / max(took, 1e-9)

    return Speed(
        parameters=parameters,
        trained=trained,
        weight_bytes=memory.weights,
        moment_bytes=memory.moments,
        read=speed(CALLS * READ, reading.wall),
        sampled=speed(sampled, sampling.wall),
        calls=CALLS,
        learned=speed(len(rows) * LEARNED, learning.wall),
        read_cpu=speed(CALLS * READ, reading.cpu),
        sampled_cpu=speed(sampled, sampling.cpu),
        learned_cpu=speed(len(rows) * LEARNED, learning.cpu),
    )


def _ask(engine: TorchEngine, calls: int, words: Callable[[int], tuple[int, ...]], *, prompt: int, tokens: int) -> int:
    """Tokens that were sampled."""

    async def call(number: int) -> int:
        request = GenerateRequest(
            id=f"speed-{number}", prompt_ids=words(prompt), sampling=SamplingSettings(max_tokens=tokens, seed=number)
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*map(call, range(calls))))

    return asyncio.run(all_of_them())


def _row(tokens: tuple[int, ...]) -> Sample:
    """All but the first are learned."""
    return make_row(np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32), 1.0)


class _Took(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float
    """This process has, in which the policy is served and learned."""


def _timed(work: Callable[[], T]) -> tuple[T, _Took]:
    wall, cpu = time.monotonic(), time.process_time()
    done = work()
    return done, _Took(time.monotonic() - wall, time.process_time() - cpu)
