"""Every setting of the torch backend, with a default that someone has trained with. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightningrl.errors import ConfigError

__all__ = ["LoraSettings", "Settings"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "bfloat16"),
    "schedule": ("constant", "linear", "cosine"),
}
_AT_LEAST: dict[str, float] = {
    "threads": 1,
    "engine_threads": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "total_steps": 1,
    "minimum_factor": 0,
    "max_grad_norm": 0,
    "clip_low": 0,
    "clip_high": 0,
    "kl_coef": 0,
    "importance_cap": 0,
    "minibatches": 1,
    "epochs": 1,
    "max_tokens_per_microbatch": 1,
    "context_length": 2,
    "max_batch": 1,
    "prefill_tokens": 1,
    "prefix_cache_tokens": 0,
    "stream_interval_s": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters instead of full fine-tuning (Hu et al. 2021), through peft."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules that get adapters."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> LoraSettings:
        """Read the recipe's `lora` table; raises ConfigError."""
        known = {"rank", "alpha", "target_modules"}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"lora has no setting {unknown[0]!r}; it takes: alpha, rank, target_modules")
        targets = values.get("target_modules", "all-linear")
        rank = values.get("rank", 16)
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"lora rank is {rank!r}; use an integer of at least 1")
        return cls(
            rank=rank, alpha=float(values.get("alpha", 2.0 * rank)), target_modules=targets if isinstance(targets, str) else tuple(targets)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The backend's keyword parameters. Raises ConfigError for values that cannot be."""

    policy: str
    """Hub name or folder of a transformers causal language model with tokenizer and chat template."""
    name: str | None = None
    """Name of the policy in the run; None = `policy`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = the first CUDA GPU where there is one, else the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` computes under autocast; trained weights stay float32 (with LoRA, the frozen ones become bfloat16)."""
    seed: int = 0
    """Of sampling, minibatch order and LoRA's start."""
    threads: int | None = None
    """CPU threads of the learner; None = torch's own choice."""
    engine_threads: int | None = 1
    """CPU threads of the engine. Agents, server and engine share the machine during rollouts, and threads that wait for each other on
    busy cores cost more than they give; None = torch's own choice."""

    learning_rate: float = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, over calls of `learn`."""
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where `linear` and `cosine` end; they need it."""
    minimum_factor: float = 0.0
    """What `linear` and `cosine` end at, as a fraction of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    """AdamW's, on matrices alone."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 = never."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio to the rollout policy counts within 1 - clip_low … 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting policy (k3 estimate); 0 = no reference is kept."""
    importance_cap: float | None = None
    """None: ratios are to the rollout logprobs. A number: ratios are to the policy before the step, recomputed, and tokens are weighted
    by min(π_before / π_rollout, importance_cap): for rollouts of older versions or of an engine that computes differently."""
    minibatches: int = 1
    """Optimiser updates in an epoch; rollouts are dealt out at random, gradients scaled to the whole step's size."""
    epochs: int = 1
    max_tokens_per_microbatch: int = 4096
    """Tokens, padding included, in one forward and backward; memory against speed, no effect on the result."""
    share_prefixes: bool = True
    """Samples that begin alike are computed as one prefix tree; no effect on the result beyond rounding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lora: Mapping[str, Any] | None = None
    """None = full fine-tuning; else a table with any of `rank`, `alpha`, `target_modules`."""

    context_length: int | None = None
    """Most tokens of prompt and completion together; None = the model's."""
    max_batch: int = 128
    """Most requests decoded together; more wait."""
    prefill_tokens: int = 4096
    """Most prompt tokens computed in one forward."""
    prefix_cache_tokens: int = 16384
    """Prompt tokens remembered while the weights stay, so that a group's prompt is computed once."""
    stream_interval_s: float = 0.02
    """Least time between two chunks of a streamed completion."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose {', '.join(map(repr, choices))}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf")):
                raise ConfigError(f"{name} is {value!r}; use a number of at least {least:g}")
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule {self.schedule!r} needs to know where it ends; set total_steps")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas is {self.betas!r}; use two numbers from 0 to below 1")
        if self.lora is not None:
            LoraSettings.parse(self.lora)
