"""Prefill: prompts to keys and values, each distinct prompt once for as long as the weights stay the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lightningrl_torch._slots import KeyValues

__all__ = ["Prefiller"]


class Prefiller:
    """Computes and remembers keys and values of prompts; rollouts of one group then pay for their prompt once."""

    def __init__(self, model: PreTrainedModel, *, device: torch.device, batch_tokens: int, cache_tokens: int) -> None:
        self._model = model
        self._device = device
        self._batch_tokens = batch_tokens
        self._cache_tokens = cache_tokens
        self._cached: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()
        self._tokens = 0

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._cached.clear()
        self._tokens = 0

    def prefill(self, prefixes: Sequence[tuple[int, ...]]) -> list[KeyValues]:
        """Keys and values of each prefix, in order; an empty prefix has none."""
        found: dict[tuple[int, ...], KeyValues] = {(): []}
        missing = []
        for prefix in dict.fromkeys(prefixes):
            if prefix in self._cached:
                self._cached.move_to_end(prefix)
                found[prefix] = self._cached[prefix]
            elif prefix:
                missing.append(prefix)
        for batch in self._plan(missing):
            found.update(zip(batch, self._compute(batch), strict=True))
        for prefix in missing:
            self._remember(prefix, found[prefix])
        return [found[prefix] for prefix in prefixes]

    def _plan(self, prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Batches of similar length: at most `batch_tokens` with padding, at most a fifth of it padding."""
        batches: list[list[tuple[int, ...]]] = []
        for prefix in sorted(prefixes, key=len, reverse=True):
            widest = len(batches[-1][0]) if batches else 0
            if batches and (len(batches[-1]) + 1) * widest <= self._batch_tokens and len(prefix) >= 0.8 * widest:
                batches[-1].append(prefix)
            else:
                batches.append([prefix])
        return batches

    def _compute(self, batch: list[tuple[int, ...]]) -> list[KeyValues]:
        widest = len(batch[0])
        # padded on the right: causal attention never looks there, so no mask is needed
        ids = torch.tensor([prefix + (0,) * (widest - len(prefix)) for prefix in batch], device=self._device)
        cache = DynamicCache()
        self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers: Any = cache.layers
        return [
            [(layer.keys[row, :, : len(prefix)], layer.values[row, :, : len(prefix)]) for layer in layers]
            for row, prefix in enumerate(batch)
        ]

    def _remember(self, prefix: tuple[int, ...], kv: KeyValues) -> None:
        if len(prefix) > self._cache_tokens:
            return
        self._cached[prefix] = [(keys.clone(), values.clone()) for keys, values in kv]
        self._tokens += len(prefix)
        while self._tokens > self._cache_tokens:
            oldest, _ = self._cached.popitem(last=False)
            self._tokens -= len(oldest)
