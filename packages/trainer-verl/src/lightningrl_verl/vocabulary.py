"""The trainer's distribution is the one sampled from: over the tokenizer's tokens, not the model's padded vocabulary.

Embeddings are often padded (Qwen2.5: 151 936 rows, 151 665 tokens). verl's vLLM replicas never sample an id that the
tokenizer lacks (workers/rollout/vllm_rollout/utils.py `monkey_patch_compute_logits`), but its FSDP engines count the
padding's probability: each rollout logprob is too high by −log(1 − padding's mass), 2e-4 where the padding was never
trained down.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["leave_out_padding"]


def leave_out_padding() -> None:
    """Make verl's FSDP engines compute logprobs and entropies over the tokenizer's tokens. Safe to call twice."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    original = FSDPEngineWithLMHead.prepare_model_outputs
    if not hasattr(original, "__wrapped__"):
        FSDPEngineWithLMHead.prepare_model_outputs = _over_known_tokens(original)


def _over_known_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def prepare_model_outputs(self: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        logits, tokens = getattr(output, "logits", None), len(self.model_config.tokenizer)
        # finite, not -inf: verl's entropy multiplies probabilities by logits, and 0 · -inf is NaN
        if logits is not None and tokens < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= tokens
            output.logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2)
        return original(self, output, *arguments, **options)

    return prepare_model_outputs
