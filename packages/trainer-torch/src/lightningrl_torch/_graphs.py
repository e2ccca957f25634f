"""Decoding on a CUDA GPU as one graph: the host starts a token's hundreds of small operations with a single call.

                     captured once for each (rows, columns)            replayed for each token
one token of each row ─► [ layers on the whole slot memory, masked ] ─► logits

A graph's shapes cannot change, so that rows are rounded up to a power of two, and attention reads all columns that the
slot memory has, those outside a row masked. What that costs is less than starting the operations one by one
(`scripts/gpu_check.py` measures both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lightningrl_torch._forward import Forward
from lightningrl_torch._llama import LlamaForward
from lightningrl_torch._slots import KeyValues, SlotCache

__all__ = ["GraphedForward", "with_graphs"]

_WARMING: Final = 2
"""Runs before a capture: libraries choose their kernels and take their memory."""
_MOST_COLUMNS: Final = 8192
"""Of the slot memory; with more of them reading all costs more than starting."""


class GraphedForward:
    """Implements `Forward` by another, whose decoding it captures. `captures` False runs the same without a graph, as
    tests on a CPU do."""

    packs = True

    def __init__(self, forward: LlamaForward, *, captures: bool = True) -> None:
        self.layers = forward.layers
        self.vocabulary = forward.vocabulary
        self.device = forward.device
        self.forward = forward
        """What is captured."""
        self._captures = captures
        self._steps: dict[tuple[int, int], _Step] = {}

    def refresh(self) -> None:
        """See `Forward`. Weights change in place, where graphs read them."""
        self.forward.refresh()

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """See `Forward`."""
        return self.forward.prefill(sequences, before)

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        """See `Forward`. The logits are overwritten by the next call."""
        row_capacity, columns = cache.capacity
        if columns > _MOST_COLUMNS or not all(layer.buffers for layer in cache.layers):
            return self.forward.decode(token_ids, positions, cache, allowed)
        rows = min(1 << (len(token_ids) - 1).bit_length(), row_capacity)
        step = self._steps.get((rows, columns))
        if step is None or not step.reads(cache):
            self._steps = {shape: one for shape, one in self._steps.items() if one.reads(cache)}
            step = self._steps[rows, columns] = _Step(self.forward, cache, rows, captures=self._captures)
        return step.run(token_ids, positions, cache.end)


class _Step:
    """One token of `rows` rows, computed on tensors that stay where they are."""

    def __init__(self, forward: LlamaForward, cache: SlotCache, rows: int, *, captures: bool) -> None:
        columns = cache.capacity[1]
        self._forward = forward
        self._buffers = [(layer.buffers[0], layer.buffers[1]) for layer in cache.layers]
        self._rotations = forward.rotations(columns)
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=forward.device)
        """Token ids and positions."""
        self._column = torch.zeros(1, dtype=torch.int64, device=forward.device)
        """Where this token's keys and values go."""
        self._columns = torch.arange(columns, device=forward.device)
        self._logits = torch.empty(0)
        self._graph = self._capture() if captures else None

    def reads(self, cache: SlotCache) -> bool:
        """True while the memory that it was made for is the cache's."""
        return all(kept[0] is layer.buffers[0] for kept, layer in zip(self._buffers, cache.layers, strict=True))

    def run(self, token_ids: Tensor, positions: Tensor, column: int) -> Tensor:
        """Logits (rows, vocabulary) of the rows that are asked about."""
        asked = len(token_ids)
        self._inputs[0, :asked], self._inputs[1, :asked] = token_ids, positions
        self._column.fill_(column)
        if self._graph is None:
            self._logits = self._compute()
        else:
            self._graph.replay()
        return self._logits[:asked]

    def _compute(self) -> Tensor:
        token_ids, positions = self._inputs
        rows = len(token_ids)
        cosines, sines = (table[positions][:, None] for table in self._rotations)
        behind = self._column - self._columns
        """How far each column is before this token's."""
        mask = ((behind >= 0) & (behind <= positions[:, None]))[:, None, None]

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            kept_keys, kept_values = (buffer[:rows] for buffer in self._buffers[layer])
            kept_keys.index_copy_(2, self._column, keys)
            kept_values.index_copy_(2, self._column, values)
            return kept_keys, kept_values

        return self._forward.step(token_ids, cosines, sines, write, mask)

    def _capture(self) -> torch.cuda.CUDAGraph:
        beside = torch.cuda.Stream(self._forward.device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(self._forward.device))
        with torch.cuda.stream(beside):
            for _ in range(_WARMING):
                self._compute()
        torch.cuda.current_stream(self._forward.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # the learner may use the device meanwhile, in a thread of its own
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._compute()
        return graph


def with_graphs(forward: Forward) -> Forward:
    """The forward with decoding captured, where it is one of ours on a CUDA GPU."""
    if isinstance(forward, LlamaForward) and forward.device.type == "cuda":
        return GraphedForward(forward)
    return forward
