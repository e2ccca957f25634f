"""A node's Ray actor: it runs the supervisor of `lightningrl work`. Workers end with it, its driver or its node."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from lightningrl.errors import ConfigError, LightningError
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.launcher import WorkerPlan
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_client.runtime.supervisor import Supervisor, end_attempts
from lightningrl_verl.ray_code import unpack_folder

__all__ = ["NodeActor", "Place", "find_place", "unreachable"]

REACH_S = 10.0
REACH_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process runs."""

    node_id: str
    address: str
    version: str
    """Version of lightningrl."""


def find_place() -> Place:
    """Find the place of the calling process."""
    untyped: Any = ray.util.get_node_ip_address
    return Place(node_id=ray.get_runtime_context().get_node_id(), address=untyped(), version=version("lightningrl"))


class NodeActor:
    """Supervises its node's workers. If it or its node dies, Ray restarts it, perhaps elsewhere, and repeats `run`."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._is_running = False
        self._ended = asyncio.Event()

    async def place(self) -> Place:
        return find_place()

    async def run(self, workers: int, plan: WorkerPlan, home: str, archive: list[ray.ObjectRef[bytes]]) -> str | None:
        """Until `stop`; or what is wrong, in a sentence. The recipe's folder is at its own path on the node `home` and
        where there is no `archive`, and is unpacked from it elsewhere. A call that is repeated waits with the first."""
        if not self._is_running:
            self._is_running = True
            try:
                await self._start(workers, plan, home, archive)
            except LightningError as error:
                return str(error)
        await self._ended.wait()
        return None

    async def stop(self, grace_s: float) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop(grace_s)
        self._ended.set()

    async def _start(self, workers: int, plan: WorkerPlan, home: str, archive: list[ray.ObjectRef[bytes]]) -> None:
        settings, place = plan.settings, find_place()
        problem = await reach(settings.server_url)
        if problem:
            raise ConfigError(unreachable(settings.server_url, place.address, problem))
        if place.node_id != home:
            plan = replace(plan, log_folder=None)  # Ray keeps what they print
            if archive:
                folder = await asyncio.to_thread(unpack_folder, await archive[0])
                settings = replace(settings, base_dir=str(folder))
        check_file(settings)
        async with ServerClient(settings.server_url, settings.worker_key, patience_s=settings.patience_s) as client:
            sentence = (
                f"the worker process was lost with its Ray actor, which was started again on node {place.address}"
            )
            await end_attempts(client, f"{settings.worker_id}-", sentence)
        self._supervisor = Supervisor(replace(plan, settings=settings), workers)
        self._supervisor.start()


async def reach(server_url: str) -> str | None:
    """Why the server cannot be reached from here; None = it can."""
    parts = urlsplit(server_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    problem: str | None = None
    deadline = time.monotonic() + REACH_S
    while time.monotonic() < deadline:
        try:
            (await asyncio.to_thread(socket.create_connection, (parts.hostname, port), 3.0)).close()
        except OSError as error:  # it may just be starting again
            problem = str(error)
            await asyncio.sleep(REACH_PAUSE_S)
        else:
            return None
    return problem


def unreachable(server_url: str, node: str, problem: str = "that is this machine only") -> str:
    return (
        f"workers on node {node} cannot reach the server at {server_url!r} ({problem}); have it listen on an address "
        "that the nodes reach: --host 0.0.0.0 (runtime.server_host)"
    )


def check_file(settings: WorkerSettings) -> None:
    """Raise ConfigError where this node has not the agent's file."""
    source = settings.agent.rpartition(":")[0]
    here = Path(settings.base_dir)
    if here.is_dir() and (not source.endswith(".py") or (here / source).is_file()):
        return
    what = f"file {str(here / source)!r}" if here.is_dir() else f"folder {settings.base_dir!r}"
    raise ConfigError(
        f"agent {settings.agent!r}: node {find_place().address} has no {what}; put the recipe's folder on a file "
        "system that all nodes "
        "share, or have it shipped with runtime.launchers.ray.code='ship'"
    )
