"""Key/value memory of the running requests: rows join and leave at any token, columns move together.

column:      start                       end
row 0      [ ······ | prompt… completion… ]      every row ends at `end`; shorter rows are padded on the left
row 1      [ ············ | prompt… compl ]      and the padding is masked, so relative distances stay true

A beginning that prompts of the batch have in common stands beside the slots once, and each token reads it once for all
rows:

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

from lightningrl_torch.device import return_memory

__all__ = ["CAN_SHARE", "LEAST_SAVED", "KeyValues", "SharedPrompt", "SlotCache", "SlotLayer"]

KeyValues = list[Tensor]
"""Keys and values of one sequence, (states, heads, tokens, head_dim) each: joined, states 0 and 1 are the first layer's
keys and values, 2 and 3 the second's, and so on. Nothing = no tokens."""

_ROWS, _COLUMNS, _STEP = 8, 256, 64
_MUCH = 2**27
"""Bytes of all buffers, from which on those that were outgrown go back to the system."""
CAN_SHARE: Final = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""The attention kernel that tells its softmax' sum is there."""
LEAST_SAVED: Final = 2**22
"""Bytes of a layer that are read once in place of often, from which on a second call of the kernel costs less: eight
rows of 135 million parameters with 200 tokens in common neither gain nor lose."""


class SlotLayer:
    """One layer's buffers (rows, heads, columns, head_dim), handed to attention as views."""

    def __init__(self, slots: SlotCache) -> None:
        self.buffers: list[Tensor] = []
        """Keys and values; empty before the first."""
        self._slots = slots

    def make(self, keys: Tensor, values: Tensor) -> None:
        """Buffers for keys and values such as these."""
        rows, columns = self._slots.capacity
        self.buffers = [
            states.new_zeros((rows, states.shape[-3], columns, states.shape[-1])) for states in (keys, values)
        ]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token of each row, (rows, heads, 1, head_dim), and return all that there is."""
        if not self.buffers:
            self.make(keys, values)
        rows, start, end = self._slots.rows, self._slots.start, self._slots.end
        for buffer, states in zip(self.buffers, (keys, values), strict=True):
            buffer[:rows, :, end] = states[:, :, 0]
        kept_keys, kept_values = (buffer[:rows, :, start : end + 1] for buffer in self.buffers)
        return kept_keys, kept_values


class SlotCache:
    """Rows are requests. Decoding writes one column for all rows; no tensor is ever concatenated."""

    def __init__(self, layers: int) -> None:
        self.capacity = (_ROWS, _COLUMNS)
        self.rows = 0
        self.start = 0
        self.end = 0
        self.layers = [SlotLayer(self) for _ in range(layers)]
        self.shared: SharedPrompt | None = None
        """A beginning of rows' prompts that stands beside the slots, before what is in them."""

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the keys; float32 while nothing is kept."""
        buffers = self.layers[0].buffers
        return buffers[0].dtype if buffers else torch.float32

    @property
    def width(self) -> int:
        """Columns in use: the longest row's tokens."""
        return self.end - self.start

    def clear(self) -> None:
        """Forget every row and give the memory back."""
        self.capacity = (_ROWS, _COLUMNS)
        self.rows = self.start = self.end = 0
        self.shared = None
        for layer in self.layers:
            layer.buffers = []

    def join(self, prefixes: Sequence[KeyValues]) -> None:
        """Append one row for each prefix (possibly of no tokens)."""
        lengths = [kv[0].shape[2] if kv else 0 for kv in prefixes]
        first, count = self.rows, len(prefixes)
        widest = max(self.width, *lengths)
        self._reserve(first + count, widest)
        self.rows = first + count
        self.start = min(self.start, self.end - widest)
        if any(lengths):
            self._write(prefixes, slice(self.end - max(lengths), self.end), first)

    def _write(self, prefixes: Sequence[KeyValues], window: slice, first: int) -> None:
        """Copy prefixes into rows from `first`, each to the end of the window, one layer after the other: all layers'
        prefixes at once would be as large as the rows. What stands left of a shorter one is a token of any."""
        distinct = {id(kv): kv for kv in prefixes if kv}
        parts = list(zip(*distinct.values(), strict=True))
        starts, at = {}, 0
        for place, kv in distinct.items():
            starts[place] = at
            at += kv[0].shape[2]
        lengths = torch.tensor([kv[0].shape[2] if kv else 0 for kv in prefixes])
        begins = torch.tensor([starts.get(id(kv), 0) for kv in prefixes])
        behind = torch.arange(window.start - window.stop, 0)
        tokens = (begins[:, None] + (lengths[:, None] + behind).clamp(min=0)).to(parts[0][0].device)
        states = (torch.cat([kv[state] for kv in part], 1) for part in parts for state in range(len(part[0])))
        for layer in self.layers:
            keys, values = next(states), next(states)
            if not layer.buffers:
                layer.make(keys, values)
            for buffer, source in zip(layer.buffers, (keys, values), strict=True):
                buffer[first : self.rows, :, window] = source[:, tokens].transpose(0, 1)

    def make_room(self) -> None:
        """Make sure that the next decoding step's column exists."""
        self._reserve(self.rows, self.width)

    def advance(self) -> None:
        """Count the column that the model has just written."""
        self.end += 1

    def leave(self, moves: Sequence[tuple[int, int]], rows: int, width: int) -> None:
        """Copy row `source` to row `target` for each (target, source), then keep `rows` rows of at most `width`
        tokens."""
        if moves:
            targets, sources = ([move[side] for move in moves] for side in (0, 1))
            for layer in self.layers:
                for buffer in layer.buffers:
                    window = buffer[:, :, self.start : self.end]
                    window[targets] = window[sources]
        self.rows = rows
        self.start = self.end - width if rows else self.end

    def _reserve(self, rows: int, width: int) -> None:
        """Have `rows` rows, `width` columns up to `end`, and one free column behind them."""
        # `width` columns end at `end`; each token takes one more at the right, and what stands in `start:end` is moved
        # only when `end` meets the last column.
        # width 6 of 32 columns: end = 6 + 26 // 4 = 12, start = 6, and 19 tokens need no move
        row_capacity, columns = self.capacity
        if self.rows == 0:
            self.start = self.end = width
        if rows <= row_capacity and self.end < columns and self.end >= width:
            return
        if row_capacity < rows:
            row_capacity = -(-max(rows, row_capacity * 5 // 4) // _ROWS) * _ROWS
        if columns < width + 1 + width // 4:
            columns = -(-(width + 1 + width // 2) // _STEP) * _STEP
        start, end, old_width = self.start, self.end, self.width
        self.end = width + (columns - width) // 4 if self.rows else width
        self.start = self.end - old_width
        grown = (row_capacity, columns) != self.capacity
        self.capacity = (row_capacity, columns)
        for layer in self.layers:
            for number, old in enumerate(layer.buffers):
                window = old[: self.rows, :, start:end].clone()
                new = old.new_zeros((row_capacity, old.shape[1], columns, old.shape[3])) if grown else old
                new[: self.rows, :, self.start : self.end] = window
                layer.buffers[number] = new
        if grown and sum(buffer.nbytes for layer in self.layers for buffer in layer.buffers) >= _MUCH:
            del old, window
            return_memory()  # else smaller buffers stand beside larger ones, in pieces that nothing fits into


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
