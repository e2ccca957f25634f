"""A run's world but for its loop: servers, workers and engines, built in order, watched, taken down together.

Parts ─► ServerProcess ─► WorkerPool ─► each policy's Backend + EngineLink ─► RunningServices

Where there are several servers (`runtime.servers`), each has a pool of workers and a link of each engine; the trainer
speaks to the first. A server that dies is started again, a pool that gives up ends the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightningrl.backends import Backend, Speed, SpeedMeter
from lightningrl.errors import RunFolderError, ServerError
from lightningrl.files import create_private
from lightningrl.keys import view_key, worker_key
from lightningrl.machine import resident_by_pid
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import OtherPolicyConfig
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.address import reachable_url
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.recipe_pool import start_pool
from lightningrl_runs.origin import read_run_file, template_of
from lightningrl_server.engines.link import EngineLink, EngineLinks
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_training.build import Parts
from lightningrl_training.models import own_template
from lightningrl_training.policies import Policies, RunningPolicy, load_backend
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans

__all__ = [
    "Address",
    "RunningServices",
    "give_time",
    "make_place",
    "measure_memory",
    "serve_policy",
    "serve_recipe",
    "server_settings",
]

PATIENCE_S = 900.0
"""Seconds that trainer and workers go on asking: as long as a start of the server may take, killed again and again or
on a busy machine. The supervisor of the server gives up before them."""
ANSWERS = 8
"""Whole answers that fit into a rollout's time, where nobody gave it one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address of a run, and the key that opens it."""

    url: str
    run_key: str = field(repr=False)

    @property
    def join(self) -> str:
        """The beginning of a command that starts workers, here or elsewhere."""
        return f"LIGHTNINGRL_KEY={worker_key(self.run_key)} lightningrl work RECIPE --server {reachable_url(self.url)}"

    @property
    def view(self) -> str:
        """The link to its pages, from this machine."""
        return f"http://127.0.0.1:{self.url.rpartition(':')[2]}/view/?key={view_key(self.run_key)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServices:
    """Server, policies and workers, while a run or an examination lasts."""

    server: ServerProcess
    """The first server."""
    client: ServerClient
    policies: Policies
    backends: Mapping[str, Backend]
    """Backends by policy."""
    links: Mapping[str, EngineLinks]
    """Links by policy."""
    start_workers: Callable[[], Awaitable[None]]
    """Start workers, once; returns when the first has imported the agent."""
    read_memory: Callable[[], Mapping[str, float]]
    """Read the memory of the run's processes, as metrics of a step."""


