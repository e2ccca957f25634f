"""Families whose rotary angles depend on the longest row (LongRoPE, dynamic NTK): a context in which one rollout's
logprobs would depend on another's is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import save_family
from transformers import AutoConfig, FalconConfig, FalconForCausalLM, LlamaConfig, Phi3Config

from lightningrl.backends import GenerateRequest
from lightningrl.errors import ConfigError
from lightningrl.types import SamplingSettings
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.models import longest_row
from lightningrl_torch.policy import LoadedPolicy
from lightningrl_torch.settings import EngineSettings, Settings

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0, *[3.0] * 7]}
SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (Phi3Config(**SMALL, original_max_position_embeddings=48, rope_parameters=dict(LONG)), 48),
        (LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), 512),
        (LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), None),
        (LlamaConfig(**SMALL), None),
    ],
)
def test_the_border_is_read_from_the_configuration(config: Any, longest: int | None) -> None:
    assert longest_row(config) == longest


def test_a_border_of_one_kind_of_layers_counts() -> None:
    local = {"rope_type": "default", "rope_theta": 1e4}
    config = LlamaConfig(**SMALL)
    config.rope_parameters = {
        "sliding_attention": local,
        "full_attention": {**LONG, "original_max_position_embeddings": 64},
    }
    assert longest_row(config) == 64


async def test_a_model_that_counts_by_slopes_answers_rows_of_all_lengths_at_once() -> None:
    config = FalconConfig(**SMALL, alibi=True, num_hidden_layers=2, vocab_size=64, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model: Any = FalconForCausalLM(config)
    model.eval()
    engine = TorchEngine(model, policy="p", context_length=128, settings=EngineSettings(threads=1))
    prompts = [tuple(range(3, 3 + length)) for length in (5, 17, 40)]

    async def ask(prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        ids, logprobs = list[int](), list[float]()
        sampling = SamplingSettings(max_tokens=4, seed=1)
        async for chunk in engine.generate(GenerateRequest(id=str(prompt), prompt_ids=prompt, sampling=sampling)):
            ids, logprobs = [*ids, *chunk.token_ids], [*logprobs, *chunk.logprobs]
        return ids, logprobs

    answers = await asyncio.gather(*map(ask, prompts))
    engine.close()
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        alone = [float(logits[len(prompt) - 1 + place, token]) for place, token in enumerate(ids)]
        assert logprobs == pytest.approx(alone, abs=1e-4)


def test_a_context_beyond_the_border_is_refused_and_by_default_ends_there(tmp_path: Path) -> None:
    model = save_family("phi3", tmp_path)  # 256 of 512 tokens
    with pytest.raises(ConfigError, match=r"longer than 256 tokens, .* set context_length to 256 or less"):
        TorchEngine(model, policy="p", context_length=257)
    with pytest.raises(ConfigError, match="set context_length to 256 or less"):
        LoadedPolicy(Settings(policy=str(tmp_path), context_length=300)).whole  # noqa: B018
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 512
    assert LoadedPolicy(Settings(policy=str(tmp_path))).context_length == 256
