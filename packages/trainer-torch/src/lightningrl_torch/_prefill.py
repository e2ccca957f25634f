"""Prefill: prompts to keys and values, each token that prompts have in common once for as long as the weights stay the
same."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from lightningrl_torch._forward import Forward
from lightningrl_torch._slots import KeyValues

__all__ = ["Prefiller", "common_length"]

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
        for wave in self._waves(missing):
            beginnings = {prefix: self._beginning(prefix) if self._forward.packs else [] for prefix in wave}
            for batch in self._plan(beginnings):
                before = [beginnings[prefix] for prefix in batch]
                new = [prefix[_tokens_of(past) :] for prefix, past in zip(batch, before, strict=True)]
                for prefix, kv in zip(batch, self._forward.prefill(new, before), strict=True):
                    computed[prefix] = kv
                    self._remember(prefix, kv)
        return [computed[prefix] for prefix in prefixes]

    def _waves(self, prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """The prefixes as one, or those first that others begin as, where that saves a quarter of the tokens: what
        they have in common is then remembered."""
        if not self._forward.packs or len(prefixes) < 2:
            return [prefixes] if prefixes else []
        first: list[tuple[int, ...]] = []
        then: list[tuple[int, ...]] = []
        saved = total = 0
        for prefix in sorted(prefixes):
            beginnings = _tokens_of(self._beginning(prefix))
            more = (common_length(prefix[:-1], first[-1]) if first else 0) - beginnings
            total += len(prefix) - beginnings
            if more >= LEAST_SHARED and len(first[-1]) <= self._cache_tokens:
                then.append(prefix)
                saved += more
            else:
                first.append(prefix)
        return [first, then] if then and 4 * saved >= total else [prefixes]

    def _plan(self, beginnings: Mapping[tuple[int, ...], KeyValues]) -> list[list[tuple[int, ...]]]:
        """Batches of at most `batch_tokens` that are new; where shorter ones are padded, of similar length: at most a
        fifth of a batch is padding."""
        new = {prefix: len(prefix) - _tokens_of(past) for prefix, past in beginnings.items()}
        batches: list[list[tuple[int, ...]]] = []
        tokens = 0
        for prefix in sorted(new, key=new.__getitem__, reverse=True):
            if self._forward.packs:
                is_alike, tokens = True, tokens + new[prefix]
            else:
                widest = new[batches[-1][0]] if batches else 0
                is_alike, tokens = new[prefix] >= 0.8 * widest, (len(batches[-1]) + 1) * widest if batches else 0
            if batches and is_alike and tokens <= self._batch_tokens:
                batches[-1].append(prefix)
            else:
                batches.append([prefix])
                tokens = new[prefix]
        return batches

    def _beginning(self, prefix: tuple[int, ...]) -> KeyValues:
        """Cached keys and values of the prompt that has most in common with this one; its last token, at least, is
        computed."""
        place = bisect.bisect(self._ordered, prefix)
        near = self._ordered[max(0, place - 1) : place + 1]
        shared, nearest = max(((common_length(prefix[:-1], one), one) for one in near), default=(0, ()))
        if shared < LEAST_SHARED:
            return []
        return [states[:, :, :shared] for states in self._cached[nearest]]

    def _remember(self, prefix: tuple[int, ...], kv: KeyValues) -> None:
        if len(prefix) > self._cache_tokens:
            return
        # a part of what a pass computed would keep all of it
        self._cached[prefix] = [
            states if states.untyped_storage().nbytes() == states.nbytes else states.clone() for states in kv
        ]
        bisect.insort(self._ordered, prefix)
        self._tokens += len(prefix)
        while self._tokens > self._cache_tokens:
            oldest, _ = self._cached.popitem(last=False)
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]
            self._tokens -= len(oldest)


def _tokens_of(kv: KeyValues) -> int:
    return kv[0].shape[2] if kv else 0


def common_length(left_ids: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens at the beginning that are the same."""
    for place, (left, right) in enumerate(zip(left_ids, other, strict=False)):
        if left != right:
            return place
    return min(len(left_ids), len(other))
