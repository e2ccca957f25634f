"""Agent workers over a Ray cluster: the `ray` launcher. One actor per node runs the supervisor of the workers there.

RayLauncher ─► NodeActor, one per node ─► Supervisor ─► worker processes ─ HTTP ─► server

Where a node or its actor goes down, Ray restarts the actor: attempts end as `infrastructure_error`, new workers start.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightningrl.errors import ConfigError
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.address import is_loopback
from lightningrl_client.runtime.launcher import WorkerPlan, WorkerPoolError
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_client.runtime.supervisor import tell_failure
from lightningrl_verl.ray_actor import NodeActor, Place, find_place, unreachable
from lightningrl_verl.ray_code import pack_folder
from lightningrl_verl.ray_connection import Connection, Node, find_nodes, join_or_start

__all__ = ["RayLauncher"]

STOP_S = 15.0
"""Seconds beyond the grace that an actor may take to stop its workers before it is killed."""
LAST_WORDS_S = 2.0
PATIENCE_S = 15.0
"""Waiting for a place longer than this is said."""
LOOK_S = 30.0
"""Between two looks whether an actor still has a place."""

logger = logging.getLogger(__name__)


class RayLauncher:
    """Has workers supervised by Ray actors, one per node."""

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
            raise ConfigError(
                f"runtime.launchers.ray.environment names {absent[0]!r}, which is not set here; export it, or leave "
                "it out"
            )
        self._address = address
        self._needs = {"CPU": num_cpus, **(resources or {})}
        self._is_shared = code == "shared"
        self._exclude = tuple(exclude)
        self._environment = {name: os.environ[name] for name in environment}
        self._start_timeout_s = start_timeout_s
        self._here: Place | None = None
        self._connection: Connection | None = None
        self._actors: dict[Any, asyncio.Task[None]] = {}
        self._placed: set[Any] = set()

    async def start(self, count: int, plan: WorkerPlan) -> None:
        """Join a cluster, or start one here, and start the workers. Raises ConfigError or WorkerPoolError."""
        settings = plan.settings
        self._connection = await asyncio.to_thread(join_or_start, self._address)
        self._here = find_place()
        nodes = await asyncio.to_thread(find_nodes)
        others = {node.address for node in nodes} - {self._here.address}
        if is_loopback(settings.server_url) and len(self._needs) == 1 and others:
            raise ConfigError(unreachable(settings.server_url, min(others)))
        plan = replace(plan, environment={**self._environment, **plan.environment})
        archive: list[Any] = []
        shares = self._share(count, nodes)
        if not self._is_shared and (len(nodes) > 1 or None in shares):
            packed = await asyncio.to_thread(pack_folder, Path(settings.base_dir), exclude=self._exclude)
            archive = [await asyncio.to_thread(ray.put, packed)]
        for number, (node, workers) in enumerate(shares.items()):
            actor = self._create_actor(node, workers)
            mine = replace(settings, worker_id=f"{settings.worker_id}.{number}", agent=relative_agent(settings))
            self._actors[actor] = asyncio.create_task(
                self._follow(actor, workers, replace(plan, settings=mine), archive)
            )

    async def stop(self, grace_s: float) -> None:
        if ray.is_initialized():
            stopped = [following for actor, following in self._actors.items() if actor in self._placed]
            await asyncio.gather(*(stop_actor(actor, grace_s) for actor in self._placed))
            if stopped:
                await asyncio.wait(stopped, timeout=LAST_WORDS_S)  # Ray complains of a call that is killed
            for actor in self._actors:
                ray.kill(actor)
        for following in self._actors.values():
            following.cancel()
        self._actors.clear()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await asyncio.to_thread(connection.leave)

    def describe(self) -> str:
        return f"on {len(self._actors)} Ray node{'s' if len(self._actors) > 1 else ''}"

    def _share(self, count: int, nodes: Sequence[Node]) -> dict[Node | None, int]:
        """Share workers among nodes: evenly, where there is room; None = a node that has yet to join."""
        shares: dict[Node | None, int] = {}
        for _ in range(count):
            free = [node for node in nodes if self._room(node, count) > shares.get(node, 0)]
            node = min(free, key=lambda node: shares.get(node, 0), default=None)
            shares[node] = shares.get(node, 0) + 1
        return shares

    def _room(self, node: Node, most: int) -> int:
        """Number of workers that the node can have."""
        return min(
            (int(node.resources.get(name, 0.0) / need) for name, need in self._needs.items() if need), default=most
        )

    def _create_actor(self, node: Node | None, workers: int) -> Any:
        untyped: Any = ray.remote(NodeActor)
        needs = {name: need * workers for name, need in self._needs.items()}
        return untyped.options(
            num_cpus=needs.pop("CPU"),
            num_gpus=0,
            resources=needs,
            scheduling_strategy="SPREAD" if node is None else NodeAffinitySchedulingStrategy(node.id, soft=True),
            max_restarts=-1,
            max_task_retries=-1,
        ).remote()

    async def _follow(self, actor: Any, workers: int, plan: WorkerPlan, archive: list[Any]) -> None:
        """Until its workers are stopped. Where they cannot run, the server is told."""
        settings = plan.settings
        try:
            assert self._here is not None
            self._check_place(await self._until_placed(actor.place.remote()), settings.server_url)
            self._placed.add(actor)
            running = asyncio.ensure_future(follow(actor.run.remote(workers, plan, self._here.node_id, archive)))
            try:
                while not (await asyncio.wait({running}, timeout=LOOK_S))[0]:
                    await self._until_placed(actor.place.remote())  # started again, it may wait for a place
            finally:
                running.cancel()
            problem = running.result()
            if problem is None:
                return
            error: Exception = ConfigError(problem)
        except RayError as lost:
            error = WorkerPoolError(
                f"{workers} workers were lost with their Ray actor: {first_line(lost)}; see `ray list actors`"
            )
        except Exception as problem:  # noqa: BLE001  workers that never start must not be waited for in silence
            error = problem
        self._placed.discard(actor)
        async with ServerClient(settings.server_url, settings.worker_key, patience_s=settings.patience_s) as client:
            await tell_failure(client, settings.worker_id, error)

    async def _until_placed(self, answer: Any) -> Place:
        """Waits for the actor's first answer. Raises ConfigError or WorkerPoolError."""
        waiting = asyncio.ensure_future(follow(answer))
        try:
            done, _ = await asyncio.wait({waiting}, timeout=min(PATIENCE_S, self._start_timeout_s))
            if not done and self._start_timeout_s > PATIENCE_S:
                logger.warning("workers wait for a place on the Ray cluster: %s", self._shortage())
                done, _ = await asyncio.wait({waiting}, timeout=self._start_timeout_s - PATIENCE_S)
            if not done:
                raise self._no_place()
            place: Place = waiting.result()
        except RayError as error:
            raise ConfigError(
                f"a Ray node cannot run workers: {first_line(error)}; install lightningrl-verl and what the agent "
                "imports on every node"
            ) from error
        finally:
            waiting.cancel()
        return place

    def _no_place(self) -> WorkerPoolError:
        return WorkerPoolError(
            f"a worker has found no place on the Ray cluster for {self._start_timeout_s:g} s: {self._shortage()}; "
            "start fewer workers, "
            "lower runtime.launchers.ray.num_cpus, or add nodes"
        )

    def _shortage(self) -> str:
        untyped: Any = ray.available_resources
        free = untyped()
        left = {name: free.get(name, 0.0) for name in self._needs}
        return f"it asks for {_resources(self._needs)}, free are {_resources(left)}"

    def _check_place(self, place: Place, server_url: str) -> None:
        """Raise ConfigError where workers cannot run there."""
        assert self._here is not None
        if place.version != self._here.version:
            raise ConfigError(
                f"node {place.address} has lightningrl {place.version}, this process {self._here.version}; install "
                "the same on every node"
            )
        if is_loopback(server_url) and place.address != self._here.address:
            raise ConfigError(unreachable(server_url, place.address))


async def stop_actor(actor: Any, grace_s: float) -> None:
    """Have it stop its workers."""
    try:
        await asyncio.wait_for(follow(actor.stop.remote(grace_s)), grace_s + STOP_S)
    except (RayError, TimeoutError) as error:
        logger.warning("a Ray actor did not stop its workers in time: %s", first_line(error))


async def follow(answer: Any) -> Any:
    """Await an object reference, as a coroutine."""
    return await answer


def relative_agent(settings: WorkerSettings) -> str:
    """The agent's file, relative where it lies below the recipe's folder, so that it is found wherever that is."""
    source, _, name = settings.agent.rpartition(":")
    if source.endswith(".py") and Path(source).is_absolute() and Path(source).is_relative_to(settings.base_dir):
        return f"{Path(source).relative_to(settings.base_dir)}:{name}"
    return settings.agent


def first_line(error: BaseException) -> str:
    """Gist of an error of Ray: the last line of the remote traceback where there is one."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0])[:300] if lines else type(error).__name__


def _resources(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())
