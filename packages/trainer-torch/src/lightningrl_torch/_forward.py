"""Forward passes of the engine: transformers' own, or quicker ones that give the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightningrl_torch._slots import KeyValues, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightningrl_torch._models import ModelTraits

__all__ = ["Forward", "build_forward"]


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
    from lightningrl_torch._llama import find_forward

    quick = find_forward(model, autocast=autocast)
    if quick is not None:
        return quick
    from lightningrl_torch._plain import PlainForward

    return PlainForward(model, traits, autocast=autocast)
