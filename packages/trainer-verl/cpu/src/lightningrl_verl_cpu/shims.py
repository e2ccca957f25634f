"""Shims for what verl 0.9.1 assumes of its device and a CPU does not have, each for one place. Safe to apply twice."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from lightningrl_verl_cpu.settings import REPLICA

__all__ = ["apply"]


def apply() -> None:
    """Mend verl in this process."""
    use_cuda_engines()
    use_gloo()
    use_sdpa_in_critics()
    skip_pinning()
    register_replica()


def use_cuda_engines() -> None:
    """workers/engine/base.py:405: the FSDP engines are registered for cuda and npu; the variable is verl's own
    switch."""
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


def use_gloo() -> None:
    """utils/distributed.py:89: "cpu:gloo,<device>:<backend>" names the CPU twice, which torch refuses."""
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray
    if isinstance(original, functools.partial):
        return
    distributed.initialize_global_process_group_ray = functools.partial(_initialize, original)


def _initialize(original: Any, timeout_second: float | None = None, backend: str | None = None) -> None:
    original(timeout_second, backend or "cpu:gloo")


def use_sdpa_in_critics() -> None:
    """utils/model.py:649: a value model is loaded with flash_attention_2, whatever the configuration says."""
    import verl.utils.model

    verl.utils.model.load_valuehead_model = _load_value_model


def _load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
    )


def skip_pinning() -> None:
    """workers/engine/fsdp/transformer_impl.py:462: a reference model is offloaded to pinned memory; pinning needs an
    accelerator."""
    torch.Tensor.pin_memory = _unpinned  # type: ignore[assignment, method-assign]


def _unpinned(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor


def register_replica() -> None:
    """workers/rollout/base.py:98: the worker's side has a dictionary, but no function that registers in it."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[(REPLICA, "async")] = "lightningrl_verl_cpu.rollout.TransformersAdapter"
    RolloutReplicaRegistry.register(REPLICA, _load_replica)


def _load_replica() -> Any:
    from lightningrl_verl_cpu.rollout import TransformersReplica

    return TransformersReplica
