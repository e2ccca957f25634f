"""Agent workers over a Ray cluster: the `ray` launcher. One actor per node runs the supervisor of the workers there.

RayLauncher ─► NodeActor, one per node ─► Supervisor ─► worker processes ─ HTTP ─► server

Where a node or its actor goes down, its workers' attempts end as `infrastructure_error` and their workers start elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightningrl.control.client import ServerClient
from lightningrl.errors import ConfigError
from lightningrl.runtime.address import is_loopback
from lightningrl.runtime.launcher import WorkerPlan, WorkerPoolError
from lightningrl.runtime.settings import WorkerSettings
from lightningrl.runtime.supervisor import end_attempts, tell_failure
from lightningrl_verl.ray_actor import NodeActor, Place, find_place
from lightningrl_verl.ray_code import pack_folder
from lightningrl_verl.ray_connection import Node, find_nodes, join_or_start

__all__ = ["RayLauncher"]

STOP_S = 15.0
"""How much longer than the grace an actor may take to stop its workers before it is killed."""
PATIENCE_S = 15.0
"""Waiting for a place longer than this is said."""
LOOK_S = 0.5
MOST_LOSSES = 5
"""Actors of the same workers that die one after the other, each within `YOUNG_S`, before they are given up."""
YOUNG_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Team:
    """The workers of one node."""

    name: str
    workers: int
    actor: Any
    place: Place
    started_at: float
    losses: int
    """Actors of these workers that died before, one after the other."""


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
            raise ConfigError(f"runtime.launchers.ray.environment names {absent[0]!r}, which is not set here; export it, or leave it out")
        self._address = address
        self._needs = {"CPU": num_cpus, **(resources or {})}
        self._is_shared = code == "shared"
        self._exclude = tuple(exclude)
        self._environment = {name: os.environ[name] for name in environment}
        self._start_timeout_s = start_timeout_s
        self._here: Place | None = None
        self._owns_ray = False
        self._teams: dict[_Team, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._archive: ray.ObjectRef[bytes] | None = None
        self._packing = asyncio.Lock()

    async def start(self, count: int, plan: WorkerPlan) -> None:
        """Join the cluster, or start one on this machine, and have the workers started. Raises ConfigError or WorkerPoolError."""
        settings = plan.settings
        self._owns_ray = await asyncio.to_thread(join_or_start, self._address)
        self._here = find_place()
        if is_loopback(settings.server_url) and len(self._needs) == 1:
            others = {node.address for node in find_nodes()} - {self._here.address}
            if others:
                raise ConfigError(unreachable(settings.server_url, min(others)))
        environment = {**self._environment, **plan.environment}
        await self._open_teams(count, replace(plan, settings=replace(settings, agent=relative_agent(settings)), environment=environment))

    async def stop(self, grace_s: float) -> None:
        for following in self._teams.values():
            following.cancel()
        if ray.is_initialized():
            await asyncio.gather(*(self._close_team(team, grace_s) for team in self._teams))
        self._teams.clear()
        self._archive = None
        if self._owns_ray:
            self._owns_ray = False
            await asyncio.to_thread(ray.shutdown)

    def describe(self) -> str:
        nodes = len({team.place.node_id for team in self._teams})
        return f"on {nodes} Ray node{'s' if nodes > 1 else ''}"

    # ------------------------------------------------------------------ teams

    async def _open_teams(self, count: int, plan: WorkerPlan, losses: int = 0) -> None:
        shares = await self._find_room(count)
        await asyncio.gather(*(self._open_team(node, workers, plan, losses) for node, workers in shares.items()))

    async def _open_team(self, node: Node, workers: int, plan: WorkerPlan, losses: int) -> None:
        for _ in range(MOST_LOSSES):
            try:
                return await self._try_team(node, workers, plan, losses)
            except RayError as error:
                logger.warning("a Ray actor on node %s died before it had started its workers: %s", node.address, first_line(error))
        raise WorkerPoolError(f"{workers} workers cannot be started: their Ray actor died {MOST_LOSSES} times; see `ray list actors`")

    async def _try_team(self, node: Node, workers: int, plan: WorkerPlan, losses: int) -> None:
        """A team at work, once its actor runs and reaches the server."""
        settings = plan.settings
        number = next(self._numbers)
        untyped: Any = ray.remote(NodeActor)
        needs = {name: need * workers for name, need in self._needs.items()}
        actor = untyped.options(
            num_cpus=needs.pop("CPU"),
            num_gpus=0,
            resources=needs,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=True),  # it may just have gone down
        ).remote()
        name = f"{settings.worker_id}.{number}"
        try:
            place = await self._until_placed(actor.place.remote())
            is_here = self._check_place(place, settings.server_url)
            problem = await actor.reach.remote(settings.server_url)
            if problem:
                raise ConfigError(unreachable(settings.server_url, place.address, problem))
            folder = plan.log_folder if is_here else None  # of another node Ray keeps the log
            folder = folder / name if folder is not None and number else folder
            archive = [] if is_here or self._is_shared else [await self._packed(Path(settings.base_dir))]
            mine = replace(plan, settings=replace(settings, worker_id=name), log_folder=folder)
            problem = await actor.start.remote(workers, mine, archive)
            if problem:
                raise ConfigError(problem)
        except BaseException:
            ray.kill(actor)
            raise
        team = _Team(name=name, workers=workers, actor=actor, place=place, started_at=time.monotonic(), losses=losses)
        self._teams[team] = asyncio.create_task(self._follow(team, plan))

    async def _close_team(self, team: _Team, grace_s: float) -> None:
        try:
            await asyncio.wait_for(follow(team.actor.stop.remote(grace_s)), grace_s + STOP_S)
        except (RayError, TimeoutError) as error:
            logger.warning("workers on node %s were not stopped in time: %s", team.place.address, first_line(error))
        ray.kill(team.actor)

    async def _follow(self, team: _Team, plan: WorkerPlan) -> None:
        """Until the team is stopped. Where it is lost, its workers start elsewhere; where they cannot, the server is told."""
        try:
            await team.actor.wait.remote()
        except RayError as error:
            del self._teams[team]
            settings = plan.settings
            async with ServerClient(settings.server_url, settings.worker_key, patience_s=settings.patience_s) as client:
                try:
                    await self._replace(team, plan, error, client)
                except Exception as problem:  # noqa: BLE001  the boundary: lost workers must not be waited for in silence
                    await tell_failure(client, team.name, problem)

    async def _replace(self, team: _Team, plan: WorkerPlan, error: RayError, client: ServerClient) -> None:
        ray.kill(team.actor)
        is_silent = isinstance(error, ActorUnavailableError)
        what = "node" if is_silent or not await asyncio.to_thread(is_alive, team.place.node_id) else "actor on node"
        logger.warning("%d workers were lost with their Ray %s %s: %s", team.workers, what, team.place.address, first_line(error))
        sentence = f"the worker process was lost with its Ray {what} {team.place.address} while it ran the agent"
        await end_attempts(client, f"{team.name}-", sentence)
        losses = team.losses + 1 if time.monotonic() - team.started_at < YOUNG_S else 1
        if losses >= MOST_LOSSES:
            raise WorkerPoolError(f"the Ray actors of {team.workers} workers died {losses} times in a row; see `ray list actors`")
        await asyncio.sleep(LOOK_S * 2 ** (losses - 1))
        await self._open_teams(team.workers, plan, losses)

    # ------------------------------------------------------------------ places

    async def _find_room(self, count: int) -> dict[Node, int]:
        """How many workers go to which node: evenly, where there is room. Raises WorkerPoolError."""
        started_at = time.monotonic()
        has_warned = False
        while True:
            taken = {node: sum(team.workers for team in self._teams if team.place.node_id == node.id) for node in find_nodes()}
            rooms = {node: self._room(node, count + mine) for node, mine in taken.items()}
            shares = dict(taken)
            for _ in range(count):
                free = [node for node in shares if shares[node] < rooms[node]]
                if not free:
                    break
                shares[min(free, key=lambda node: shares[node])] += 1
            new = {node: shares[node] - taken[node] for node in shares if shares[node] > taken[node]}
            if sum(new.values()) == count:
                return new
            waited = time.monotonic() - started_at
            if waited >= self._start_timeout_s:
                raise self._no_place()
            if waited > PATIENCE_S and not has_warned:
                has_warned = True
                logger.warning("workers wait for a place on the Ray cluster: %s", self._shortage())
            await asyncio.sleep(min(LOOK_S, self._start_timeout_s))

    def _room(self, node: Node, most: int) -> int:
        """How many workers the node can have."""
        return min((int(node.resources.get(name, 0.0) / need) for name, need in self._needs.items() if need), default=most)

    async def _until_placed(self, answer: Any) -> Place:
        """Waits for the actor's first answer. Raises ConfigError or WorkerPoolError."""
        try:
            place: Place = await asyncio.wait_for(follow(answer), self._start_timeout_s)
        except TimeoutError:
            raise self._no_place() from None
        except RayError as error:
            raise ConfigError(
                f"a Ray node cannot run workers: {first_line(error)}; install lightningrl-verl and what the agent imports on every node"
            ) from error
        return place

    def _no_place(self) -> WorkerPoolError:
        return WorkerPoolError(
            f"a worker has found no place on the Ray cluster for {self._start_timeout_s:g} s: {self._shortage()}; start fewer workers, "
            "lower runtime.launchers.ray.num_cpus, or add nodes"
        )

    def _shortage(self) -> str:
        untyped: Any = ray.available_resources
        free = untyped()
        return f"it asks for {_resources(self._needs)}, free are {_resources({name: free.get(name, 0.0) for name in self._needs})}"

    def _check_place(self, place: Place, server_url: str) -> bool:
        """Whether it is this node. Raises ConfigError where workers cannot run there."""
        assert self._here is not None
        if place.version != self._here.version:
            raise ConfigError(
                f"node {place.address} has lightningrl {place.version}, this process {self._here.version}; install the same on every node"
            )
        if is_loopback(server_url) and place.address != self._here.address:
            raise ConfigError(unreachable(server_url, place.address))
        return place.node_id == self._here.node_id

    async def _packed(self, folder: Path) -> Any:
        """The folder for nodes that do not share it: packed once, fetched by them from Ray's object store."""
        async with self._packing:
            if self._archive is None:
                packed = await asyncio.to_thread(pack_folder, folder, exclude=self._exclude)
                self._archive = await asyncio.to_thread(ray.put, packed)
        return self._archive


def unreachable(server_url: str, node: str, problem: str = "that is this machine only") -> str:
    return (
        f"workers on node {node} cannot reach the server at {server_url!r} ({problem}); have it listen on an address "
        "that the nodes reach: --host 0.0.0.0 (runtime.server_host)"
    )


async def follow(answer: Any) -> Any:
    """Await an object reference, as a coroutine."""
    return await answer


def is_alive(node_id: str) -> bool:
    """Whether the cluster counts the node among its own."""
    try:
        return any(node.id == node_id for node in find_nodes())
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
