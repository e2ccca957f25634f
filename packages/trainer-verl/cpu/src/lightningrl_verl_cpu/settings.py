"""Settings of a run without a GPU: environment variables of every Ray process, and overrides of verl's
configuration."""

from __future__ import annotations

import os
from typing import Any, Literal

__all__ = ["CHECKPOINT_ENGINE", "REPLICA", "environment", "is_active", "machine", "overrides"]

REPLICA = "lightningrl_transformers"
"""`rollout.name` of the replica that serves a transformers model."""

CHECKPOINT_ENGINE = "lightningrl_gloo"
"""`rollout.checkpoint_engine.backend` that carries weights over gloo."""

_PASSED_ON = ("HF_HUB_OFFLINE", "HF_HOME", "TRANSFORMERS_OFFLINE")

_FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def is_active() -> bool:
    """verl was told to run on the CPU."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def environment() -> dict[str, str]:
    """Variables that must be set in the driver before verl or Ray is imported, and in every Ray process."""
    fixed = {
        "VERL_PLATFORM": "cpu",
        # the entry point does the same, but verl/__init__.py swallows its errors; this one raises them
        "VERL_USE_EXTERNAL_MODULES": "lightningrl_verl_cpu.platform",
        # verl's own switch (workers/engine/base.py:405): its FSDP engines are registered for "cuda" and "npu" only
        "VERL_ENGINE_DEVICE": "cuda",
        # trainer_separate_async.py:181 calls logger.info(..., flush=True), which raises unless INFO is off
        "VERL_LOGGING_LEVEL": "WARN",
        # inductor needs a C++ compiler and half a minute; vLLM's engine dies without one
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # several engines share the cores: more threads make all of them slower
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        # Ray's memory monitor kills our actors when another program fills the machine
        "RAY_memory_monitor_refresh_ms": "0",
        # keep CUDA_VISIBLE_DEVICES as it is for actors with num_gpus=0; Ray warns otherwise
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return fixed | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def machine(gpus: int) -> dict[str, int]:
    """Resources of a Ray that is started here: verl asks Ray for "GPU" (single_controller/ray/base.py:230), each
    worker bundle also for 3 CPUs."""
    return {"CPU": 16 + 4 * gpus, "GPU": gpus}


def overrides(
    engine: Literal["vllm", "transformers"], *, gpus: int, critic: bool, reference: bool, separate: bool = False
) -> dict[str, Any]:
    """Overrides of verl's `ppo_trainer` configuration, dotted key to value. Some keys are new to it (`+key` in hydra's
    words).

    `gpus` is the number of logical GPUs in all: trainer ranks and, with `separate`, the replicas' own
    (`separate_async`).
    """
    model, actor, rollout = (f"actor_rollout_ref.{name}" for name in ("model", "actor", "rollout"))
    values: dict[str, Any] = {
        "trainer.device": "cpu",
        # a Ray of its own: without an address Ray joins whatever was started last on this machine, and that has no
        # logical GPUs
        "ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.num_gpus": machine(gpus)["GPU"],
        "ray_kwargs.ray_init.num_cpus": machine(gpus)["CPU"],
        "ray_kwargs.ray_init.include_dashboard": False,
        # each of them is a process that imports torch and verl
        "reward.num_workers": 1,
        "data.dataloader_num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"{model}.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": False,
        **_fsdp2(f"{actor}.fsdp_config"),
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.agent.num_workers": 1,
        **(_vllm(rollout) if engine == "vllm" else {f"{rollout}.name": REPLICA, f"{rollout}.free_cache_engine": True}),
    }
    if critic:
        values |= {
            "critic.strategy": "fsdp2",
            "critic.model.use_remove_padding": False,
            "critic.model.enable_gradient_checkpointing": False,
            "critic.model.override_config.attn_implementation": "sdpa",
            **_fsdp2("critic.fsdp"),
        }
    if reference:
        values |= {"actor_rollout_ref.ref.use_torch_compile": False, **_fsdp2("actor_rollout_ref.ref.fsdp_config")}
    if separate:
        values |= {
            f"{rollout}.checkpoint_engine.backend": CHECKPOINT_ENGINE,
            f"{rollout}.checkpoint_engine.custom_backend_module": "lightningrl_verl_cpu.checkpoint_engine",
        }
    return values


def _fsdp2(prefix: str) -> dict[str, Any]:
    # FSDP1 refuses CPU modules: sync_module_states=True (workers/engine/fsdp/transformer_impl.py:444)
    return {
        f"{prefix}.strategy": "fsdp2",
        f"{prefix}.use_torch_compile": False,
        f"{prefix}.mixed_precision": dict(_FP32),
    }


def _vllm(rollout: str) -> dict[str, Any]:
    return {
        f"{rollout}.name": "vllm",
        f"{rollout}.enforce_eager": True,
        # vLLM's CPU worker cannot sleep, and a call between sleep and wake-up never returns
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.enable_sleep_mode": False,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        # the default of 128 tokens hides the prefix cache from short prompts
        f"{rollout}.engine_kwargs.vllm.block_size": 32,
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": 128 << 20,
    }
