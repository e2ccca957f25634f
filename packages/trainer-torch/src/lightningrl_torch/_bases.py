"""Frozen base models that policies of this process share: adapters are each policy's own, weights below them stand in
memory once.

    folder, device, numbers ─► Base ─copy─► modules of policy a ─► its adapters
                                   └─copy─► modules of policy b ─► its adapters        the same tensors in both
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, WeakValueDictionary

import torch

from lightningrl_torch._quantized import QuantizedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightningrl_torch.settings import Settings

__all__ = ["Base", "BaseUse", "base_key", "frozen_parts", "use_base"]


class Base:
    """A model none of whose weights learn."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """The folder's own word on the weights; where it has none, the weights' dtype."""
        self.uses: WeakSet[BaseUse] = WeakSet()
        self.model = model.requires_grad_(requires_grad=False)

    def copy(self) -> PreTrainedModel:
        """Modules of their own on the same tensors."""
        return copy.deepcopy(self.model, frozen_parts(self.model))


class BaseUse:
    """A policy's part in a base: as long as there is one, the base stays."""

    def __init__(self, base: Base, name: str) -> None:
        self.base, self.name = base, name
        base.uses.add(self)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the other policies on it."""
        return tuple(sorted(use.name for use in self.base.uses if use is not self))

    def end(self) -> None:
        """The policy is closed; others no longer share with it."""
        self.base.uses.discard(self)


_BASES: Final[WeakValueDictionary[Hashable, Base]] = WeakValueDictionary()
"""Bases of the process, as its memory is; one is gone with the last policy on it."""
_LOADING: Final = threading.Lock()


def use_base(key: Hashable, name: str, load: Callable[[], Base]) -> BaseUse:
    """The base of that key, loaded where no policy has it."""
    with _LOADING:
        base = _BASES.get(key)
        if base is None:
            base = _BASES[key] = load()
        return BaseUse(base, name)


def base_key(settings: Settings, device: torch.device) -> Hashable:
    """Equal for policies whose frozen weights are the same numbers at the same place."""
    folder = Path(settings.policy)
    files: tuple[Any, ...] = ()
    if folder.is_dir():
        stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        folder = folder.resolve()
    return str(folder), files, str(device), settings.dtype, settings.quantize


def frozen_parts(model: torch.nn.Module) -> dict[int, Any]:
    """The parts of a model that never change, by `id`: as the memo of `copy.deepcopy` they stay shared."""
    tensors = [one for one in (*model.parameters(), *model.buffers()) if not one.requires_grad]
    states = [part.state for part in model.modules() if isinstance(part, QuantizedLinear)]
    return {id(one): one for one in (*tensors, *states)}
