"""Linear maps as the engine's own forward multiplies by them: side by side in one matrix, in the order in which oneDNN
reads it, with low-rank adapters beside them.

x ─► x · Wᵀ ─► + (x · Aᵀ) · Bᵀ of each adapter
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightningrl_torch._quantized import QuantizedLinear

__all__ = [
    "LARGE",
    "ONE_DNN",
    "Adapter",
    "Projection",
    "join_rows",
    "multiply",
    "pack",
    "takes_one_dnn",
]

LARGE: Final = 2**18
"""Numbers in a matrix that does not stay in a core's cache beside others."""
PACKED: Final[WeakValueDictionary[tuple[int, torch.Size], Tensor]] = WeakValueDictionary()
"""Frozen matrices in that order, by where they lie in memory: policies on one base read the same ones."""
PACKING: Final = threading.Lock()
ONE_DNN: Final = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def join_rows(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor whose rows are theirs, one parameter after the other. They become views of it, so that it learns with
    them."""
    data = [parameter.data for parameter in parameters]
    first, ends = data[0], 0
    for part in data:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != first.storage_offset() + ends
        ):
            break
        ends += part.numel()
    else:
        return first.as_strided(
            (sum(len(part) for part in data), *first.shape[1:]), first.stride(), first.storage_offset()
        )
    joined = torch.cat(data)
    parts = joined.split([len(part) for part in data])  # type: ignore[no-untyped-call]
    for parameter, rows in zip(parameters, parts, strict=True):
        parameter.data = rows
    return joined


def takes_one_dnn(weight: Tensor) -> bool:
    """True for a large float32 matrix on a CPU that has oneDNN."""
    return weight.numel() >= LARGE and weight.dtype is torch.float32 and weight.device.type == "cpu" and ONE_DNN


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`. On a CPU that takes large float32 matrices to MKL, which repacks them for a few rows; oneDNN reads
    them as they lie, in half the time at eight rows."""
    if takes_one_dnn(weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def pack(weight: Tensor, *, frozen: bool) -> Tensor:
    """A matrix in the order in which oneDNN reads it; of a frozen one, the same for all who ask while one has it."""
    if not frozen:
        made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return made
    key = (weight.data_ptr(), weight.shape)
    with PACKING:
        packed = PACKED.get(key)
        if packed is None:
            packed = PACKED[key] = pack(weight, frozen=False)
        return packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A low-rank addition to some of a projection's outputs."""

    columns: slice
    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projection:
    """Linear maps of one input, side by side in one matrix."""

    weight: Tensor | None
    """None where it is quantised."""
    bias: Tensor | None
    adapters: tuple[Adapter, ...]
    quantized: tuple[QuantizedLinear, ...] = ()
    packed: list[Tensor] = field(default_factory=list)
    """The weight once more, in the order in which oneDNN reads it; nothing = not made."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            y = torch.cat([part(x) for part in self.quantized], -1)
        else:
            x = x.to(self.weight.dtype)
            y = multiply(x, self.packed[0] if self.packed else self.weight, self.bias)
        for adapter in self.adapters:
            y[:, adapter.columns].addmm_(F.linear(x, adapter.down), adapter.up.t(), alpha=adapter.scale)
        return y
