"""Agent workers over a Ray cluster: the `ray` launcher. The pool supervises them as it does processes of its own machine.

WorkerPool ─► RayLauncher ─► one actor per worker, spread over the nodes ─► the ordinary worker process, relayed

A node or actor that goes down ends its workers' attempts as `infrastructure_error`; the pool starts them elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from lightningrl.errors import ConfigError
from lightningrl.runtime.address import is_loopback
from lightningrl.runtime.launcher import WorkerExit, WorkerPoolError
from lightningrl.runtime.process import bound_log, open_log
from lightningrl.runtime.settings import WorkerSettings
from lightningrl_verl.ray_actor import Place, RelayActor, Said, find_place
from lightningrl_verl.ray_code import pack_folder
from lightningrl_verl.ray_connection import find_nodes, join_or_start

__all__ = ["RayLauncher", "RayLine"]

LAST_WORDS_S = 1.0
KILL_S = 10.0
"""How long an actor may take to kill its worker before it is killed itself."""
PATIENCE_S = 15.0
"""Waiting for a place longer than this is said."""
MOST_TRIES = 3

logger = logging.getLogger(__name__)


class RayLauncher:
    """Starts workers as Ray actors; one actor per worker, kept while its worker's processes come and go."""

    def __init__(
        self,
        *,
        address: str | None = None,
        num_cpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        code: Literal["ship", "shared"] = "ship",
        exclude: Sequence[str] = (),
        environment: Sequence[str] = (),
        start_timeout_s: float = 300.0,
    ) -> None:
        """See `lightningrl_verl.plugin.create_ray_launcher`. Raises ConfigError."""
        if code not in {"ship", "shared"}:
            raise ConfigError(f"runtime.launchers.ray.code is {code!r}; use 'ship' or 'shared'")
        if num_cpus < 0:
            raise ConfigError(f"runtime.launchers.ray.num_cpus is {num_cpus!r}; use 0 or more")
        absent = [name for name in environment if name not in os.environ]
        if absent:
            raise ConfigError(f"runtime.launchers.ray.environment names {absent[0]!r}, which is not set here; export it, or leave it out")
        self._address = address
        self._options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "resources": dict(resources or {}),
            "scheduling_strategy": "SPREAD",
        }
        self._is_shared = code == "shared"
        self._exclude = tuple(exclude)
        self._environment = {name: os.environ[name] for name in environment}
        self._start_timeout_s = start_timeout_s
        self._server_url = ""
        self._here: Place | None = None
        self._owns_ray = False
        self._actors: dict[str, tuple[Any, Place]] = {}
        self._archive: ray.ObjectRef[bytes] | None = None
        self._packing = asyncio.Lock()

    async def open(self, server_url: str) -> None:
        """Join the cluster, or start one on this machine. Raises ConfigError."""
        self._server_url = server_url
        self._owns_ray = await asyncio.to_thread(join_or_start, self._address)
        self._here = find_place()
        if is_loopback(server_url) and not self._options["resources"]:
            others = set(find_nodes().values()) - {self._here.address}
            if others:
                raise ConfigError(self._unreachable(min(others)))

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> RayLine:
        settings = replace(settings, agent=relative_agent(settings))
        for _ in range(MOST_TRIES):
            actor, place = self._actors.get(settings.worker_id) or await self._place(settings.worker_id)
            archive = await self._archived(Path(settings.base_dir), place)
            try:
                problem = await actor.start.remote(settings, {**self._environment, **environment}, archive)
            except RayActorError as error:
                logger.warning("worker %s: its Ray actor on node %s is gone: %s", settings.worker_id, place.address, first_line(error))
                self.forget(settings.worker_id)
                continue
            if problem:
                raise ConfigError(problem)
            return RayLine(self, settings.worker_id, actor, place, log)
        raise WorkerPoolError(
            f"worker {settings.worker_id} cannot be started: its Ray actor died {MOST_TRIES} times; see `ray list actors`"
        )

    async def close(self) -> None:
        for worker_id in tuple(self._actors):
            self.forget(worker_id)
        self._archive = None
        if self._owns_ray:
            self._owns_ray = False
            await asyncio.to_thread(ray.shutdown)

    def forget(self, worker_id: str) -> None:
        """Kill a worker's actor, which kills its worker; the next life gets a new one, maybe elsewhere."""
        actor, _ = self._actors.pop(worker_id, (None, None))
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    async def _place(self, worker_id: str) -> tuple[Any, Place]:
        """A new actor, once it runs and reaches the server."""
        actor: Any = ray.remote(RelayActor)
        actor = actor.options(**self._options).remote()
        try:
            place = await self._until_placed(worker_id, actor.place.remote())
            self._check_place(place)
            if is_loopback(self._server_url) and self._here is not None and place.address != self._here.address:
                raise ConfigError(self._unreachable(place.address))
            problem = await actor.reach.remote(self._server_url)
            if problem:
                raise ConfigError(self._unreachable(place.address, problem))
        except BaseException:
            ray.kill(actor)
            raise
        self._actors[worker_id] = (actor, place)
        return actor, place

    async def _until_placed(self, worker_id: str, answer: Any) -> Place:
        """Waits for the actor's first answer. Raises ConfigError or WorkerPoolError."""
        waiting = asyncio.ensure_future(follow(answer))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=min(PATIENCE_S, self._start_timeout_s))
            if not done and self._start_timeout_s > PATIENCE_S:
                logger.warning("worker %s waits for a place on the Ray cluster: %s", worker_id, self._shortage())
                done, _ = await asyncio.wait({waiting}, timeout=self._start_timeout_s - PATIENCE_S)
            if not done:
                raise WorkerPoolError(
                    f"worker {worker_id} has found no place on the Ray cluster for {self._start_timeout_s:g} s: {self._shortage()}; "
                    "start fewer workers, lower runtime.launchers.ray.num_cpus, or add nodes"
                )
            place: Place = waiting.result()
        except RayError as error:
            raise ConfigError(
                f"a Ray node cannot run workers: {first_line(error)}; install lightningrl-verl and what the agent imports on every node"
            ) from error
        finally:
            waiting.cancel()
        return place

    def _shortage(self) -> str:
        asked = {"CPU": self._options["num_cpus"], **self._options["resources"]}
        untyped: Any = ray.available_resources
        free = untyped()
        return f"it asks for {_resources(asked)}, free are {_resources({name: free.get(name, 0.0) for name in asked})}"

    def _check_place(self, place: Place) -> None:
        assert self._here is not None
        if place.version != self._here.version:
            raise ConfigError(
                f"node {place.address} has lightningrl {place.version}, this process {self._here.version}; install the same on every node"
            )

    def _unreachable(self, node: str, problem: str = "that is this machine only") -> str:
        return (
            f"workers on node {node} cannot reach the server at {self._server_url!r} ({problem}); have it listen on an address "
            "that the nodes reach: --host 0.0.0.0 (runtime.server_host)"
        )

    async def _archived(self, folder: Path, place: Place) -> list[Any]:
        """The folder for a node that does not share it: packed once, fetched by the nodes from Ray's object store."""
        if self._is_shared or self._here is None or place.node_id == self._here.node_id:
            return []
        async with self._packing:
            if self._archive is None:
                packed = await asyncio.to_thread(pack_folder, folder, exclude=self._exclude)
                self._archive = await asyncio.to_thread(ray.put, packed)
        return [self._archive]


