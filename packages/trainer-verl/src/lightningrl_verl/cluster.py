"""Ray as this run uses it: joined or started, with verl's environment in every process, and refused in a sentence."""

from __future__ import annotations

import os
import uuid
from typing import Any

from lightningrl.errors import BackendError
from lightningrl_verl.ray_connection import Connection, join_or_start
from lightningrl_verl.settings import Settings

__all__ = ["actor_environment", "check_capacity", "connect"]


def connect(settings: Settings, config: Any, environment: dict[str, str]) -> Connection:
    """Join the cluster of `settings.address` or RAY_ADDRESS, or start a Ray of our own. Raises ConfigError for a
    cluster that cannot be reached."""
    from omegaconf import OmegaConf

    options: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    own = options.pop("address", None)
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        for local in ("num_cpus", "num_gpus", "include_dashboard"):  # the cluster's own business
            options.pop(local, None)
    # verl's actors have fixed names: a namespace of our own lets several runs share a cluster
    options |= {
        "namespace": f"lightningrl-{uuid.uuid4().hex[:12]}",
        "runtime_env": actor_environment(config, environment),
    }
    return join_or_start(address or own, setting="backends.verl.address", **options)


def actor_environment(config: Any, environment: dict[str, str]) -> dict[str, Any]:
    """verl's runtime environment and ours. Actors inherit it from the one that starts them, also where `--workers ray`
    joined Ray before us."""
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime: dict[str, Any] = get_ppo_ray_runtime_env(config)
    return {**runtime, "env_vars": {**runtime["env_vars"], **environment, "TRANSFER_QUEUE_ENABLE": "1"}}


def check_capacity(settings: Settings) -> None:
    """Raises BackendError where the cluster has fewer GPUs than the layout asks for."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus < settings.gpus:
        raise BackendError(
            f"the layout asks for {settings.gpus} GPUs and the Ray cluster has {gpus}; add nodes, or lower nodes and "
            "gpus_per_node"
        )
