"""Every setting of the torch backend, with a default that someone has trained with. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from lightningrl_torch.learner_settings import AtLeast0, Count, LearnerSettings, SettingsTable, Whole

__all__ = ["CriticSettings", "EngineSettings", "Settings", "VllmSettings"]


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


class VllmSettings(SettingsTable):
    """vLLM as the engine (`engine = "vllm"`). Numbers, context and batch are the learner's `dtype`, `context_length`,
    `max_batch` and `prefill_tokens`."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.4
    """Share of the GPU's memory that vLLM takes for weights, keys and values; the learner's is beside it, unless vLLM
    sleeps."""
    kv_cache_gb: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] | None = None
    """GiB for keys and values. None = what `gpu_memory_utilization` leaves beside the weights; 1 on a CPU."""
    enforce_eager: bool = False
    """No compiled graphs: a start of seconds in place of a minute, and slower decoding. On a CPU always."""
    sleep: bool = True
    """On a GPU vLLM gives its memory back while the learner steps, where nothing is sampled meanwhile."""


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
    quantize: Literal["nf4", "int8"] | None = None
    """Bits of the frozen weights under adapters (`lora`), with bitsandbytes: `nf4` 4.1 of them (QLoRA), `int8` 8.5.
    None = those of `dtype`."""
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

    rollouts_per_step: Count | None = None
    """The run's `loop.tasks_per_step · group_size`: a learning rate that nobody set is less where these are few."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit`: its two moments take 2 bytes a weight in place of 8 (bitsandbytes; docs/how-to/laptop.md)."""
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

    engine: Literal["torch", "vllm"] = "torch"
    """The part that decodes: our engine, on the learner's weights, or vLLM, in this process, with a copy of them after
    each step (docs/how-to/vllm.md). Learning and logprobs are the same."""
    vllm: VllmSettings | None = None
    """A table with any of `gpu_memory_utilization`, `kv_cache_gb`, `enforce_eager`, `sleep`; None = its defaults."""
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

    @property
    def has_grammars(self) -> bool:
        """True if answers are bound to the formats that agents ask for, which vLLM's are not."""
        return self.structured_output and self.engine == "torch"

    @pydantic.model_validator(mode="after")
    def _check_engine(self) -> Settings:
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(f"learner.vllm is for engine 'vllm', and the engine is {self.engine!r}; remove one")
        return self

    @pydantic.model_validator(mode="after")
    def _check_quantize(self) -> Settings:
        if self.quantize is not None and self.adapters is None:
            raise ValueError(
                f"quantize is {self.quantize!r}, and weights of so few bits cannot learn; set learner.lora = true, or "
                "remove it"
            )
        if self.quantize is not None and self.engine == "vllm":
            raise ValueError(
                f"quantize is {self.quantize!r}, and vLLM serves the weights as their folder has them; set "
                'learner.engine = "torch", or remove one'
            )
        return self
