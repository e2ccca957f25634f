"""Folders that are complete or absent: written beside, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightningrl.errors import BackendError
from lightningrl.files import whole_folder

__all__ = ["read_checkpoint", "restore_generators", "write_checkpoint", "written_folder"]

_WEIGHTS, _STATE = "trained.safetensors", "state.pt"


@contextlib.contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    try:
        with whole_folder(folder) as scratch:
            scratch.mkdir(parents=True)
            yield scratch
    except (OSError, RuntimeError, SafetensorError) as error:
        # on a full disk torch and safetensors have errors of their own
        problem = error if isinstance(error, OSError) else error.__context__ or error
        sentence = (
            f"folder {str(folder)!r} cannot be written: {problem}; "
            "nothing of it was kept: mend that, then run again (--resume)"
        )
        raise BackendError(sentence) from error


def write_checkpoint(folder: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write trained weights, `state`, and the process's random generators."""
    with written_folder(folder) as scratch:
        save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, scratch / _WEIGHTS)
        with (scratch / _STATE).open("wb") as file:
            torch.save({**state, "generators": _generators()}, file)


def read_checkpoint(folder: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint of `write_checkpoint`. Raises BackendError."""
    for name in (_WEIGHTS, _STATE):
        if not (folder / name).is_file():
            raise BackendError(f"no checkpoint at {str(folder)!r}: {name} is missing; give a folder that `save` wrote")
    try:
        weights = load_file(folder / _WEIGHTS, device=str(device))
        state: dict[str, Any] = torch.load(folder / _STATE, map_location=device, weights_only=True)
    except Exception as error:  # torn pickles raise anything
        raise BackendError(
            f"checkpoint {str(folder)!r} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return weights, state


def _generators() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(state: Mapping[str, Any]) -> None:
    """Set the process's random generators to what they were."""
    generators = state["generators"]
    version, internal, gauss = generators["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = generators["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(generators["torch"].cpu())
    if generators["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([one.cpu() for one in generators["cuda"]])