@asynccontextmanager
async def serve_policy(
    settings: ServerSettings,
    parts: Parts,
    logs: Path,
    checkpoint: Path | None,
    *,
    workers: Recipe | None,
    servers: int = 1,
    spans: StepSpans = NO_SPANS,
    starting: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[RunningServices]:
    """Bring servers, workers and engines up, and watch them; what fails for good ends the body with its sentence.

    `starting` is told what is being waited for. With a checkpoint the body starts the workers: what a killed run left
    queued belongs to newer weights, which the body makes first.
    """
    async with AsyncExitStack() as stack:
        starting("starting the server, loading weights")
        building = asyncio.create_task(_build_backends(parts, settings, checkpoint))
        stack.push_async_callback(_close_backends, building)
        running = await _start_servers(stack, settings, logs, servers)
        client = await stack.enter_async_context(ServerClient(running[0].url, settings.run_key, patience_s=PATIENCE_S))
        pools = _make_pools(stack, running, settings, workers, logs)
        await stack.enter_async_context(watch(running, pools))
        await client.interrupt("the run was restarted")
        starter = PoolStarter(pools)
        if checkpoint is None:
            starter.begin()
        policies, links = await _connect_engines(stack, running, settings, parts, await asyncio.shield(building))
        if checkpoint is None:
            if pools:
                starting("starting workers")
            await starter.ready()
        policies = [replace(policy, speed=await _measure(policy.backend)) for policy in policies]
        yield RunningServices(
            server=running[0],
            client=client,
            policies=Policies(policies, spans),
            backends={policy.name: policy.backend for policy in policies},
            links=links,
            start_workers=starter.ready,
            read_memory=lambda: measure_memory({server.pid for server in running if server.pid is not None}),
        )


def measure_memory(servers: Collection[int]) -> dict[str, float]:
    """Resident bytes of this process, of `servers` by their pids, and of workers and whatever else it has started."""
    sizes: dict[str, float] = {}
    for pid, size in resident_by_pid().items():
        name = "trainer" if pid == os.getpid() else "server" if pid in servers else "workers"
        sizes[f"memory/{name}"] = sizes.get(f"memory/{name}", 0.0) + size
    return sizes


async def _start_servers(
    stack: AsyncExitStack, settings: ServerSettings, logs: Path, count: int
) -> Sequence[ServerProcess]:
    """Start servers; those after the first take the ports after its."""
    servers = [
        ServerProcess(
            settings.model_copy(update={"port": settings.port and settings.port + number}),
            log_path=logs / ("server.log" if number == 0 else f"server-{number + 1}.log"),
        )
        for number in range(count)
    ]
    for server in servers:  # the first makes the store; the last to be started is the first to stop
        stack.push_async_callback(server.stop)
    await servers[0].start()
    await asyncio.gather(*(server.start() for server in servers[1:]))
    return servers


def _make_pools(
    stack: AsyncExitStack,
    servers: Sequence[ServerProcess],
    settings: ServerSettings,
    workers: Recipe | None,
    logs: Path,
) -> list[WorkerPool]:
    """A pool of workers for each server, not started; none where the recipe has no workers here."""
    pools: list[WorkerPool] = []
    for number, server in enumerate(servers):
        pool = start_pool(
            workers,
            reachable_url(server.url),
            settings.run_key,
            logs,
            load_plugins(),
            dialects=settings.dialects,
            patience_s=PATIENCE_S,
            part=(number, len(servers)),
        )
        if pool is not None:
            stack.push_async_callback(pool.stop)
            pools.append(pool)
    return pools


async def _connect_engines(
    stack: AsyncExitStack,
    servers: Sequence[ServerProcess],
    settings: ServerSettings,
    parts: Parts,
    backends: Mapping[str, Backend],
) -> tuple[list[RunningPolicy], dict[str, EngineLinks]]:
    """Link each policy's engine to all servers, and give it to the evaluator for its evidence."""
    policies: list[RunningPolicy] = []
    links: dict[str, EngineLinks] = {}
    for name, backend in backends.items():
        stack.callback(parts.evaluator.policies.connect(name, backend))
        link = EngineLinks([EngineLink(backend.engine, server.url, settings.run_key) for server in servers])
        await link.start()
        stack.push_async_callback(link.close)
        links[name] = link
        is_trained = settings.policies[name].trainable
        policies.append(RunningPolicy(name=name, backend=backend, link=link, is_trained=is_trained))
    return policies, links


@asynccontextmanager
async def serve_recipe(
    recipe: Recipe,
    parts: Parts,
    folder: Path,
    checkpoint: Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    starting: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[tuple[Recipe, RunningServices]]:
    """Bring all of a run but its loop up, in a folder that `lightningrl rollouts --run` reads. Yields the recipe, with
    the time that rollouts have here, and the services. `changes`: in the server's settings."""
    place = make_place(folder, parts, recipe)
    settings = server_settings(recipe, parts, place, host=recipe.runtime.server_host)
    settings = settings.model_copy(update=changes)
    async with serve_policy(
        settings, parts, folder / "logs", checkpoint, workers=recipe, starting=starting
    ) as services:
        yield give_time(recipe, services.policies.speed), services


def give_time(recipe: Recipe, speed: Speed | None) -> Recipe:
    """The recipe with a time limit for rollouts: its own, else as long as a slow engine takes."""
    if recipe.runtime.timeout_s is not None or speed is None:
        return recipe
    answers = ANSWERS * recipe.sampling.max_tokens * speed.calls / speed.sampled
    limit = max(recipe.runtime.limit_s, float(round(answers)))
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"timeout_s": limit})})


def make_place(folder: Path, parts: Parts, recipe: Recipe) -> str:
    """Make a folder for rollouts and logs, new, empty or of ours; return its store's URL. Raises RunFolderError."""
    own = {name: text for name in parts.models if (text := template_of(recipe, name)) is not None}
    mark = {"models": dict(parts.models), "templates": own}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()) and not {"models"} <= read_run_file(folder).keys() <= mark.keys():
            raise RunFolderError(f"folder {str(folder)!r} holds what is none of ours; move it away")
        with create_private(folder / "run.json") as file:
            file.write(json.dumps(mark).encode())
    except OSError as error:
        raise RunFolderError(f"folder {str(folder)!r} cannot be written: {error.strerror}; give another one") from error
    return f"sqlite:///{folder.absolute() / 'store.sqlite'}"


