"""Policies on one base decode in one forward pass, each by its own adapters, and none of them waits for, or fails with,
another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightningrl.backends import Continuation, GenerateRequest
from lightningrl.errors import BackendError
from lightningrl.types import SamplingSettings
from lightningrl_torch import _joint
from lightningrl_torch._joint import Part, decode_together
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import save_policy

MakeBackend = Callable[..., TorchBackend]
TOKENS = 24


@pytest.fixture
def three(make_backend: MakeBackend, tmp_path: Path) -> list[TorchBackend]:
    """Policies whose adapters differ."""
    base = save_policy(tmp_path / "base", hidden_size=64, intermediate_size=192)
    made = [make_backend(policy=base, name=name, device="cpu", engine_threads=2, lora={"rank": 4}) for name in "abc"]
    for number, backend in enumerate(made):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad(), backend.engine.held():
            for weight in backend.learner.parameters.values():
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
            backend.engine.set_version(1)
    return made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of policies in each pass of several."""
    seen: list[int] = []

    def watched(parts: Sequence[Part]) -> list[Tensor]:
        seen.append(len(parts))
        return decode_together(parts)

    monkeypatch.setattr(_joint, "decode_together", watched)
    return seen


async def ask(backend: TorchBackend, seed: int) -> tuple[Continuation, list[float]]:
    prompt = tuple(range(1, 4 + seed % 5))
    request = GenerateRequest(id=f"{seed}", prompt_ids=prompt, sampling=SamplingSettings(max_tokens=TOKENS, seed=seed))
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    asked = Continuation(context=np.array(prompt, np.int32), tokens=np.array(tokens, np.int32))
    return asked, [value for chunk in chunks for value in chunk.logprobs]


async def ask_all(*backends: TorchBackend) -> list[list[tuple[Continuation, list[float]]]]:
    return list(
        await asyncio.gather(
            *(asyncio.gather(*(ask(backend, seed) for seed in range(5))) for backend in backends),
            return_exceptions=False,
        )
    )


def check(backend: TorchBackend, answers: list[tuple[Continuation, list[float]]]) -> None:
    """Sampled log-probabilities are those of the policy's own forward pass."""
    own = backend.logprobs([asked for asked, _ in answers])
    for scored, (asked, sampled) in zip(own, answers, strict=True):
        assert len(asked.tokens) == TOKENS
        assert np.abs(scored - np.array(sampled)).max() < 1e-5


def test_rows_of_several_policies_are_decoded_together_each_by_its_own_adapters(
    three: list[TorchBackend], passes: list[int]
) -> None:
    for backend, answers in zip(three, asyncio.run(ask_all(*three)), strict=True):
        check(backend, answers)
    assert passes.count(3) >= TOKENS // 2, passes
    first, second = (
        backend.logprobs([Continuation(context=np.array([1]), tokens=np.array([2]))]) for backend in three[:2]
    )
    assert np.abs(first[0] - second[0]).max() > 1e-2, "their adapters differ"


def test_a_policy_that_is_held_keeps_no_other_waiting(three: list[TorchBackend], passes: list[int]) -> None:
    asyncio.run(ask_all(*three))
    del passes[:]
    held, *others = three
    with held.engine.held():
        for backend, answers in zip(others, asyncio.run(ask_all(*others)), strict=True):
            check(backend, answers)
    assert set(passes) == {2}


def test_what_fails_together_fails_the_policy_that_it_is_of(
    three: list[TorchBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, *others = three
    decoder: Any = broken.engine._decoder

    def fail(*_: Any) -> Any:
        raise ArithmeticError("these adapters are broken")

    for name in ("decode", "attention_of"):
        monkeypatch.setattr(decoder.forward.forward, name, fail)

    async def everybody() -> list[Any]:
        failing = asyncio.gather(*(ask(broken, seed) for seed in range(3)), return_exceptions=True)
        return [await ask_all(*others), await failing]

    answers, errors = asyncio.run(everybody())
    for backend, own in zip(others, answers, strict=True):
        check(backend, own)
    assert all(isinstance(error, BackendError) and "adapters are broken" in str(error) for error in errors), errors
