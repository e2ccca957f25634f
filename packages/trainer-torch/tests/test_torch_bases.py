"""Policies with adapters on one base: its weights stand in memory once, and nothing else of them is shared."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightningrl.backends import Continuation, GenerateRequest
from lightningrl.types import Array, Sample, SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.policy import _BASES
from lightningrl_torch.testing import make_sample, save_policy

MakeBackend = Callable[..., TorchBackend]
LORA: dict[str, Any] = {"lora": {"rank": 4}}
KINDS = pytest.mark.parametrize("quantize", [None, "nf4"])
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return save_policy(tmp_path / "base", hidden_size=64, intermediate_size=192)


def make_samples(step: int) -> list[Sample]:
    rng = random.Random(step)
    return [
        make_sample(PROMPT, [rng.randrange(256) for _ in range(5)], rng.gauss(0, 1), rollout=str(number))
        for number in range(4)
    ]


def storages(*backends: TorchBackend) -> dict[int, int]:
    """Bytes of each storage that engines and learners of these policies hold weights in."""
    found: dict[int, int] = {}
    for backend in backends:
        served: Any = backend.engine._decoder
        tensors = [*backend.learner.model.parameters(), *backend.learner.model.buffers()]
        tensors += [value for _, value in tensors_of(served.forward)]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def tensors_of(value: Any, depth: int = 0) -> list[tuple[int, torch.Tensor]]:
    """Tensors that an object of the engine holds, some levels down."""
    if isinstance(value, torch.Tensor):
        return [(depth, value)]
    if depth > 4 or isinstance(value, (str, bytes, int, float, type(None))):
        return []
    parts: Any = value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).values()
    if hasattr(value, "__slots__") and not isinstance(value, (list, tuple)):
        parts = [getattr(value, name, None) for name in value.__slots__]
    return [found for part in parts for found in tensors_of(part, depth + 1)]


def packing(backend: TorchBackend) -> list[Any]:
    """The engine's products with a matrix."""
    served: Any = backend.engine._decoder
    return list(served.forward._projections)


def is_packed(projection: Any) -> bool:
    return bool(projection.packed)


def logprobs(backend: TorchBackend) -> list[Array]:
    rng = np.random.default_rng(0)
    context = np.array(PROMPT, np.int32)
    rows = [Continuation(context=context, tokens=rng.integers(0, 256, 8).astype(np.int32)) for _ in range(4)]
    return list(backend.logprobs(rows))


async def sample(backend: TorchBackend, seed: int) -> tuple[list[int], list[float]]:
    request = GenerateRequest(id=str(seed), prompt_ids=PROMPT, sampling=SamplingSettings(max_tokens=16, seed=seed))
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    return [one for chunk in chunks for one in chunk.token_ids], [one for chunk in chunks for one in chunk.logprobs]


async def sample_all(*backends: TorchBackend) -> list[tuple[list[int], list[float]]]:
    """Calls of all of them at the same time."""
    return list(await asyncio.gather(*(sample(backend, seed) for backend in backends for seed in range(4))))


@KINDS
def test_two_policies_have_one_base_and_two_adapters_in_memory(
    make_backend: MakeBackend, base: str, quantize: str | None
) -> None:
    one = make_backend(policy=base, name="a", quantize=quantize, **LORA)
    alone = sum(storages(one).values())
    two = make_backend(policy=base, name="b", quantize=quantize, **LORA)
    both = sum(storages(one, two).values())
    adapters = sum(weight.numel() * weight.element_size() for weight in two.learner.parameters.values())
    rotary = 4096  # tables of positions are each forward's own
    assert adapters <= both - alone <= adapters + rotary
    trained = [{weight.data_ptr() for weight in each.learner.parameters.values()} for each in (one, two)]
    assert not trained[0] & trained[1]
    assert "frozen weights shared with 'a'" in two.describe() and "shared with 'b'" in one.describe()


