"""bitsandbytes, where a recipe asks for it: whether it is there, and 8-bit AdamW; frozen weights of few bits are in
`quantized`. Imports neither torch nor it until then."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from lightningrl.errors import BackendError

if TYPE_CHECKING:
    import torch

    from lightningrl_torch.settings import Settings

__all__ = [
    "MOMENT_BYTES",
    "bits_needed",
    "check_bits",
    "check_same",
    "installed_bits",
    "make_optimizer",
    "silence_bits",
]

OLDEST: Final = (0, 50)
NEWEST: Final = (0, 51)
"""The first release that has not been tried."""
RANGE: Final = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST))}"

MOMENT_BYTES: Final = {"adamw": 8.0, "adamw8bit": 2.0 + 2 * 4 / 256}
"""Memory of an optimiser, in bytes for each number that learns."""


def bits_needed(settings: Settings) -> str | None:
    """The setting that bitsandbytes is needed for; None = none."""
    if settings.quantize is not None:
        return f"learner.quantize = {settings.quantize!r}"
    return "learner.optimizer = 'adamw8bit'" if settings.optimizer == "adamw8bit" else None


def check_bits(settings: Settings) -> None:
    """Raise BackendError where settings need bitsandbytes and it is not installed, or one that has not been tried."""
    setting = bits_needed(settings)
    if setting is not None:
        installed_bits(setting)


def installed_bits(setting: str, version: Callable[[str], str] = importlib.metadata.version) -> str:
    """The version that is installed, for `setting`. Raises BackendError."""
    try:
        installed = version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(
            f"{setting} needs bitsandbytes, which is not installed; pip install 'bitsandbytes{RANGE}', or remove the "
            "setting"
        ) from None
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        raise BackendError(
            f"{setting} was made for bitsandbytes {RANGE} and {installed} is installed; pip install "
            f"'bitsandbytes{RANGE}'"
        )
    return installed


def silence_bits() -> None:
    """No line on a kernel of a further package that we do not call, whenever transformers or peft import it."""
    logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)


def check_same(saved: Mapping[str, Any], settings: Settings) -> None:
    """Raise BackendError where a checkpoint was learned by another optimiser, or on weights of other bits."""
    for key, before in (("optimizer", "adamw"), ("quantize", None)):
        then, now = saved.get(key, before), getattr(settings, key)
        if then != now:
            raise BackendError(
                f"the checkpoint was learned with learner.{key} = {then!r}, and the recipe says {now!r}; go on with "
                "the one that it was saved with"
            )


def make_optimizer(
    groups: list[dict[str, Any]], settings: Settings, *, rate: float, fused: bool
) -> torch.optim.Optimizer:
    """AdamW, or AdamW whose two moments are 8 bits a number in blocks of 256 with a scale each (Dettmers et al., 8-bit
    Optimizers via Block-wise Quantization, 2022); tensors of fewer than 4,096 numbers keep 32."""
    import torch

    betas = (settings.betas[0], settings.betas[1])
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused or None)
    check_bits(settings)
    optimizers: Any = importlib.import_module("bitsandbytes.optim")  # has no types
    made: torch.optim.Optimizer = optimizers.AdamW8bit(groups, lr=rate, betas=betas)
    return made
