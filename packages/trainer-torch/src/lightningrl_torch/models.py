"""Traits of a transformers model: its kind of attention, and how its forward may be called."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightningrl.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelTraits", "check_rotation", "longest_row", "read_traits"]

_ATTENTION = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTraits:
    """Ways in which a model may be called."""

    layers: int
    vocabulary: int
    explicit_masks: bool
    """Every layer attends to all earlier tokens and takes our own 4-D mask; else masks are left to transformers."""
    positions: bool
    """`forward` takes `position_ids`, and counts by them."""
    attention: str
    """transformers' name of the attention implementation."""

    def format_mask(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """A boolean (rows, queries, keys) mask as the model's attention takes it."""
        mask = allowed[:, None]
        if self.attention == "sdpa":
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def read_traits(model: PreTrainedModel, policy: str) -> ModelTraits:
    """Look at the model; raises BackendError for layers that keep anything but keys and values."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _ATTENTION:
        raise BackendError(
            f"policy {policy!r} has {min(kinds - _ATTENTION)!r} layers, which the torch engine cannot batch; "
            "choose a model with full or sliding-window attention"
        )
    sliding = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    has_slopes = bool(getattr(config, "alibi", False))  # Falcon's, which are made of a mask of each row
    positions = not has_slopes and "position_ids" in inspect.signature(model.forward).parameters
    attention = str(config._attn_implementation)
    embeddings: Any = model.get_input_embeddings()
    return ModelTraits(
        layers=int(config.num_hidden_layers),
        vocabulary=int(embeddings.weight.shape[0]),
        explicit_masks=positions and not sliding and attention in ("sdpa", "eager"),
        positions=positions,
        attention=attention,
    )


def longest_row(config: Any) -> int | None:
    """Most tokens for which a row's rotary angles do not depend on its length, nor on that of rows beside it (LongRoPE,
    dynamic NTK: beyond, transformers turns all rows as the longest wants it); None = any number."""
    config = config.get_text_config(decoder=True)
    rotation = getattr(config, "rope_parameters", None) or {}
    borders = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        for kind in (rotation, *(kind for kind in rotation.values() if isinstance(kind, dict)))
        if "dynamic" in str(kind.get("rope_type"))
        or (kind.get("rope_type") == "longrope" and kind.get("long_factor") != kind.get("short_factor"))
    ]
    return min(borders, default=None)


def check_rotation(config: Any, policy: str, context_length: int) -> None:
    """Raise ConfigError for a context in which a token's logprob would depend on the rows beside its own."""
    longest = longest_row(config)
    if longest is not None and context_length > longest:
        raise ConfigError(
            f"context_length is {context_length}, but policy {policy!r} turns its positions otherwise as soon as a row "
            f"is longer than {longest} tokens, so that logprobs would depend on other rows; set context_length to "
            f"{longest} or less"
        )