@KINDS
def test_each_policy_computes_and_learns_as_it_does_alone(
    make_backend: MakeBackend, base: str, tmp_path: Path, quantize: str | None
) -> None:
    apart = []
    for number in range(2):  # in folders of their own: nothing is shared
        folder = save_policy(tmp_path / f"apart{number}", hidden_size=64, intermediate_size=192)
        apart.append(make_backend(policy=folder, name=f"apart{number}", quantize=quantize, seed=number, **LORA))
    together = [
        make_backend(policy=base, name=name, quantize=quantize, seed=number, **LORA) for number, name in enumerate("ab")
    ]
    assert not any("shared" in backend.describe() for backend in apart)
    for step in range(3):
        for number in range(2):
            rows = make_samples(10 * number + step)
            before = [weight.clone() for weight in together[1 - number].learner.parameters.values()]
            reports = [backends[number].learn(rows) for backends in (apart, together)]
            assert reports[0].metrics["loss"] == pytest.approx(reports[1].metrics["loss"], abs=1e-5)
            after = list(together[1 - number].learner.parameters.values())
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for alone, shared in zip(apart, together, strict=True):
        for one, other in zip(logprobs(alone), logprobs(shared), strict=True):
            assert np.abs(one - other).max() < 1e-5
    assert any(np.abs(a - b).max() > 1e-2 for a, b in zip(logprobs(together[0]), logprobs(together[1]), strict=True))
    for (ours, our), (theirs, their) in zip(
        asyncio.run(sample_all(*apart)), asyncio.run(sample_all(*together)), strict=True
    ):
        assert ours == theirs
        assert np.abs(np.array(our) - np.array(their)).max() < 1e-5


def test_checkpoints_and_exports_are_of_each_policy_alone(make_backend: MakeBackend, base: str, tmp_path: Path) -> None:
    one, two = (make_backend(policy=base, name=name, **LORA) for name in "ab")
    one.learn(make_samples(0))
    one.save(tmp_path / "a")
    expected, untouched = logprobs(one), logprobs(two)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"trained.safetensors", "state.pt"}
    assert (tmp_path / "a/trained.safetensors").stat().st_size < 100_000, "adapters alone"
    one.learn(make_samples(1))
    one.load(tmp_path / "a")
    two.export(tmp_path / "b")
    one.export(tmp_path / "merged")
    for found, wanted in ((logprobs(one), expected), (logprobs(two), untouched)):
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    for folder, wanted in ((tmp_path / "merged", expected), (tmp_path / "b", untouched)):
        exported = logprobs(make_backend(policy=str(folder)))
        assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(exported, wanted, strict=True))


def test_policies_that_serve_while_they_learn_share_frozen_weights_too(make_backend: MakeBackend, base: str) -> None:
    one, two = (make_backend(policy=base, name=name, max_staleness=1, quantize="nf4", **LORA) for name in "ab")
    whole = sum(storages(one, two).values())
    one.learn(make_samples(0))
    two.learn(make_samples(1))
    adapters = sum(weight.numel() * weight.element_size() for weight in one.learner.parameters.values())
    assert sum(storages(one, two).values()) - whole <= 2 * adapters + 8192


def test_matrices_in_one_dnn_s_order_are_shared_too(make_backend: MakeBackend, tmp_path: Path) -> None:
    wide = save_policy(tmp_path / "wide", hidden_size=256, intermediate_size=1024)
    one, two = (make_backend(policy=wide, name=name, device="cpu", **LORA) for name in "ab")
    asyncio.run(sample_all(one, two))
    packed = [[part.packed[0] for part in packing(each) if part.packed] for each in (one, two)]
    assert packed[0] and all(ours is theirs for ours, theirs in zip(*packed, strict=True))
    one.learn(make_samples(0))  # frozen matrices stay what they are
    asyncio.run(sample_all(one))
    assert all(
        ours.packed[0] is theirs for ours, theirs in zip(filter(is_packed, packing(one)), packed[1], strict=True)
    )
    whole = [make_backend(policy=wide, lora=False, device="cpu") for _ in range(2)]
    asyncio.run(sample_all(*whole))
    ours, theirs = ({id(part.packed[0]) for part in packing(each) if part.packed} for each in whole)
    assert ours and not ours & theirs


def test_a_base_goes_with_its_last_policy_and_a_changed_folder_is_another(base: str) -> None:
    before = len(_BASES)
    one = TorchBackend(policy=base, device="cpu", **LORA)
    assert len(_BASES) == before + 1
    save_policy(Path(base), hidden_size=64, intermediate_size=128)
    two = TorchBackend(policy=base, device="cpu", **LORA)
    other_numbers = TorchBackend(policy=base, device="cpu", quantize="nf4", **LORA)
    assert len(_BASES) == before + 3
    assert "shared" not in two.describe() + other_numbers.describe()
    same = TorchBackend(policy=base, device="cpu", name="same", **LORA)
    assert "shared with 'same'" in two.describe()
    same.close()
    assert "shared" not in two.describe()
    for backend in (one, two, other_numbers):
        backend.close()
    del one, two, other_numbers, same, backend
    gc.collect()
    assert len(_BASES) == before


def test_all_weights_that_learn_are_a_policy_s_own(make_backend: MakeBackend, base: str) -> None:
    one, two = (make_backend(policy=base, lora=False, kl_coef=0.1) for _ in range(2))
    assert not storages(one).keys() & storages(two).keys()
