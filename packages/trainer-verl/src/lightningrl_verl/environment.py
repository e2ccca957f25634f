"""Environment variables that verl and Ray read when they are imported; set before either is. Imports neither."""

from __future__ import annotations

import os

from lightningrl_verl.recipe_check import runs_on_cpu
from lightningrl_verl.settings import Settings

__all__ = ["prepare_environment", "process_environment"]


def process_environment(settings: Settings) -> dict[str, str]:
    """What every process of verl gets."""
    found = {"TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "VERL_LOGGING_LEVEL": "WARN"}
    if runs_on_cpu(settings):
        from lightningrl_verl_cpu.settings import environment

        found |= environment()
    return found


def prepare_environment(settings: Settings) -> None:
    """Give it to this process."""
    os.environ.update(process_environment(settings))
