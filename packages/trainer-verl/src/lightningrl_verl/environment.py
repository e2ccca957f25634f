"""Environment variables that verl and Ray read when they are imported; set before either is. Imports neither."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator

from lightningrl_verl.recipe_check import runs_on_cpu
from lightningrl_verl.settings import Settings

__all__ = ["IMPORTANCE", "OWN_LOSS", "prepare_environment", "process_environment", "quiet"]

OWN_LOSS = "LIGHTNINGRL_LOSS"
"""A loss and its options, for the processes that learn: verl's config has no place for them."""

IMPORTANCE = "LIGHTNINGRL_IMPORTANCE"
"""Arguments of `weigh_tokens` with `sequence_mask`, for the same processes: verl's own masks are of rows, not calls."""


def process_environment(settings: Settings) -> dict[str, str]:
    """Environment variables of every process of verl."""
    variables = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VERL_LOGGING_LEVEL": "WARN",
    }
    if runs_on_cpu(settings):
        from lightningrl_verl_cpu.settings import environment

        variables |= environment()
    if settings.is_loss_named:
        variables[OWN_LOSS] = json.dumps({"name": settings.loss, "options": settings.loss_arguments})
    if settings.sequence_mask is not None:
        variables[IMPORTANCE] = json.dumps(settings.importance_arguments)
    return variables


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While verl and vLLM are imported: they say at length what is not installed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def prepare_environment(settings: Settings) -> None:
    """Give it to this process, and to a Ray that it starts: `--workers ray` may do that before verl does."""
    os.environ.update(process_environment(settings))
    if runs_on_cpu(settings):
        from lightningrl_verl_cpu.settings import machine

        os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps(machine(settings.gpus))
