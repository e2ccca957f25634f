"""transformers' forward passes on our key/value memory: the reference, and the way of every model that nothing quicker
knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from lightningrl_torch.models import ModelTraits
from lightningrl_torch.slots import KeyValues, SlotCache, SlotLayer

__all__ = ["PlainForward"]


class _CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of slots as transformers sees it."""

    is_sliding = False

    def __init__(self, slots: SlotCache, layer: SlotLayer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._slots.width

    def get_max_length(self) -> int:
        return -1


class PlainForward:
    """Implements `Forward` for any causal language model of transformers that keeps keys and values alone."""

    packs = False
    shares = False

    def __init__(self, model: PreTrainedModel, traits: ModelTraits, *, autocast: bool) -> None:
        self.layers = traits.layers
        self.vocabulary = traits.vocabulary
        self.device: torch.device = model.device
        self._model = model
        self._traits = traits
        self._autocast = autocast

    def refresh(self) -> None:
        """Nothing is kept of the weights."""

    def rest(self) -> None:
        """Nothing is kept."""

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        arguments: dict[str, Tensor] = {}
        if self._traits.positions:
            arguments["position_ids"] = positions[:, None]
        if allowed is not None:
            explicit = self._traits.explicit_masks
            arguments["attention_mask"] = (
                self._traits.format_mask(allowed[:, None], cache.dtype) if explicit else allowed
            )
        seen = Cache(layers=[_CacheLayer(cache, layer) for layer in cache.layers])
        with self._computing():
            logits: Tensor = self._model(
                input_ids=token_ids[:, None], past_key_values=seen, use_cache=True, **arguments
            ).logits
        return logits[:, -1]

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        if any(before):
            raise NotImplementedError("a prompt is computed from its beginning; see `packs`")
        widest = max(map(len, sequences))
        # padded on the right: causal attention never looks there, so no mask is needed
        padded = [[*sequence, *[0] * (widest - len(sequence))] for sequence in sequences]
        cache = DynamicCache()
        with self._computing():
            self._model(
                input_ids=torch.tensor(padded, device=self._model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        layers: Any = cache.layers
        states = [states for layer in layers for states in (layer.keys, layer.values)]
        return [[one[row : row + 1, :, : len(sequence)] for one in states] for row, sequence in enumerate(sequences)]

    def _computing(self) -> torch.autocast:
        return torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=self._autocast)
