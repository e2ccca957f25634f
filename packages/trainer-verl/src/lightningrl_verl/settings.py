"""Every setting of the verl backend. Those that the torch backend has too mean the same here. Imports neither torch, Ray nor verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightningrl.errors import ConfigError

__all__ = ["LOSSES", "MODES", "CriticSettings", "LoraSettings", "Settings", "flatten"]

LOSSES = ("ppo_clip", "gspo", "cispo")
MODES = ("sync", "colocate_async", "separate_async")

_OTHER_TERMS = frozenset({"actor_rollout_ref.actor.entropy_coeff", "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"})
"""verl's own settings that give the loss a term beside the weighted advantage."""
_AT_LEAST: dict[str, float] = {
    "nodes": 1,
    "gpus_per_node": 1,
    "tensor_parallel": 1,
    "rollout_nodes": 0,
    "rollout_gpus_per_node": 0,
    "ahead": 0,
    "sync_every": 1,
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
    "start_timeout_s": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters instead of full fine-tuning (Hu et al. 2021); vLLM serves them as adapters."""

    rank: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> LoraSettings:
        """Read the recipe's `lora` table; raises ConfigError."""
        unknown = sorted(set(values) - {"rank", "alpha", "target_modules"})
        if unknown:
            raise ConfigError(f"lora has no setting {unknown[0]!r}; it takes: alpha, rank, target_modules")
        rank, targets = values.get("rank", 16), values.get("target_modules", "all-linear")
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"lora rank is {rank!r}; use an integer of at least 1")
        alpha = values.get("alpha", 2 * rank)
        if int(alpha) != alpha:
            raise ConfigError(f"lora alpha is {alpha!r}; verl takes whole numbers")
        return cls(rank=rank, alpha=int(alpha), target_modules=targets if isinstance(targets, str) else tuple(targets))


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """PPO's critic (Schulman et al. 2017): verl estimates token advantages by GAE inside each call."""

    model: str | None = None
    """Folder or hub name its weights start from; None = the policy's."""
    learning_rate: float = 1e-5
    gamma: float = 1.0
    lam: float = 1.0

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> CriticSettings:
        """Read the recipe's `critic` table; raises ConfigError."""
        unknown = sorted(set(values) - {"model", "learning_rate", "gamma", "lam"})
        if unknown:
            raise ConfigError(f"critic has no setting {unknown[0]!r}; it takes: gamma, lam, learning_rate, model")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The backend's keyword parameters. Raises ConfigError for values that cannot be."""

    policy: str
    """Hub name or folder of a transformers causal language model that vLLM can serve."""
    name: str | None = None
    """Name of the policy in the run; None = `policy`."""
    seed: int = 0

    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """`sync`: rollouts and learning take turns on the same GPUs. `colocate_async`: the same GPUs, rollouts go on across updates.
    `separate_async`: replicas have GPUs of their own and sample while the learner learns."""
    ahead: int = 1
    """Asynchronous modes: steps whose rollouts may be collected while an earlier one is learned, so how stale they may become."""
    sync_every: int = 1
    """`separate_async`: learning steps between two transfers of the weights to the replicas."""
    nodes: int = 1
    gpus_per_node: int = 1
    """GPUs that the learner uses on each of `nodes`; the replicas share them unless the mode is `separate_async`."""
    tensor_parallel: int = 1
    """GPUs that one vLLM replica spans; there are GPUs ÷ tensor_parallel replicas."""
    rollout_nodes: int = 0
    rollout_gpus_per_node: int = 0
    """`separate_async`: GPUs that only the replicas use."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` comes with the CPU support package, for machines where vLLM cannot be installed."""
    strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` = CUDA where there is a GPU, else the CPU, which needs the test-support package lightningrl-verl-cpu."""
    address: str | None = None
    """Ray cluster to join, `host:port` or `auto`; None = RAY_ADDRESS where it is set, else a Ray of our own on this machine."""
    start_timeout_s: float = 1800.0
    """Time that verl may take to load models and start its replicas."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where `cosine` ends; it needs it."""
    minimum_factor: float = 0.0
    """What `cosine` ends at, as a fraction of the learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm; 0 = never."""

    loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    """All of them weigh tokens as the recipe says (`lightningrl_verl.losses`)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio to the rollout policy counts within 1 - clip_low … 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL to the starting policy (k3 estimate); 0 = no reference is kept."""
    importance_cap: float | None = None
    """None: ratios are to the rollout logprobs. A number: ratios are to the policy before the step, recomputed, and tokens are weighted
    by min(π_before / π_rollout, importance_cap) (truncated importance sampling)."""
    minibatches: int = 1
    """Optimiser updates in an epoch."""
    epochs: int = 1
    max_tokens_per_microbatch: int = 16384
    """Tokens of one forward and backward on a GPU; memory against speed, no effect on the result."""
    gradient_checkpointing: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What replicas and the forward pass compute in; trained weights stay float32. The CPU computes in float32."""
    lora: Mapping[str, Any] | None = None
    """None = full fine-tuning; else a table with any of `rank`, `alpha`, `target_modules`."""
    critic: Mapping[str, Any] | None = None
    """None = advantages are the recipe's credit. A table with any of `model`, `learning_rate`, `gamma`, `lam`: the credit is each call's
    reward, and PPO's critic turns it into token advantages (GAE)."""
    context_length: int | None = None
    """Most tokens of prompt and completion together; None = the model's."""
    verl: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """verl's own settings by dotted name, vLLM's below `actor_rollout_ref.rollout`; checked against verl's config. They win over ours."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "mode": MODES,
            "engine": ("vllm", "transformers"),
            "strategy": ("fsdp2", "fsdp", "megatron"),
            "device": ("auto", "cuda", "cpu"),
            "schedule": ("constant", "cosine"),
            "dtype": ("bfloat16", "float32"),
            "loss": LOSSES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose {', '.join(map(repr, known))}")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf")):
                raise ConfigError(f"{name} is {value!r}; use a number of at least {least:g}")
        if self.schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"schedule {self.schedule!r} needs to know where it ends; set total_steps")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas is {self.betas!r}; use two numbers from 0 to below 1")
        self._check_layout()
        if self.lora is not None:
            LoraSettings.parse(self.lora)
        if self.critic is not None:
            CriticSettings.parse(self.critic)

    def _check_layout(self) -> None:
        separate = self.mode == "separate_async"
        if separate and not (self.rollout_nodes and self.rollout_gpus_per_node):
            raise ConfigError("mode 'separate_async' gives the replicas GPUs of their own; set rollout_nodes and rollout_gpus_per_node")
        if not separate and (self.rollout_nodes or self.rollout_gpus_per_node):
            raise ConfigError(
                f"rollout_nodes and rollout_gpus_per_node are for mode 'separate_async', the mode is {self.mode!r}; remove them"
            )
        if self.sync_every > 1 and not separate:
            raise ConfigError(f"sync_every is {self.sync_every} but mode {self.mode!r} transfers the weights every step; remove it")
        gpus = self.rollout_nodes * self.rollout_gpus_per_node if separate else self.nodes * self.gpus_per_node
        if gpus % self.tensor_parallel:
            raise ConfigError(f"{gpus} GPUs for the replicas do not divide into replicas of {self.tensor_parallel}; change tensor_parallel")

    @property
    def learns_silent_rows(self) -> bool:
        """Whether the loss has a term that does not vanish where the advantage is 0: of a critic, a KL, an entropy bonus."""
        extra = {name for name, value in flatten(self.verl) if value}
        return self.critic is not None or self.kl_coef > 0 or bool(extra & _OTHER_TERMS)

    @property
    def is_async(self) -> bool:
        return self.mode != "sync"

    @property
    def gpus(self) -> int:
        """GPUs of the whole layout."""
        return self.nodes * self.gpus_per_node + self.rollout_nodes * self.rollout_gpus_per_node


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables and dotted names alike, as dotted names."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        found.extend(flatten(value, name) if isinstance(value, Mapping) and value else [(name, value)])
    return found
