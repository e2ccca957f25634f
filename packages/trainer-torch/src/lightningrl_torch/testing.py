"""For tests: a tiny random policy with its own tokenizer, and samples made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lightningrl.types import Sample

__all__ = ["make_config", "make_model", "make_sample", "make_tokenizer", "plain_logits", "save_policy"]

CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"


END = "<|end|>"


def make_tokenizer(context_length: int = 128) -> PreTrainedTokenizerFast:
    """One token for each byte, and <|end|>."""
    pieces = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=context_length,
        chat_template=CHAT_TEMPLATE,
    )


def make_config(**overrides: Any) -> Qwen2Config:
    values: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    return Qwen2Config(**{**values, **overrides})


def make_model(**overrides: Any) -> Qwen2ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Qwen2ForCausalLM(make_config(**overrides))
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def save_policy(folder: Path, **overrides: Any) -> str:
    """Write a tiny policy as an ordinary transformers folder and return its name."""
    make_model(**overrides).save_pretrained(folder)
    make_tokenizer(overrides.get("max_position_embeddings", 128)).save_pretrained(folder)
    return str(folder)


def make_sample(
    prompt: Sequence[int],
    completion: Sequence[int],
    advantage: float = 1.0,
    *,
    rollout: str = "r",
    weight: float = 1.0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    version: int = 0,
) -> Sample:
    """One call as one row."""
    mask = np.array([False] * len(prompt) + [True] * len(completion))
    old = np.zeros(len(mask), np.float32)
    old[mask] = -3.0 if logprobs is None else logprobs
    return Sample(
        rollout_id=rollout,
        policy="policy",
        token_ids=np.array([*prompt, *completion], np.int32),
        mask=mask,
        logprobs=old,
        advantages=np.where(mask, np.float32(advantage), np.float32(0.0)),
        weights=np.where(mask, np.float32(weight), np.float32(0.0)),
        versions=np.where(mask, version, -1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, np.float32(temperature), np.float32(1.0)),
    )


def plain_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits (tokens, vocabulary) of one row by transformers' own forward, on the CPU wherever the model is."""
    logits: torch.Tensor = model(torch.tensor([[*token_ids]], device=model.device)).logits[0]
    return logits.cpu()
