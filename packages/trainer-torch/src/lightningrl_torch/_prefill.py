"""Prefill: prompts to keys and values, each token that prompts have in common once for as long as the weights stay the
same."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from lightningrl_torch._forward import Forward
from lightningrl_torch._slots import KeyValues

__all__ = ["Prefiller"]

LEAST_SHARED: Final = 16
"""Tokens that two prompts must have in common at their beginnings to be worth a look."""


class Prefiller:
    """Computes and remembers keys and values of prompts: the rollouts of a group pay for their prompt once, and a later
    prompt that begins as a remembered one does pays for what is new in it."""

    def __init__(self, forward: Forward, *, batch_tokens: int, cache_tokens: int) -> None:
        self._forward = forward
        self._batch_tokens = batch_tokens
        self._cache_tokens = cache_tokens
        self._cached: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()
        self._ordered: list[tuple[int, ...]] = []
        """Cached prefixes, sorted so that those that begin alike are neighbours."""
        self._tokens = 0

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._cached.clear()
        self._ordered.clear()
        self._tokens = 0

    def prefill(self, prefixes: Sequence[tuple[int, ...]]) -> list[KeyValues]:
        """Keys and values of each prefix, in order; an empty prefix has none."""
        computed: dict[tuple[int, ...], KeyValues] = {(): []}
        missing = []
        for prefix in dict.fromkeys(prefixes):
            if prefix in self._cached:
                self._cached.move_to_end(prefix)
                computed[prefix] = self._cached[prefix]
            elif prefix:
                missing.append(prefix)
        for batch in self._plan(missing):
            before = [self._beginning(prefix) if self._forward.packs else [] for prefix in batch]
            new = [prefix[_tokens_of(past) :] for prefix, past in zip(batch, before, strict=True)]
            for prefix, kv in zip(batch, self._forward.prefill(new, before), strict=True):
                computed[prefix] = kv
                self._remember(prefix, kv)
        return [computed[prefix] for prefix in prefixes]

    def _plan(self, prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """Batches of at most `batch_tokens`; where shorter ones are padded, of similar length: at most a fifth of a
        batch is padding."""
        least = 0.0 if self._forward.packs else 0.8
        batches: list[list[tuple[int, ...]]] = []
        for prefix in sorted(prefixes, key=len, reverse=True):
            widest = len(batches[-1][0]) if batches else 0
            if batches and (len(batches[-1]) + 1) * widest <= self._batch_tokens and len(prefix) >= least * widest:
                batches[-1].append(prefix)
            else:
                batches.append([prefix])
        return batches

    def _beginning(self, prefix: tuple[int, ...]) -> KeyValues:
        """Cached keys and values of the prompt that has most in common with this one; its last token, at least, is
        computed."""
        place = bisect.bisect(self._ordered, prefix)
        near = self._ordered[max(0, place - 1) : place + 1]
        shared, nearest = max(((_common(prefix[:-1], one), one) for one in near), default=(0, ()))
        if shared < LEAST_SHARED:
            return []
        return [(keys[:, :shared], values[:, :shared]) for keys, values in self._cached[nearest]]

    def _remember(self, prefix: tuple[int, ...], kv: KeyValues) -> None:
        if len(prefix) > self._cache_tokens:
            return
        self._cached[prefix] = [(keys.clone(), values.clone()) for keys, values in kv]
        bisect.insort(self._ordered, prefix)
        self._tokens += len(prefix)
        while self._tokens > self._cache_tokens:
            oldest, _ = self._cached.popitem(last=False)
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]
            self._tokens -= len(oldest)


def _tokens_of(kv: KeyValues) -> int:
    return kv[0][0].shape[1] if kv else 0


def _common(left_ids: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    for place, (left, right) in enumerate(zip(left_ids, other, strict=False)):
        if left != right:
            return place
    return min(len(left_ids), len(other))
