"""Choices by a policy's size where the recipe makes none: what learns, how many threads decode, how many tokens at
once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from lightningrl_torch.learner_settings import LoraSettings
from lightningrl_torch.memory import ADAPTED, KEPT_BYTES, MOST_TOKENS, activation_bytes
from lightningrl_torch.rates import usual_rate
from lightningrl_torch.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["choose_adapters", "choose_rate", "engine_threads", "is_large", "tokens_at_once"]

LARGE: Final = 50_000_000
"""Parameters of a policy that its engine waits for, rather than for agents and server."""


def is_large(parameters: int) -> bool:
    """True if a token of the policy takes long enough to be worth all threads, and a forecast."""
    return parameters >= LARGE


def choose_adapters(settings: Settings, device: torch.device, count: Callable[[], int]) -> Settings:
    """With adapters, where the recipe leaves them open and the policy is large; `count` counts its parameters."""
    if settings.lora is not None or device.type != "cpu" or count() < ADAPTED:
        return settings
    return settings.model_copy(update={"lora": LoraSettings()})


def choose_rate(settings: Settings, parameters: int) -> Settings:
    """With a learning rate, where the recipe has none. `parameters`: the policy's, without adapters."""
    if settings.learning_rate is not None:
        return settings
    rate = usual_rate(parameters, adapters=settings.adapters is not None, rollouts=settings.rollouts_per_step)
    return settings.model_copy(update={"learning_rate": rate})


def engine_threads(settings: Settings, parameters: int) -> int:
    """Where nobody said: one for a small policy; all for a large one, or half where it is learned from meanwhile."""
    if settings.engine_threads or not is_large(parameters):
        return settings.engine_threads or 1
    most = settings.threads or torch.get_num_threads()
    return max(1, most // 2) if settings.max_staleness else most


def tokens_at_once(model: PreTrainedModel) -> int:
    """Number of tokens whose activations fit into `KEPT_BYTES`; a GPU is for policies that fit it."""
    if model.device.type == "cuda":
        return MOST_TOKENS
    config = model.config.get_text_config(decoder=True)
    return max(1, min(MOST_TOKENS, KEPT_BYTES // activation_bytes(config.to_dict())))