class RayLine:
    """The line to a worker behind an actor: what it says is fetched as it says it."""

    def __init__(self, launcher: RayLauncher, worker_id: str, actor: Any, place: Place, log: Path | None) -> None:
        self._launcher = launcher
        self._worker_id = worker_id
        self._actor = actor
        self._place = place
        self._log = log
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._exit: WorkerExit | None = None
        self._following = asyncio.create_task(self._follow())

    async def read(self) -> bytes:
        line = await self._lines.get()
        if not line:
            self._lines.put_nowait(b"")
        return line

    def write(self, line: bytes) -> None:
        if self._exit is None and ray.is_initialized():
            self._actor.write.remote(line)

    async def kill(self) -> WorkerExit:
        return await self._ended("kill", KILL_S)

    async def wait(self) -> WorkerExit:
        return await self._ended("wait", None)

    async def _ended(self, method: Literal["kill", "wait"], timeout_s: float | None) -> WorkerExit:
        if self._exit is None:
            self._exit = await self._end(method, timeout_s)
            await asyncio.wait({self._following}, timeout=LAST_WORDS_S)
            self._following.cancel()
        return self._exit

    async def _follow(self) -> None:
        """Until the worker writes no more, or is lost."""
        try:
            while True:
                said: Said = await self._actor.read.remote()
                self._take(said)
                if said.has_ended:
                    break
        except RayError as error:
            self._exit = self._exit or await self._lose(error)
        finally:
            self._lines.put_nowait(b"")

    def _take(self, said: Said) -> None:
        for line in said.lines:
            self._lines.put_nowait(line)
        if not said.log:
            return
        if self._log is None:
            sys.stderr.buffer.write(said.log)
            sys.stderr.flush()
            return
        try:
            with open_log(self._log) as file:
                file.write(said.log)
                bound_log(file)
        except OSError as error:
            logger.warning("worker %s: %d bytes of its log are lost: %s", self._worker_id, len(said.log), error)

    async def _end(self, method: Literal["kill", "wait"], timeout_s: float | None) -> WorkerExit:
        if not ray.is_initialized():
            return WorkerExit(how="was lost when Ray was shut down", is_foreign=True)
        try:
            ended, said = await asyncio.wait_for(follow(getattr(self._actor, method).remote()), timeout_s)
        except (RayError, TimeoutError) as error:
            return self._exit or await self._lose(error)
        self._take(said)
        return ended  # type: ignore[no-any-return]

    async def _lose(self, error: BaseException) -> WorkerExit:
        """The actor, or its node, is gone or does not answer."""
        logger.debug("worker %s on node %s: %s", self._worker_id, self._place.address, error)
        self._launcher.forget(self._worker_id)
        is_silent = isinstance(error, (ActorUnavailableError, GetTimeoutError, TimeoutError))
        if is_silent or not await asyncio.to_thread(is_alive, self._place.node_id):
            return WorkerExit(how=f"was lost with its Ray node {self._place.address}", is_foreign=True, lost_node=self._place.node_id)
        return WorkerExit(how=f"was lost with its Ray actor on node {self._place.address}", is_foreign=True)


async def follow(answer: Any) -> Any:
    """Await an object reference, as a coroutine."""
    return await answer


def is_alive(node_id: str) -> bool:
    """Whether the cluster counts the node among its own."""
    try:
        return node_id in find_nodes()
    except RayError as error:
        logger.warning("the Ray cluster does not say which nodes are up: %s", first_line(error))
        return False


def relative_agent(settings: WorkerSettings) -> str:
    """The agent's file relative to the recipe's folder where it lies below, so that it is found wherever the folder is."""
    source, _, name = settings.agent.rpartition(":")
    if source.endswith(".py") and Path(source).is_absolute() and Path(source).is_relative_to(settings.base_dir):
        return f"{Path(source).relative_to(settings.base_dir)}:{name}"
    return settings.agent


def first_line(error: BaseException) -> str:
    """What an error of Ray comes down to: the last line of the remote traceback where there is one."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0])[:300] if lines else type(error).__name__


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
