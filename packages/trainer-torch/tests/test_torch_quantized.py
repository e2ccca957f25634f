"""Frozen weights of few bits: engine and learner agree, adapters learn on them, resume and leave as the policy was."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightningrl.backends import Continuation, GenerateRequest
from lightningrl.errors import BackendError, ConfigError
from lightningrl.types import Sample, SamplingSettings
from lightningrl_torch import bits
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.llama import find_forward
from lightningrl_torch.quantized import QuantizedLinear, count_parameters, weight_bytes
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_sample, plain_logits, save_policy

MakeBackend = Callable[..., TorchBackend]
QLORA: dict[str, Any] = {"lora": {"rank": 8}, "quantize": "nf4"}
KINDS = pytest.mark.parametrize("kind", ["nf4", "int8"])
PROMPT = (1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=192)


def make_samples(step: int) -> list[Sample]:
    rng = random.Random(step)
    return [
        make_sample(PROMPT, [rng.randrange(256) for _ in range(5)], rng.gauss(0, 1), rollout=str(number))
        for number in range(6)
    ]


async def sample(backend: TorchBackend, seed: int, tokens: int = 24) -> tuple[list[int], list[float]]:
    request = GenerateRequest(
        id=str(seed), prompt_ids=PROMPT, sampling=SamplingSettings(max_tokens=tokens, seed=seed, temperature=1.0)
    )
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    return [one for chunk in chunks for one in chunk.token_ids], [one for chunk in chunks for one in chunk.logprobs]


async def sample_all(backend: TorchBackend, count: int = 6) -> list[tuple[list[int], list[float]]]:
    return list(await asyncio.gather(*(sample(backend, seed) for seed in range(count))))


def gap(backend: TorchBackend) -> float:
    """Largest difference between logprobs of the engine and of the learner."""
    answers = asyncio.run(sample_all(backend))
    read = backend.logprobs([Continuation(context=as_array(PROMPT), tokens=as_array(ids)) for ids, _ in answers])
    pairs = zip(read, (logprobs for _, logprobs in answers), strict=True)
    return max(float(np.abs(theirs - np.array(ours)).max()) for theirs, ours in pairs)


def as_array(ids: Any) -> Any:
    return np.array(ids, np.int32)


@KINDS
@pytest.mark.parametrize("quick", [True, False], ids=["quick", "plain"])
def test_engine_and_learner_agree_on_quantised_weights(
    make_backend: MakeBackend, wide: str, kind: str, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    if not quick:
        monkeypatch.setattr("lightningrl_torch.llama.FAMILIES", frozenset())
    backend = make_backend(policy=wide, **{**QLORA, "quantize": kind})
    assert (find_forward(backend.learner.model, autocast=False) is not None) == quick
    assert gap(backend) < 1e-4
    for step in range(3):
        backend.learn(make_samples(step))
    assert gap(backend) < 1e-4
    assert backend.learn(make_samples(0)).metrics["lr"] > 0


@KINDS
def test_quantised_weights_are_near_the_folder_s_and_few_bytes(make_backend: MakeBackend, wide: str, kind: str) -> None:
    backend, plain = make_backend(policy=wide, **{**QLORA, "quantize": kind}), make_backend(policy=wide, lora=True)
    maps = {name: one for name, one in backend.learner.model.named_modules() if isinstance(one, QuantizedLinear)}
    assert len(maps) == 14, "all linear maps but the output's"
    theirs = dict(plain.learner.model.named_modules())
    for name, one in maps.items():
        weight: Any = theirs[name].weight
        error = (one.weight - weight).norm() / weight.norm()
        assert error < {"nf4": 0.11, "int8": 0.01}[kind]
    numbers = sum(one.in_features * one.out_features for one in maps.values())
    assert 8 * sum(one.memory for one in maps.values()) / numbers == pytest.approx(
        {"nf4": 4.13, "int8": 8.5}[kind], rel=0.02
    )
    assert not any(one.requires_grad for one in backend.learner.model.parameters() if one.dtype is torch.uint8)
    assert all("lora_" in name for name in backend.learner.parameters)
    assert f"float32 on {kind} weights" in backend.describe()
    whole = count_parameters(backend.learner.model) - sum(one.numel() for one in backend.learner.parameters.values())
    assert f"{whole:,} parameters, LoRA 8" in backend.describe()
    assert weight_bytes(backend.learner.model) < weight_bytes(plain.learner.model)


def test_the_gradient_is_that_of_the_same_weights_in_full(make_backend: MakeBackend, wide: str) -> None:
    from lightningrl_torch.quantized import restore_linears

    backend, full = make_backend(policy=wide, **QLORA), make_backend(policy=wide, **QLORA)
    restore_linears(full.learner.model)
    rows = make_samples(1)
    for step in range(2):
        for one in (backend, full):
            one.learner.learn(make_samples(step))
    ours, theirs = backend.learner.gradients(rows), full.learner.gradients(rows)
    assert ours.keys() == theirs.keys() and ours
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-3, atol=1e-5 * float(theirs[name].abs().max()) + 1e-7)


def test_a_quantised_policy_learns_and_resumes_bit_for_bit(
    make_backend: MakeBackend, wide: str, tmp_path: Path
) -> None:
    straight, first, second = (make_backend(policy=wide, optimizer="adamw8bit", **QLORA) for _ in range(3))
    for step in range(4):
        straight.learn(make_samples(step))
    for step in range(2):
        first.learn(make_samples(step))
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for step in range(2, 4):
        second.learn(make_samples(step))
    for name, weight in straight.learner.parameters.items():
        assert torch.equal(weight, second.learner.parameters[name])
    assert asyncio.run(sample_all(straight)) == asyncio.run(sample_all(second))
    other = make_backend(policy=wide, optimizer="adamw8bit", lora={"rank": 8})
    with pytest.raises(BackendError, match=r"learner\.quantize = 'nf4', and the recipe says None"):
        other.load(tmp_path / "checkpoint")


@KINDS
def test_what_is_exported_computes_as_the_policy_did(
    make_backend: MakeBackend, wide: str, tmp_path: Path, kind: str
) -> None:
    backend = make_backend(policy=wide, **{**QLORA, "quantize": kind})
    for step in range(3):
        backend.learn(make_samples(step))
    model = backend.learner.model
    with torch.no_grad():
        before = plain_logits(model, PROMPT)
    backend.export(tmp_path / "merged")
    backend.export(tmp_path / "adapter", adapter=True)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(plain_logits(merged, PROMPT), before, atol=1e-4)
        assert torch.equal(plain_logits(model, PROMPT), before), "the policy goes on as it was"
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_quantised_policy_serves_beside_its_learner(make_backend: MakeBackend, wide: str) -> None:
    backend = make_backend(policy=wide, max_staleness=1, **QLORA)
    backend.learn(make_samples(0))
    assert gap(backend) < 1e-4
    assert backend.engine.info.version == 1


def test_a_quantised_policy_in_bfloat16_with_checkpointing_learns(make_backend: MakeBackend, wide: str) -> None:
    backend = make_backend(policy=wide, dtype="bfloat16", gradient_checkpointing=True, kl_coef=0.1, **QLORA)
    reports = [backend.learn(make_samples(step)) for step in range(2)]
    assert all(np.isfinite(report.metrics["loss"]) for report in reports)
    assert reports[0].metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert reports[1].metrics["kl_reference"] > 0
    assert gap(backend) < 0.2


@pytest.mark.parametrize("own", [{}, {"lora": False}, {"lora": {"rank": 0}}])
def test_few_bits_without_adapters_are_refused(own: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"quantize is 'nf4', and weights of so few bits cannot learn; set learner\.l"
    ):
        Settings(policy="policy", quantize="nf4", **own)


def test_few_bits_are_refused_beside_vllm_by_another_name_and_without_their_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora: dict[str, Any] = {"lora": True}
    with pytest.raises(ConfigError, match="vLLM serves the weights as their folder has them"):
        Settings(policy="policy", quantize="nf4", engine="vllm", **lora)
    with pytest.raises(ConfigError, match="quantize is 'int3'; choose 'nf4' or 'int8'"):
        Settings(policy="policy", quantize="int3", **lora)  # type: ignore[arg-type]

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bits.installed_bits, "__defaults__", (none,))
    with pytest.raises(BackendError, match=r"learner\.quantize = 'nf4' needs bitsandbytes, which is not installed"):
        TorchBackend(policy="nowhere", **QLORA)