async def _measure(backend: Backend) -> Speed | None:
    """Measure an engine, once all that starts has started."""
    return await asyncio.to_thread(backend.measure) if isinstance(backend, SpeedMeter) else None


def server_settings(
    recipe: Recipe, parts: Parts, store_url: str, *, host: str = "127.0.0.1", port: int = 0
) -> ServerSettings:
    """The server's share of the recipe."""
    policies = {
        name: PolicySettings(
            model=parts.models[name],
            renderer=policy.renderer,
            chat_template=own_template(name, policy, recipe.folder),
            chat_template_kwargs=policy.chat_template_kwargs,
            sampling=recipe.sampling.settings(),
            trainable=policy.trainable,
            system_patterns=tuple(dict.fromkeys(rule.system for rule in policy.calls if rule.system is not None)),
            agents=policy.agents if isinstance(policy, OtherPolicyConfig) else (),
        )
        for name, policy in recipe.all_policies.items()
    }
    return ServerSettings(
        store_url=store_url,
        host=host,
        port=port,
        run_key=secrets.token_urlsafe(24),
        policies=policies,
        default_policy=recipe.policy.name,
        drops_hosted=recipe.policy.hosted_tools == "drop",
        dialects=parts.dialects,
        roles=recipe.roles,
        upstream=recipe.upstream,
        telemetry=recipe.telemetry,
    )


async def _build_backends(parts: Parts, settings: ServerSettings, checkpoint: Path | None) -> dict[str, Backend]:
    """Build the policies' backends one after the other; where one fails, those before it are closed."""
    backends: dict[str, Backend] = {}
    try:
        for name in parts.backends:
            is_trained = settings.policies[name].trainable
            backends[name] = await asyncio.to_thread(_build_backend, parts, name, checkpoint if is_trained else None)
    except BaseException:
        for backend in backends.values():
            backend.close()
        raise
    return backends


def _build_backend(parts: Parts, policy: str, checkpoint: Path | None) -> Backend:
    backend = parts.backends[policy]()
    if checkpoint is not None:
        load_backend(backend, checkpoint, policy)
    _ = backend.engine  # a backend may start what serves it here, for minutes: in this thread, not in the loop's
    return backend


async def _close_backends(building: asyncio.Task[dict[str, Backend]]) -> None:
    """Close the backends, also those that nobody has waited for yet: what a thread loads is loaded first."""
    await asyncio.wait({building})
    if not building.cancelled() and building.exception() is None:
        for backend in building.result().values():
            await asyncio.to_thread(backend.close)


logger = logging.getLogger(__name__)

MOST_STARTS = 5
"""Tries to start the server again before the run fails."""
RESTART_PAUSE_S = 0.5


class PoolStarter:
    """Starts the pools once. Where one fails, its watcher says so."""

    def __init__(self, pools: Sequence[WorkerPool]) -> None:
        self._pools = pools
        self._starting: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        if not self._starting:
            self._starting = [asyncio.create_task(pool.start()) for pool in self._pools]
            for task in self._starting:
                task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen

    async def ready(self) -> None:
        """Start the pools; returns once the first worker is ready."""
        self.begin()
        if self._starting:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)


@asynccontextmanager
async def watch(servers: Sequence[ServerProcess], pools: Sequence[WorkerPool]) -> AsyncIterator[None]:
    """Restart a server when it dies; end the body when a pool gives up."""
    body = asyncio.current_task()
    assert body is not None
    failure: list[BaseException] = []

    async def wait_for(ending: Awaitable[Any]) -> None:
        try:
            await ending
        except Exception as error:  # noqa: BLE001  handed to the body, which raises it
            failure.append(error)
            body.cancel()

    endings = (*map(_keep_alive, servers), *(pool.wait() for pool in pools))
    watchers = [asyncio.create_task(wait_for(ending)) for ending in endings]
    try:
        yield
    except asyncio.CancelledError:
        if failure:
            body.uncancel()
            raise failure[0] from None
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def _keep_alive(server: ServerProcess) -> None:
    """Start it again whenever it ends; give up when it does not come up `MOST_STARTS` times in a row."""
    while True:
        status = await server.wait_ended()
        logger.warning("the server ended with status %s; starting it again at %s", status, server.url)
        for left in reversed(range(MOST_STARTS)):
            try:
                await server.restart()
                break
            except ServerError as error:
                if not left:
                    raise
                logger.warning("%s; trying again", error)
                await asyncio.sleep(RESTART_PAUSE_S)
