"""Which device a policy is on. Imports torch alone, so that a recipe's `device` is checked in a moment."""

from __future__ import annotations

import torch

from lightningrl.errors import ConfigError

__all__ = ["pick_device"]


def pick_device(name: str) -> torch.device:
    """Raises ConfigError where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU; use 'auto' or 'cpu', or install a CUDA build of torch")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
