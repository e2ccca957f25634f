"""The Ray actor of a node: it runs the same supervisor that `lightningrl work` is. Its end, its driver's or its node's ends the workers."""

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

from lightningrl.errors import ConfigError
from lightningrl.runtime.launcher import WorkerPlan
from lightningrl.runtime.settings import WorkerSettings
from lightningrl.runtime.supervisor import Supervisor
from lightningrl_verl.ray_code import unpack_folder

__all__ = ["NodeActor", "Place", "find_place"]

REACH_S = 10.0
REACH_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process runs."""

    node_id: str
    address: str
    version: str
    """Of lightningrl."""


def find_place() -> Place:
    """Of the calling process."""
    untyped: Any = ray.util.get_node_ip_address
    return Place(node_id=ray.get_runtime_context().get_node_id(), address=untyped(), version=version("lightningrl"))


class NodeActor:
    """Supervises the workers of its node. Problems that a person can mend come back as a sentence."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._ended = asyncio.Event()

    async def place(self) -> Place:
        return find_place()

    async def reach(self, server_url: str) -> str | None:
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

    async def start(self, workers: int, plan: WorkerPlan, archive: list[ray.ObjectRef[bytes]]) -> str | None:
        """Start workers in the recipe's folder: `archive` unpacked, or without one the same path here. Returns what is wrong."""
        try:
            if archive:
                folder = await asyncio.to_thread(unpack_folder, await archive[0])
                plan = replace(plan, settings=replace(plan.settings, base_dir=str(folder)))
        except ConfigError as error:
            return str(error)
        missing = missing_file(plan.settings)
        if missing is None:
            self._supervisor = Supervisor(plan, workers)
            self._supervisor.start()
        return missing

    async def wait(self) -> None:
        """Returns when the workers were stopped."""
        await self._ended.wait()

    async def stop(self, grace_s: float) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop(grace_s)
        self._ended.set()


def missing_file(settings: WorkerSettings) -> str | None:
    """A sentence where this node has not the agent's file."""
    source = settings.agent.rpartition(":")[0]
    here = Path(settings.base_dir)
    if here.is_dir() and (not source.endswith(".py") or (here / source).is_file()):
        return None
    what = f"file {str(here / source)!r}" if here.is_dir() else f"folder {settings.base_dir!r}"
    return (
        f"agent {settings.agent!r}: node {find_place().address} has no {what}; put the recipe's folder on a file system that all nodes "
        "share, or have it shipped with runtime.launchers.ray.code='ship'"
    )
