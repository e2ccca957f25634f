"""A policy's plan of memory is what its engine and learner then have, and it is made before any weight is read."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.learner_settings import LoraSettings
from lightningrl_torch.llama import find_forward
from lightningrl_torch.memory import plan_memory
from lightningrl_torch.quantized import weight_bytes
from lightningrl_torch.settings import Settings
from lightningrl_torch.slots import SlotCache
from lightningrl_torch.testing import make_model, make_sample

MakeBackend = Callable[..., TorchBackend]


def count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("lora", [False, {"rank": 4}, {"rank": 4, "target_modules": ["q_proj", "lm_head"]}])
def test_a_plan_has_the_parameters_gradient_and_moments_that_a_policy_has(
    make_backend: MakeBackend, policy: str, lora: Any
) -> None:
    plan = plan_memory(Settings(policy=policy, lora=lora))
    assert plan is not None
    backend = make_backend(lora=lora)
    backend.learn([make_sample((1, 2, 3), (40, 41))])
    learner = backend.learner
    assert plan.trained == count(learner.parameters.values())
    moments = [state[name] for state in learner.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert (plan.optimizer, plan.gradient) == (4 * count(moments), 4 * plan.trained)
    if not (isinstance(lora, dict) and "target_modules" in lora):  # an adapted head is untied
        assert plan.weights == 4 * count(learner.model.parameters())


def test_a_plan_has_the_keys_and_values_that_running_calls_take(make_backend: MakeBackend, policy: str) -> None:
    plan = plan_memory(Settings(policy=policy))
    assert plan is not None
    config: Any = make_backend().learner.model.config
    head = config.hidden_size // config.num_attention_heads
    cache = SlotCache(config.num_hidden_layers)
    prompt = [torch.zeros(2 * config.num_hidden_layers, config.num_key_value_heads, 300, head)]
    cache.join([prompt] * 20)
    cache.make_room()
    buffers = [buffer for layer in cache.layers for buffer in layer.buffers]
    assert plan.caches(20, 300, prompts=0) == pytest.approx(
        4 * count(buffers) + 20 * 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * 300 * head, rel=0.1
    )


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that was made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self.nbytes = max(self.nbytes, *(one.nbytes for one in tree_leaves(made) if isinstance(one, torch.Tensor)), 0)
        return made


def largest_made(act: Callable[[], object]) -> int:
    largest = Largest()  # type: ignore[no-untyped-call]
    with largest:
        act()
    return largest.nbytes


def test_prompts_that_join_are_copied_a_layer_at_a_time() -> None:
    """All layers of all prompts stood in memory once more: over half a gigabyte for 80 calls of SmolLM2."""
    cache = SlotCache(30)
    prompts = [[torch.ones(60, 3, width, 64)] for width in (50, 100, 150, 200)]
    largest = largest_made(lambda: cache.join(prompts))
    assert largest <= cache.layers[0].buffers[0].nbytes


def test_what_prompts_go_on_from_is_joined_a_layer_at_a_time() -> None:
    """All layers of all prompts stood in memory once more: a third of a gigabyte for the second turn of 80 rollouts."""
    forward = find_forward(make_model(num_hidden_layers=6), autocast=False)
    assert forward is not None
    before = forward.prefill([[1 + number, *[2] * 200] for number in range(12)], [[]] * 12)
    largest = largest_made(lambda: forward.prefill([[3]] * 12, before))
    assert largest < 3 * before[0][0].nbytes


def test_settings_that_take_more_are_in_the_plan_and_a_model_that_is_not_here_has_none(policy: str) -> None:
    plain, *more = (
        plan_memory(Settings(policy=policy, **settings))
        for settings in ({}, {"max_staleness": 1}, {"kl_coef": 0.1}, {"epochs": 2}, {"dtype": "bfloat16"})
    )
    assert plain is not None and plain.copies == 0
    copies = [plan.copies / plain.parameters for plan in more if plan is not None]
    assert copies == [4, 4, 12, 2]
    fewer = plan_memory(Settings(policy=policy, max_tokens_per_microbatch=16))
    assert fewer is not None and fewer.activations() == 16 * plain.token < plain.activations()
    bits = plan_memory(Settings(policy=policy, optimizer="adamw8bit"))
    assert bits is not None and bits.optimizer < plain.optimizer / 3.9
    again = plan_memory(Settings(policy=policy, gradient_checkpointing=True))
    assert again is not None and again.token < plain.token
    assert plan_memory(Settings(policy="nobody/has-this")) is None


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_weights_of_few_bits_are_planned_as_they_are_kept(
    quantize: str, make_backend: MakeBackend, policy: str
) -> None:
    pytest.importorskip("bitsandbytes")
    settings: Any = {"lora": {"rank": 4}, "quantize": quantize}
    plan = plan_memory(Settings(policy=policy, **settings))
    assert plan is not None
    assert plan.weights == pytest.approx(weight_bytes(make_backend(**settings).learner.model), rel=0.02)


def test_matrices_that_are_packed_for_decoding_are_in_the_plan(tmp_path: Path) -> None:
    model: Any = make_model(vocab_size=3000, hidden_size=128, intermediate_size=1500, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    plan = plan_memory(Settings(policy=str(tmp_path)))
    assert plan is not None
    forward = find_forward(model, autocast=False)
    assert forward is not None
    forward._pack()
    assert plan.packed == sum(one.nbytes for part in forward._projections for one in part.packed) > 0


def test_adapters_on_the_same_frozen_weights_are_planned_as_sharing_them(policy: str) -> None:
    adapters = (LoraSettings(rank=2), LoraSettings(rank=4), None)
    few, many, whole = (plan_memory(Settings(policy=policy, lora=lora)) for lora in adapters)
    assert few is not None and many is not None and whole is not None
    assert few.base == many.base is not None and few.shared == many.shared == whole.weights
    assert (whole.base, whole.shared) == (None, 0)


def test_a_folder_whose_weights_are_torn_has_no_plan(tmp_path: Path, policy: str) -> None:
    for path in Path(policy).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: 7 if path.suffix == ".safetensors" else None])
    assert plan_memory(Settings(policy=str(tmp_path))) is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory in use is read in /proc")
def test_running_calls_that_outgrow_their_memory_give_it_back() -> None:
    """Each size stood beside the next, in pieces that nothing fitted into."""

    def used() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    cache = SlotCache(30)
    before = used()
    for width in (200, 300, 400, 500):
        cache.join([[torch.ones(60, 3, width, 64)]] * 16)
    kept = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)
    assert used() - before < 1.2 * kept
