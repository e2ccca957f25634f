"""The Ray actor of one worker: on its node it runs the ordinary worker process, relays its lines and log, and kills it.

driver: RayLine ─ read, write, kill, wait ─► actor: RelayActor ─ pipes ─► `python -m lightningrl.runtime.worker`

A crash of the agent ends the process, never the actor; the end of the actor, its driver or its node ends the process.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from lightningrl.errors import ConfigError
from lightningrl.runtime.launcher import WorkerExit
from lightningrl.runtime.process import WorkerProcess
from lightningrl.runtime.settings import WorkerSettings
from lightningrl_verl.ray_code import unpack_folder

__all__ = ["Place", "RelayActor", "Said", "find_place"]

MOST_LOG = 256 * 1024
"""Bytes of log that wait for the driver before the agent's printing does."""
LAST_WORDS_S = 0.5
REACH_S = 10.0
REACH_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a process runs."""

    node_id: str
    address: str
    version: str
    """Of lightningrl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a worker has said since it was asked last."""

    lines: tuple[bytes, ...] = ()
    log: bytes = b""
    has_ended: bool = False
    """It writes no more lines."""


def find_place() -> Place:
    """Of the calling process."""
    untyped: Any = ray.util.get_node_ip_address
    return Place(node_id=ray.get_runtime_context().get_node_id(), address=untyped(), version=version("lightningrl"))


class RelayActor:
    """Runs one worker at a time. Problems that a person can mend come back as a sentence."""

    def __init__(self) -> None:
        self._relay: Relay | None = None

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

    async def start(self, settings: WorkerSettings, environment: Mapping[str, str], archive: list[ray.ObjectRef[bytes]]) -> str | None:
        """Start a worker in the recipe's folder: `archive` unpacked, or without one the same path here. Returns what is wrong."""
        if self._relay is not None:
            self._relay.leave()
        try:
            if archive:
                settings = replace(settings, base_dir=str(await asyncio.to_thread(unpack_folder, await archive[0])))
            missing = missing_file(settings)
            if missing:
                return missing
            self._relay = Relay(await WorkerProcess.spawn(settings, environment=environment, log=subprocess.PIPE))
        except ConfigError as error:
            return str(error)
        except OSError as error:
            return f"a worker cannot be started on node {find_place().address}: {error}"
        return None

    async def read(self) -> Said:
        """Waits until the worker says something."""
        return Said(has_ended=True) if self._relay is None else await self._relay.read()

    async def write(self, line: bytes) -> None:
        if self._relay is not None:
            self._relay.process.write(line)

    async def kill(self) -> tuple[WorkerExit, Said]:
        return await self._end(kill=True)

    async def wait(self) -> tuple[WorkerExit, Said]:
        return await self._end(kill=False)

    async def _end(self, *, kill: bool) -> tuple[WorkerExit, Said]:
        """How the worker ended, and the rest of what it said."""
        if self._relay is None:
            return WorkerExit(how="was never started", is_foreign=True), Said(has_ended=True)
        return await self._relay.end(kill=kill)


class Relay:
    """A worker process and what it has said that nobody fetched yet."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._lines: list[bytes] = []
        self._log = bytearray()
        self._has_ended = False
        self._changed = asyncio.Event()
        self._pumps = [asyncio.create_task(self._pump_lines()), asyncio.create_task(self._pump_log())]

    async def read(self) -> Said:
        while not (self._lines or self._log or self._has_ended):
            self._changed.clear()
            await self._changed.wait()
        return self._take()

    async def end(self, *, kill: bool) -> tuple[WorkerExit, Said]:
        ended = await (self.process.kill() if kill else self.process.wait())
        await asyncio.wait(self._pumps, timeout=LAST_WORDS_S)  # what it started may hold its stderr open
        return ended, self._take()

    def leave(self) -> None:
        """Nobody listens any more."""
        for pump in self._pumps:
            pump.cancel()
        self._has_ended = True
        self._changed.set()

    def _take(self) -> Said:
        said = Said(lines=tuple(self._lines), log=bytes(self._log), has_ended=self._has_ended)
        self._lines.clear()
        self._log.clear()
        self._changed.set()
        return said

    async def _pump_lines(self) -> None:
        while line := await self.process.read():
            self._lines.append(line)
            self._changed.set()
        self._has_ended = True
        self._changed.set()

    async def _pump_log(self) -> None:
        stderr = self.process.stderr
        assert stderr is not None
        while chunk := await stderr.read(64 * 1024):
            self._log += chunk
            self._changed.set()
            while len(self._log) > MOST_LOG:
                self._changed.clear()
                await self._changed.wait()


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
