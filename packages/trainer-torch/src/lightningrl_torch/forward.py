"""Forward passes of the engine: transformers' own, or quicker ones that give the same numbers.

Decoding on a CUDA GPU is one graph: the host starts a token's hundreds of small operations with a single call.

                     captured once for each (rows, columns)            replayed for each token
one token of each row ─► [ layers on the whole slot memory, masked ] ─► logits

A graph's shapes cannot change, so that rows are rounded up to a power of two, and attention reads all columns that the
slot memory has, those outside a row masked. What that costs is less than starting the operations one by one
(`scripts/gpu_check.py` measures both).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightningrl_torch.llama import LlamaForward, find_forward
from lightningrl_torch.slots import KeyValues, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightningrl_torch.models import ModelTraits

__all__ = ["Forward", "GraphedForward", "build_forward", "with_graphs"]


logger = logging.getLogger(__name__)

_WARMING: Final = 2
"""Runs before a capture."""
_MOST_COLUMNS: Final = 8192
"""Limit of the slot memory: a graph reads all columns, however few are a row's."""


@runtime_checkable
class Forward(Protocol):
    """Forward passes of one model."""

    layers: int
    vocabulary: int
    device: torch.device

    @property
    def packs(self) -> bool:
        """True if `prefill` takes sequences of any lengths after prefixes; else equal lengths without a prefix."""
        ...

    @property
    def shares(self) -> bool:
        """True if `decode` reads the cache's shared prompt."""
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...

    def rest(self) -> None:
        """Give back memory of what can be made again."""
        ...

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        """Logits (rows, vocabulary) after one token of each row, whose keys and values are written into the cache's
        next column.

        allowed    (rows, columns with the next): which columns are the row's; None = all
        """
        ...

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """Keys and values of each sequence, in one pass.

        before    keys and values of what stands before each, [] for nothing; they are the first columns of the result
        """
        ...


def build_forward(model: PreTrainedModel, traits: ModelTraits, *, autocast: bool) -> Forward:
    """The quicker one where the model is of a family that it knows."""
    quick = find_forward(model, autocast=autocast)
    if quick is not None:
        return quick
    from lightningrl_torch.plain import PlainForward

    return PlainForward(model, traits, autocast=autocast)


def with_graphs(forward: Forward) -> Forward:
    """The forward with decoding captured, where it is one of ours on a CUDA GPU."""
    if isinstance(forward, LlamaForward) and forward.device.type == "cuda":
        return GraphedForward(forward)
    return forward


class GraphedForward:
    """Implements `Forward` by another, whose decoding it captures. The first logits of each graph are held against the
    other's; one that differs is not used. `captures` False computes the same without a graph, as tests on a CPU do."""

    packs = True
    shares = False

    def __init__(self, forward: LlamaForward, *, captures: bool = True) -> None:
        self.layers = forward.layers
        self.vocabulary = forward.vocabulary
        self.device = forward.device
        self.forward = forward
        """Forward that is captured."""
        self._captures = captures
        self._is_right = True
        self._steps: dict[tuple[int, int], _Step] = {}

    def refresh(self) -> None:
        """See `Forward`. Weights change in place, where graphs read them."""
        self.forward.refresh()

    def rest(self) -> None:
        """See `Forward`."""
        self.forward.rest()

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """See `Forward`."""
        return self.forward.prefill(sequences, before)

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        """See `Forward`. The logits are overwritten by the next call."""
        row_capacity, columns = cache.capacity
        has_memory = all(layer.buffers for layer in cache.layers)
        if not self._is_right or not has_memory or columns > _MOST_COLUMNS:
            return self.forward.decode(token_ids, positions, cache, allowed)
        rows = min(1 << (len(token_ids) - 1).bit_length(), row_capacity)
        step = self._steps.get((rows, columns))
        if step is not None and step.reads(cache):
            return step.run(token_ids, positions, cache.end)
        self._steps = {shape: one for shape, one in self._steps.items() if one.reads(cache)}
        step = self._steps[rows, columns] = _Step(self.forward, cache, rows, captures=self._captures)
        logits = step.run(token_ids, positions, cache.end)
        expected = self.forward.decode(token_ids, positions, cache, allowed)
        self._is_right = _are_close(logits, expected)
        if not self._is_right:
            logger.warning("decoding by CUDA graphs gives other logits on this device; it goes on without them")
            self._steps.clear()
        return expected


def _are_close(logits: Tensor, expected: Tensor) -> bool:
    """True if logits differ by no more than rounding in their number format."""
    share = 1e-3 if expected.dtype is torch.float32 else 0.1
    return float((logits - expected).abs().max()) <= share * float(expected.abs().max())


class _Step:
    """One token of `rows` rows, computed on tensors that stay where they are."""

    def __init__(self, forward: LlamaForward, cache: SlotCache, rows: int, *, captures: bool) -> None:
        columns = cache.capacity[1]
        self._forward = forward
        self._buffers = [tuple(map(weakref.ref, layer.buffers)) for layer in cache.layers]
        """Memory that is the cache's to keep or to give back; no step of other memory is run."""
        self._rotations = forward.rotations(columns)
        self._inputs = torch.zeros((2, rows), dtype=torch.int64, device=forward.device)
        """Token ids and positions."""
        self._column = torch.zeros(1, dtype=torch.int64, device=forward.device)
        """Where this token's keys and values go."""
        self._columns = torch.arange(columns, device=forward.device)
        self._captures = captures
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def reads(self, cache: SlotCache) -> bool:
        """True while the memory that it was made for is the cache's."""
        return all(kept[0]() is layer.buffers[0] for kept, layer in zip(self._buffers, cache.layers, strict=True))

    def run(self, token_ids: Tensor, positions: Tensor, column: int) -> Tensor:
        """Logits (rows, vocabulary) of the rows that are asked about."""
        asked = len(token_ids)
        self._inputs[0, :asked], self._inputs[1, :asked] = token_ids, positions
        self._column.fill_(column)
        if self._logits is None:  # only now: what is computed here is written to memory
            self._warm()
            self._graph = self._capture() if self._captures else None
        if self._graph is not None:
            self._graph.replay()
        else:
            self._logits = self._compute()
        assert self._logits is not None
        return self._logits[:asked]

    def _compute(self) -> Tensor:
        token_ids, positions = self._inputs
        rows = len(token_ids)
        cosines, sines = (table[positions][:, None] for table in self._rotations)
        behind = self._column - self._columns
        """Distance of each column to this token's."""
        mask = ((behind >= 0) & (behind <= positions[:, None]))[:, None, None]

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            kept_keys, kept_values = (
                memory[:rows] for buffer in self._buffers[layer] if (memory := buffer()) is not None
            )
            kept_keys.index_copy_(2, self._column, keys)
            kept_values.index_copy_(2, self._column, values)
            return kept_keys, kept_values

        return self._forward.step(token_ids, cosines, sines, write, mask)

    def _warm(self) -> None:
        """Compute before a capture: libraries choose their kernels and take their memory."""
        if not self._captures:
            self._compute()
            return
        device = self._forward.device
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            for _ in range(_WARMING):
                self._compute()
        torch.cuda.current_stream(device).wait_stream(beside)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # the learner may use the device meanwhile, in a thread of its own
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._compute()
        return graph
