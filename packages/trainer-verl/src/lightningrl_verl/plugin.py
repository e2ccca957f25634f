"""Registers the backend. Imports neither torch, Ray nor verl: the factory does, when a run asks for it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightningrl.plugins import Plugin, hookimpl
from lightningrl.protocols import Capabilities
from lightningrl_verl.recipe_check import check_machine, check_recipe
from lightningrl_verl.settings import LOSSES, Settings

if TYPE_CHECKING:
    from lightningrl_verl.backend import VerlBackend

__all__ = ["create_backend", "lightningrl_trainers"]


def create_backend(**settings: Any) -> VerlBackend:
    """A `VerlBackend` of these `Settings`. Raises BackendError or ConfigError before anything heavy starts."""
    from lightningrl_verl.environment import prepare_environment

    made = Settings(**settings)
    check_machine(made)
    prepare_environment(made)  # verl and Ray read it when they are imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns of every engine that is not installed
        from lightningrl_verl.backend import VerlBackend

    return VerlBackend(made)


# what the factory takes, for `check_options`, without importing verl
create_backend.__signature__ = inspect.signature(Settings)  # type: ignore[attr-defined]


@hookimpl
def lightningrl_trainers() -> Iterable[Plugin]:
    yield Plugin(
        name="verl",
        summary="verl with vLLM replicas on Ray; FSDP2 or Megatron, one GPU to many nodes",
        factory=create_backend,
        check=check_recipe,
        capabilities=Capabilities(
            losses=frozenset(LOSSES),
            devices=frozenset({"cuda", "cpu"}),
            lora=True,
            reference_kl=True,
            critic=True,
        ),
    )
