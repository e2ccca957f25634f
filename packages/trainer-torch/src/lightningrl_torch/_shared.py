"""A beginning that prompts of the batch have in common: its keys and values stand in memory once, and each token reads
them once for all rows.

row 0   shared prompt │ own prompt, completion       queries of all rows ─► shared keys, one attention  ┐ joined by the
row 1   shared prompt │ own prompt, completion       queries of a row    ─► its own keys                ┘ softmax' sums

With L the logarithm of a softmax' sum, the attention to both is the mean of theirs, weighted by sigmoid(L_shared -
L_own): Hydragen, Juravsky et al. 2024, arXiv 2402.05099.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["CAN_SHARE", "LEAST_SAVED", "SharedPrompt"]

CAN_SHARE: Final = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""The attention kernel that tells its softmax' sum is there."""
LEAST_SAVED: Final = 2**22
"""Bytes of a layer that are read once in place of often, from which on a second call of the kernel costs less: eight
rows of 135 million parameters with 200 tokens in common neither gain nor lose."""


class SharedPrompt:
    """Keys and values of the beginning, and the rows that have it."""

    def __init__(self, token_ids: tuple[int, ...], states: Tensor) -> None:
        """`states` (states, heads, tokens, head_dim), as `KeyValues` have them."""
        self.token_ids = token_ids
        self.rows: Tensor | None = None
        """Places of the rows that begin so; None = all do."""
        self._states = states[:, None].contiguous()

    def begins(self, token_ids: Sequence[int]) -> bool:
        """True if a prompt begins so."""
        return tuple(token_ids[: len(self.token_ids)]) == self.token_ids

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Mix values for one token of each row.

        queries       (rows, heads of keys, queries of a head, head_dim)
        keys, values  (rows, heads of keys, columns, head_dim), the rows' own
        mask          (rows, 1, 1, columns) to be added; None = a row reads all
        """
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, sums = attention(queries, keys, values, attn_mask=mask)
        mine = queries if self.rows is None else queries[self.rows]
        rows, heads, count, size = mine.shape
        together = mine.transpose(0, 1).reshape(1, heads, rows * count, size)
        before, before_sums = attention(together, self._states[2 * layer], self._states[2 * layer + 1])
        before = before.view(heads, rows, count, size).transpose(0, 1)
        before_sums = before_sums.view(heads, rows, count).transpose(0, 1)
        own, own_sums = (mixed, sums) if self.rows is None else (mixed[self.rows], sums[self.rows])
        weight = torch.sigmoid(before_sums - own_sums.view(rows, heads, count))[..., None]
        joined = torch.lerp(own, before, weight)
        return joined if self.rows is None else mixed.index_copy(0, self.rows, joined)
