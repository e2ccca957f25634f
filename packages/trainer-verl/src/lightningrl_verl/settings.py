"""Every setting of the verl backend; those of the torch backend mean the same. Imports neither torch, Ray nor verl."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from lightningrl_torch.learner_settings import AtLeast0, Count, LearnerSettings, LoraSettings, SettingsTable, Whole
from lightningrl_torch.losses import LOSSES

if TYPE_CHECKING:
    from lightningrl_torch.chosen_loss import ChosenLoss

__all__ = ["METRIC", "CriticSettings", "Settings", "VerlLoraSettings", "flatten", "loss_name"]

_OTHER_TERMS = frozenset(
    {"actor_rollout_ref.actor.entropy_coeff", "actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"}
)
"""verl's own settings that give the loss a term beside the weighted advantage."""
METRIC = "lightningrl/"
"""Before the names of our losses' metrics, among verl's."""


def loss_name(loss: str) -> str:
    """Name of a loss of ours in verl's registry."""
    return f"lightningrl_{loss if loss in LOSSES else 'own'}"


class VerlLoraSettings(LoraSettings):
    """Low-rank adapters; vLLM serves them as adapters."""

    alpha: Count | None = None
    """None = twice the rank. verl takes whole numbers."""


class CriticSettings(SettingsTable):
    """PPO's critic (Schulman et al. 2017): verl estimates token advantages by GAE inside each call."""

    model: str | None = None
    """Folder or hub name its weights start from; None = the policy's."""
    learning_rate: AtLeast0 = 1e-5
    """Learning rate of the critic's own AdamW."""
    gamma: AtLeast0 = 1.0
    """Discount over a call's tokens."""
    lam: AtLeast0 = 1.0
    """GAE's λ over a call's tokens."""


