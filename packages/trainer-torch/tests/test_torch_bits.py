"""AdamW with moments of 8 bits: learns as AdamW does, resumes bit for bit, and is named where it cannot be."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightningrl
from lightningrl.errors import BackendError
from lightningrl.types import Sample
from lightningrl_torch import bits
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.plugin import check_recipe
from lightningrl_torch.testing import make_sample, save_policy

MakeBackend = Callable[..., TorchBackend]
EIGHT: dict[str, Any] = {"optimizer": "adamw8bit"}
MODES: list[dict[str, Any]] = [{"lora": {"rank": 64}}, {"weight_decay": 0.01, "minibatches": 2}]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Matrices large enough for 8 bits: 4,096 numbers and more."""
    return save_policy(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128)


def make_samples(step: int) -> list[Sample]:
    rng = random.Random(step)
    return [
        make_sample([number % 2] * 8, [rng.randrange(256) for _ in range(5)], rng.gauss(0, 1), rollout=str(number))
        for number in range(6)
    ]


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in backend.learner.parameters.items()}


@pytest.mark.parametrize("mode", MODES, ids=["lora", "full"])
def test_a_run_with_8_bit_moments_resumes_bit_for_bit(
    make_backend: MakeBackend, wide: str, tmp_path: Path, mode: dict[str, Any]
) -> None:
    straight, first, second = (make_backend(policy=wide, **EIGHT, **mode) for _ in range(3))
    for step in range(4):
        straight.learn(make_samples(step))
    for step in range(2):
        first.learn(make_samples(step))
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for step in range(2, 4):
        second.learn(make_samples(step))
    expected, found = weights_of(straight), weights_of(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("mode", MODES, ids=["lora", "full"])
def test_8_bit_moments_learn_what_32_bit_ones_do_in_a_quarter_of_the_memory(
    make_backend: MakeBackend, wide: str, mode: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    backends = [make_backend(policy=wide, learning_rate=1e-3, **own, **mode) for own in ({}, EIGHT)]
    start = weights_of(backends[0])
    for step in range(20):
        for backend in backends:
            backend.learn(make_samples(step % 4))
    plain, eight = (
        torch.cat([(weights_of(backend)[name] - start[name]).flatten() for name in start]) for backend in backends
    )
    assert torch.cosine_similarity(plain, eight, dim=0) > 0.97
    assert 0.97 < eight.norm() / plain.norm() < 1.03
    sizes = [state_bytes(backend.learner.optimizer) for backend in backends]
    numbers = [weight.numel() for weight in start.values()]
    record_property("bytes a number", [size / sum(numbers) for size in sizes])
    assert sizes[0] == pytest.approx(8 * sum(numbers), rel=0.01)
    # small tensors keep 32 bits
    expected = sum(bits.MOMENT_BYTES["adamw8bit" if one >= 4096 else "adamw"] * one for one in numbers)
    assert sizes[1] == pytest.approx(expected, rel=0.05)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Memory of an optimiser's moments; a table of what 8 bits stand for is there once."""
    tensors = {
        value.data_ptr(): value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(tensors.values())


def test_the_probe_of_the_learning_rate_leaves_no_trace_in_8_bit_moments(make_backend: MakeBackend, wide: str) -> None:
    probed = make_backend(policy=wide, learning_rate="auto", **EIGHT)
    probed.learn(make_samples(0))
    assert probed.learner.probe is not None
    plain = make_backend(policy=wide, learning_rate=probed.learner.probe.rate, **EIGHT)
    plain.learn(make_samples(0))
    expected, found = weights_of(plain), weights_of(probed)
    assert all(np.array_equal(expected[name].cpu(), found[name].cpu()) for name in expected)


def test_a_checkpoint_of_another_optimizer_is_named(make_backend: MakeBackend, wide: str, tmp_path: Path) -> None:
    plain = make_backend(policy=wide)
    plain.learn(make_samples(0))
    plain.save(tmp_path / "checkpoint")
    other = make_backend(policy=wide, **EIGHT)
    before = weights_of(other)
    with pytest.raises(BackendError, match=r"with learner\.optimizer = 'adamw', and the recipe says 'adamw8bit'"):
        other.load(tmp_path / "checkpoint")
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(other).items())


def test_a_bitsandbytes_that_is_missing_or_untried_is_named_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.raises(BackendError, match=r"needs bitsandbytes, which is not installed; pip install 'bitsandbytes>"):
        bits.installed_bits("it", none)
    with pytest.raises(BackendError, match=r"was made for bitsandbytes >=0\.50,<0\.51 and 0\.40\.0 is installed"):
        bits.installed_bits("it", lambda name: "0.40.0")
    recipe = lightningrl.Recipe.model_validate(
        {
            "agent": "agent.py:answer",
            "tasks": {"train": "agent.py:tasks"},
            "policy": {"model": "nowhere"},
            "rewards": {"right": {"use": "exact_match"}},
            "learner": EIGHT,
        }
    )
    check_recipe(recipe)
    monkeypatch.setattr(bits, "OLDEST", (9, 0))
    with pytest.raises(BackendError, match=r"learner\.optimizer = 'adamw8bit' was made for bitsandbytes"):
        check_recipe(recipe)
    with pytest.raises(BackendError, match=r"learner\.optimizer = 'adamw8bit' was made for bitsandbytes"):
        TorchBackend(policy="nowhere", optimizer="adamw8bit")
