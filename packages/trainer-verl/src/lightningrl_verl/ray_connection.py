"""A Ray cluster, joined, started, or refused in a sentence within seconds (Ray would try for a minute, then exit), with
verl's environment in every process."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import ray

from lightningrl.errors import BackendError, ConfigError
from lightningrl_client.runtime.address import machine_address
from lightningrl_verl.settings import Settings

__all__ = [
    "Connection",
    "Node",
    "actor_environment",
    "check_capacity",
    "check_gcs",
    "connect",
    "find_nodes",
    "join_or_start",
]

PROBE_S = 4.0
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
"""gRPC's standard health service, which Ray's head offers."""
SERVING = b"\x08\x01"


_JOINING = threading.Lock()


class Connection:
    """A process's connection to a cluster: one for trainer and workers, in whatever order they come and go."""

    current: Connection | None = None
    """Connection of this process; None = it is not connected, or was before anybody joined here."""

    def __init__(self) -> None:
        self.holders = 0

    def leave(self) -> None:
        """Once for each that joined; the last one disconnects."""
        with _JOINING:
            self.holders -= 1
            if not self.holders and self is Connection.current:
                Connection.current = None
                ray.shutdown()


def join_or_start(address: str | None, *, setting: str = "runtime.launchers.ray.address", **options: Any) -> Connection:
    """Connect this process: to `address`, to RAY_ADDRESS, to the Ray that runs on this machine, or to one of our own
    that it starts. Where it is connected, it stays so.

    `options` are `ray.init`'s; `setting` names the address in errors. Blocks for seconds. Raises ConfigError.
    """
    with _JOINING:
        if not ray.is_initialized():
            _connect(address, setting, options)
            Connection.current = Connection()
        joined = Connection.current or Connection()
        joined.holders += 1
        return joined


def _connect(address: str | None, setting: str, options: dict[str, Any]) -> None:
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted and wanted not in {"auto", "local"}:
        check_gcs(wanted, setting=setting)
    if not wanted or wanted == "local":
        options = {"include_dashboard": False, **options}
    try:
        ray.init(wanted, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        asked = f"the Ray cluster at {wanted!r} cannot be joined" if wanted else "Ray can neither be joined nor started"
        raise ConfigError(f"{asked}: {error}"[:500]) from error


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    resources: Mapping[str, float]
    """All of it, whoever uses it."""


def find_nodes() -> list[Node]:
    """List the nodes that are up."""
    untyped: Any = ray.nodes
    return [Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in untyped() if node["Alive"]]


def check_gcs(address: str, *, setting: str = "runtime.launchers.ray.address") -> None:
    """Raise ConfigError unless a Ray head answers at `address` (`host:port`)."""
    remedy = f"start one with `ray start --head`, or mend {setting} (or RAY_ADDRESS)"
    if "://" in address:
        raise ConfigError(
            f"Ray address {address!r}: workers are not started through Ray Client; run on a node of the cluster with "
            "'auto'"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"Ray address {address!r} is not host:port, 'auto' or 'local'; write for example '10.0.0.1:6379'"
        )
    # a head may listen on its outer address alone
    hosts = [host, machine_address()] if host in {"127.0.0.1", "localhost"} else [host]
    problems = [problem for problem in (_probe(f"{name}:{port}") for name in hosts) if problem]
    if len(problems) == len(hosts):
        raise ConfigError(f"no Ray cluster answers at {address!r} ({problems[0]}); {remedy}")


def _probe(target: str) -> str | None:
    """Fault of the head there, in words; None = it answers."""
    untyped: Any = grpc
    with untyped.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer: bytes = channel.unary_unary(HEALTH_CHECK)(b"", timeout=PROBE_S)
        except untyped.RpcError as error:
            return str(error.details())[:200]
    return None if answer == SERVING else "what listens there is not ready"


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