class Settings(LearnerSettings):
    """The backend's keyword parameters. Raises ConfigError for values that cannot be."""

    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """`sync`: rollouts and learning take turns on the same GPUs. `colocate_async`: the same GPUs, rollouts go on across
    updates. `separate_async`: replicas with their own GPUs sample during learning (`loop.max_staleness`)."""
    sync_every: Count = 1
    """`separate_async`: learning steps between two transfers of the weights to the replicas."""
    nodes: Count = 1
    """Machines of the learner."""
    gpus_per_node: Count = 1
    """GPUs that the learner uses on each of `nodes`; the replicas share them unless the mode is `separate_async`."""
    tensor_parallel: Count = 1
    """GPUs that one vLLM replica spans; there are GPUs ÷ tensor_parallel replicas."""
    rollout_nodes: Whole = 0
    """`separate_async`: machines of the replicas."""
    rollout_gpus_per_node: Whole = 0
    """`separate_async`: GPUs that only the replicas use."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """`transformers` comes with the CPU support package, for machines where vLLM cannot be installed."""
    strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` = CUDA where there is a GPU, else the CPU, which needs the test-support package lightningrl-verl-cpu."""
    address: str | None = None
    """Ray cluster to join, `host:port` or `auto`; None = RAY_ADDRESS if set, else a Ray of our own here."""
    start_timeout_s: Annotated[float, Field(ge=1, strict=True)] = 1800.0
    """Time that verl may take to load models and start its replicas."""

    learning_rate: AtLeast0 = 1e-6
    """AdamW's. Where nobody sets it, that of adapters (`lora`) is ten times this one."""
    adapted_rate: ClassVar[float] = 1e-5
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate, over steps."""
    max_tokens_per_microbatch: Count = 16384
    """Tokens of one forward and backward on a GPU; memory against speed, no effect on the result."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, a third more time."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of replicas and forward passes; trained weights stay float32. The CPU computes in float32."""
    lora: VerlLoraSettings | None = None
    """A table with any of `rank`, `alpha`, `target_modules`, or true: adapters learn; else all weights do."""
    critic: CriticSettings | None = None
    """None = advantages are the recipe's credit. A table with any of `model`, `learning_rate`, `gamma`, `lam`: the
    credit is each call's reward, and PPO's critic turns it into token advantages (GAE)."""
    verl: dict[str, Any] = Field(default={})
    """verl's own settings by dotted name, vLLM's below `actor_rollout_ref.rollout`; checked against verl's config. They
    win over ours."""

    @pydantic.model_validator(mode="after")
    def _check_layout(self) -> Settings:
        if self.adapters is not None and "learning_rate" not in self.model_fields_set:
            # the table is frozen for all but its own check
            object.__setattr__(self, "learning_rate", self.adapted_rate)
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator 'k1' puts the KL into the reward, for which verl's reference is not asked; set 'k2', a "
                "loss with the gradient of the same divergence, or use backend 'torch'"
            )
        if self.critic is None and dict(flatten(self.verl)).get("algorithm.use_kl_in_reward"):
            raise ValueError(
                "verl setting 'algorithm.use_kl_in_reward' takes the KL off advantages that are weighed already; "
                "remove it and set kl_coef with kl_estimator = 'k2', or add a table [backends.verl.critic]"
            )
        separate = self.mode == "separate_async"
        if separate and not (self.rollout_nodes and self.rollout_gpus_per_node):
            raise ValueError(
                "mode 'separate_async' gives the replicas GPUs of their own; set rollout_nodes and "
                "rollout_gpus_per_node"
            )
        if not separate and (self.rollout_nodes or self.rollout_gpus_per_node):
            raise ValueError(
                f"rollout_nodes and rollout_gpus_per_node are for mode 'separate_async', the mode is {self.mode!r}; "
                "remove them"
            )
        if self.sync_every > 1 and not separate:
            raise ValueError(
                f"sync_every is {self.sync_every} but mode {self.mode!r} transfers the weights every step; remove it"
            )
        gpus = self.rollout_nodes * self.rollout_gpus_per_node if separate else self.nodes * self.gpus_per_node
        if gpus % self.tensor_parallel:
            raise ValueError(
                f"{gpus} GPUs for the replicas do not divide into replicas of {self.tensor_parallel}; change "
                "tensor_parallel"
            )
        return self

    @property
    def is_loss_named(self) -> bool:
        """True if the environment names the loss: the user's own, or one with options."""
        return self.loss not in LOSSES or bool(self.loss_options)

    @functools.cached_property
    def own_loss(self) -> ChosenLoss | None:
        """The user's own, tried; imports torch. Raises ConfigError."""
        if self.loss in LOSSES:
            return None
        from lightningrl_torch.chosen_loss import ChosenLoss

        return ChosenLoss(self.loss, self.loss_arguments)

    @property
    def learns_silent_rows(self) -> bool:
        """True if the loss has a term left where the advantage is 0: of a critic, a KL, an entropy bonus, the user."""
        extra = {name for name, value in flatten(self.verl) if value}
        own = self.own_loss is not None and self.own_loss.has_other_terms
        return self.critic is not None or self.kl_coef > 0 or self.entropy_coef > 0 or own or bool(extra & _OTHER_TERMS)

    @property
    def is_averaged(self) -> bool:
        """True if verl averages over tokens, because a term of the loss has no weights of ours."""
        own = self.own_loss is not None and not self.own_loss.is_proportional
        return self.critic is not None or self.kl_coef > 0 or self.entropy_coef > 0 or own

    @property
    def clips(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, the loss's own where nobody said."""
        defaults = inspect.signature(LOSSES.get(self.loss, LOSSES["ppo_clip"])).parameters
        if "clip_low" not in defaults:  # a loss without a ratio: verl wants numbers, nobody reads them
            defaults = inspect.signature(LOSSES["ppo_clip"]).parameters
        low, high = (self.loss_arguments.get(name, defaults[name].default) for name in ("clip_low", "clip_high"))
        return low, high

    @property
    def is_async(self) -> bool:
        return self.mode != "sync"

    @property
    def gpus(self) -> int:
        """GPUs of the whole layout."""
        return self.nodes * self.gpus_per_node + self.rollout_nodes * self.rollout_gpus_per_node


def flatten(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables and dotted names alike, as dotted names."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        pairs.extend(flatten(value, name) if isinstance(value, Mapping) and value else [(name, value)])
    return pairs
