"""Every setting of the torch backend, with a default that someone has trained with. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pydantic

from lightningrl_torch.learner_settings import AtLeast0, Count, LearnerSettings, SettingsTable, Whole

__all__ = ["CriticSettings", "EngineSettings", "Settings"]


class CriticSettings(SettingsTable):
    """A critic: the return to be expected, learned from credit's value targets (PPO, Schulman et al. 2017, eq. 9)."""

    model: str = "trunk"
    """`trunk` = a value head on the policy's own layers; else a folder or hub name: a model of its own, of the policy's
    tokens."""
    joint: bool = False
    """`trunk`: the value loss moves the policy's layers, too, as in PPO's shared network; else the head reads them as
    they are."""
    coefficient: AtLeast0 = 0.5
    """Weight of the value loss beside the policy's, where it is `joint` (PPO's c1; 0.5 in OpenAI's baselines)."""
    learning_rate: AtLeast0 | None = None
    """Learning rate of the head, or of the model of its own. None = 1e-3 for a head, 1e-5 for a model (verl's)."""
    clip: AtLeast0 | None = 0.5
    """Largest move of a value from before the step that still counts (verl's `cliprange_value`); None = any."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> CriticSettings:
        if self.joint and self.model != "trunk":
            raise ValueError(
                f"critic.joint is for a head on the policy's layers, not for a model of its own ({self.model!r}); "
                "remove one"
            )
        return self

    @property
    def rate(self) -> float:
        """`learning_rate`, or what it is where nobody said."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-3 if self.model == "trunk" else 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Batching of an engine."""

    max_batch: int = 128
    """Most requests decoded together; more wait."""
    prefill_tokens: int = 4096
    """Most prompt tokens (with padding) computed in one forward."""
    prefix_cache_tokens: int = 16384
    """Prompt tokens whose keys and values are remembered while the weights stay, so that a group's prompt is computed
    once."""
    stream_interval_s: float = 0.02
    """Least time between two chunks of a request."""
    threads: int | None = None
    """CPU threads of the decoding thread; None = torch's own choice."""
    autocast: bool = False
    """Compute in bfloat16."""


class Settings(LearnerSettings):
    """The backend's keyword parameters. Raises ConfigError for values that cannot be."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` = the first CUDA GPU where there is one, else the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` computes under autocast; trained weights stay float32 (with LoRA, the frozen ones become bfloat16)."""
    threads: Count | None = None
    """CPU threads of the learner; None = torch's own choice, less the engine's where that serves meanwhile."""
    engine_threads: Count | None = None
    """CPU threads of the engine. None = 1 for a policy of fewer than 50 million parameters: agents, server and engine
    share the machine during rollouts, and threads that wait for each other on busy cores cost more than they give. A
    larger one has all of the learner's, or half of them where it serves meanwhile."""

    max_staleness: Whole = 0
    """The run's `loop.max_staleness`. Above 0 the engine serves on a copy of the weights while the learner learns."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate, over calls of `learn`."""
    max_tokens_per_microbatch: Count | None = None
    """Tokens, padding included, in one forward and backward; memory against speed, no effect on the result. None = as
    many as keep about 2 GB for the gradient, at most 4096; on a GPU 4096."""
    share_prefixes: bool = True
    """Compute the common beginning of samples once (models whose layers all attend to all earlier tokens, by torch's
    attention); no effect on the result beyond rounding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""

    critic: CriticSettings | None = None
    """None = none. A table with any of `model`, `joint`, `coefficient`, `learning_rate`, `clip`: credit that needs
    values has them, and teaches it (`turn_gae`)."""

    max_batch: Count = 128
    """Most requests decoded together; more wait."""
    prefill_tokens: Count = 4096
    """Most prompt tokens computed in one forward."""
    prefix_cache_tokens: Whole = 16384
    """Prompt tokens remembered while the weights stay, so that a group's prompt is computed once."""
    stream_interval_s: AtLeast0 = 0.02
    """Least time between two chunks of a streamed completion."""
    structured_output: bool = True
    """Bind an answer to the format, or forced tool call, that the agent asks for; `false` only shows it to the
    policy."""
