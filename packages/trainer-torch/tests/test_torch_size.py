"""What a policy's size decides where the recipe does not, and what it says of its speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightningrl.errors import BackendError
from lightningrl_torch import memory
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.learner_settings import LoraSettings
from lightningrl_torch.rates import explain_rate
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_sample

MakeBackend = Callable[..., TorchBackend]
CPU = torch.device("cpu")


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of some thousand parameters stands for one of half a billion."""
    monkeypatch.setattr(memory, "ADAPTED", 1_000)
    monkeypatch.setattr(memory, "LARGE", 1_000)


@pytest.fixture
def whole(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by transformers, as all large ones are."""
    monkeypatch.setattr("lightningrl_torch.light.MOST_BYTES", 0)


@pytest.mark.usefixtures("all_are_large", "whole")
def test_a_large_policy_on_a_cpu_learns_by_adapters_unless_the_recipe_says(
    make_backend: MakeBackend, policy: str, tmp_path: Path
) -> None:
    by_size, all_weights = (
        TorchBackend(policy=policy, device="cpu"),
        TorchBackend(policy=policy, device="cpu", lora=False),
    )
    assert all("lora_" in name for name in by_size.learner.parameters)
    assert not any("lora_" in name for name in all_weights.learner.parameters)
    assert (by_size.settings.learning_rate, all_weights.settings.learning_rate) == (3e-3, 1e-3)
    said = make_backend(device="cpu", learning_rate=0.5)
    assert (said.settings.adapters is not None, said.settings.learning_rate) == (True, 0.5)
    all_weights.save(tmp_path / "saved")
    with pytest.raises(BackendError, match=r"does not fit .*learner\.lora = false: all weights were trained"):
        by_size.load(tmp_path / "saved")
    for backend in (by_size, all_weights):
        backend.close()


@pytest.mark.usefixtures("whole")
def test_a_small_policy_learns_with_all_weights(make_backend: MakeBackend) -> None:
    backend = make_backend()
    assert not any("lora_" in name for name in backend.learner.parameters)
    assert backend.measure() is None


def test_a_learning_rate_that_nobody_sets_is_that_of_what_learns_and_of_the_size() -> None:
    spelled: list[dict[str, Any]] = [{"lora": True}, {"lora": {"rank": 4}}]
    whole: list[dict[str, Any]] = [{}, {"lora": False}, {"lora": {"rank": 0}}]

    def rates(parameters: int, *, of: list[dict[str, Any]]) -> set[Any]:
        return {memory.choose_rate(Settings(policy="p", **lora), parameters).learning_rate for lora in of}

    assert [rates(size, of=whole) for size in (800_000, 134_515_008, 494_032_768, 7_600_000_000)] == [
        {1e-3},
        {2e-6},
        {2e-6},
        {1e-6},
    ]
    assert [rates(size, of=spelled) for size in (134_515_008, 494_032_768, 7_600_000_000)] == [{3e-4}, {1e-4}, {2e-5}]
    by_size = memory.choose_adapters(Settings(policy="p"), CPU, lambda: 500_000_000)
    assert memory.choose_rate(by_size, 500_000_000).learning_rate == 1e-4
    said = Settings(policy="p", learning_rate=1e-5, **spelled[0])
    assert memory.choose_rate(said, 800_000) is said, "what is said is so"
    assert explain_rate(134_515_008, adapters=False) == "135 M parameters, all weights: 2e-6"


def test_a_learning_rate_that_nobody_sets_is_less_where_a_step_has_few_rollouts() -> None:
    def rate(rollouts: int | None) -> Any:
        return memory.choose_rate(Settings(policy="p", rollouts_per_step=rollouts), 134_515_008).learning_rate

    assert [rate(rollouts) for rollouts in (None, 1024, 32, 8)] == [2e-6, 2e-6, 2e-6, 1e-6]
    shown = explain_rate(134_515_008, adapters=False, rollouts=8)
    assert shown == "135 M parameters, all weights, 8 rollouts a step: 1e-6"
    assert memory.choose_rate(Settings(policy="p", learning_rate=3e-6, rollouts_per_step=8), 1).learning_rate == 3e-6


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ({}, "all learn, lr 1e-3 (27.2 k parameters, all weights: 1e-3)"),
        ({"lora": True}, "LoRA 16 (60 %) learns, lr 3e-3 (27.2 k parameters, adapters: 3e-3)"),
        ({"learning_rate": 2.5e-4}, "all learn, lr 2.5e-4"),
        ({"learning_rate": "auto"}, "all learn, lr auto (before the probe: 27.2 k parameters, all weights: 1e-3)"),
    ],
)
def test_a_backend_says_what_learns(policy: str, settings: dict[str, Any], learns: str) -> None:
    backend = TorchBackend(policy=policy, device="cpu", threads=2, **settings)
    assert backend.describe() == f"27,168 parameters, {learns}, float32, 2 threads"
    backend.close()


def test_adapters_by_size_are_the_cpu_s_alone() -> None:
    open_one, said = Settings(policy="p"), Settings(policy="p", lora=LoraSettings(rank=4))
    assert memory.choose_adapters(open_one, CPU, lambda: 500_000_000).adapters is not None
    assert memory.choose_adapters(open_one, CPU, lambda: 100_000_000).adapters is None
    assert memory.choose_adapters(open_one, torch.device("cuda"), lambda: 500_000_000).adapters is None
    assert memory.choose_adapters(said, CPU, lambda: 500_000_000) is said
    spelled: dict[str, Any] = {"lora": True}
    assert Settings(policy="p", **spelled).adapters is not None


def test_a_large_policy_decodes_on_all_threads_or_half_beside_its_learner() -> None:
    assert memory.engine_threads(Settings(policy="p", threads=8), 500_000_000) == 8
    assert memory.engine_threads(Settings(policy="p", threads=8, max_staleness=1), 500_000_000) == 4
    assert memory.engine_threads(Settings(policy="p", threads=8, engine_threads=3), 500_000_000) == 3
    assert memory.engine_threads(Settings(policy="p", threads=8), 1_000_000) == 1


def test_the_tokens_of_a_microbatch_keep_memory_bounded() -> None:
    def tokens(hidden: int, inner: int, layers: int) -> int:
        shape = Qwen2Config(
            vocab_size=8, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=14
        )
        with torch.device("meta"):
            return memory.tokens_at_once(Qwen2ForCausalLM(shape))

    assert tokens(56, 128, 2) == 4096
    assert 500 < tokens(896, 4864, 24) < 1000


@pytest.mark.usefixtures("all_are_large", "whole")
@pytest.mark.parametrize("lora", [True, False])
def test_measuring_says_how_fast_the_policy_is_and_leaves_no_trace(make_backend: MakeBackend, *, lora: bool) -> None:
    measured, other = make_backend(lora=lora), make_backend(lora=lora)
    speed = measured.measure()
    assert speed is not None
    assert min(speed.read, speed.sampled, speed.learned) > 0
    assert (speed.trained < speed.parameters) == lora
    samples = [make_sample([1, 2, 3], [4, 5], 1.0), make_sample([1, 2, 3], [6], -1.0)]
    for backend in (measured, other):
        backend.learn(samples)
    assert measured.engine.random_state() == other.engine.random_state()
    for name, parameter in measured.learner.parameters.items():
        assert torch.equal(parameter, other.learner.parameters[name])
