"""A run's world: server, engine, workers and loop, built in order, watched while it runs, taken down together.

train_run ─► Parts (refuses bad recipes) ─► ServerProcess ┐
                                          ─► WorkerPool    ├─► Trainer.run ─► curve.png
                                          ─► each policy's Backend + EngineLink ┘

Where there are several servers (`runtime.servers`), each has a pool of workers and a link of each engine; the trainer speaks to the first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightningrl.errors import LightningError, RunFolderError, ServerError
from lightningrl.keys import view_key, worker_key
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.private_files import create_private
from lightningrl.protocols import Backend, Describer, Measured, Speed
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import OtherPolicyConfig
from lightningrl.records import RolloutFilter
from lightningrl.types import RolloutMode, RolloutState
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.address import reachable_url
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.recipe_pool import start_pool
from lightningrl_server.engines.link import EngineLink, EngineLinks
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_training.build import Parts
from lightningrl_training.explanations import explain_ignored
from lightningrl_training.loggers import JsonlLogger, MetricLogger, build_loggers, draw_curve
from lightningrl_training.loop import Progress, Trainer
from lightningrl_training.policies import Policies, RunningPolicy, load_backend
from lightningrl_training.run_folder import LoopState, RunFolder
from lightningrl_training.step_forecast import give_time
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans, open_spans
from lightningrl_viewer.reading.metrics import read_metrics
from lightningrl_viewer.reading.origin import read_run_file

__all__ = ["Address", "RunningServices", "make_place", "serve_policy", "serve_recipe", "server_settings", "train_run"]

logger = logging.getLogger(__name__)

MOST_STARTS = 5
"""Tries to start the server again before the run fails."""
RESTART_PAUSE_S = 0.5
PATIENCE_S = 900.0
"""How long trainer and workers go on asking: as long as a start of the server may take, killed again and again or on a busy machine.
Whoever watches the server gives up before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a run is found, and what opens it."""

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


Announce = Callable[[Address], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServices:
    """Server, policies and whoever starts workers, while a run or an examination lasts."""

    server: ServerProcess
    """The first."""
    client: ServerClient
    policies: Policies
    backends: Mapping[str, Backend]
    """By policy, as all of these."""
    links: Mapping[str, EngineLinks]
    start_workers: Callable[[], Awaitable[None]]
    """Returns once the first has imported the agent; does nothing the second time."""


async def train_run(
    recipe: Recipe, parts: Parts, plugins: PluginManager, folder: RunFolder, progress: Progress, announce: Announce
) -> LoopState:
    """Train to the recipe's end in `folder`, from its newest checkpoint if it has one. Draws the curve, also of a run that fails.

    `announce` is called when workers can join.
    """
    saved = folder.latest()
    state = saved.state if saved else LoopState(step=0, seconds=0.0, rollouts=0)
    made = max((line["step"] for line in read_metrics(folder.metrics)), default=0) if saved and folder.metrics.is_file() else 0
    loggers: list[MetricLogger] = [JsonlLogger(folder.metrics, resume_after=state.step if saved else -1)]
    with folder.making("tensorboard", "wandb"):
        loggers += build_loggers(recipe.loggers, folder=folder.path, run=folder.path.name, config=json.loads(recipe.frozen_text()))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for one in loggers:
            one.log(step, metrics)
        ignored.look_soon()
        if any(name.startswith("validation/") for name in metrics):
            curve.draw_soon()

    curve, ignored = _Curve(folder, recipe), _IgnoredFields()
    stack = ExitStack()
    try:
        runtime = recipe.runtime
        settings = server_settings(recipe, parts, folder.store_url, host=runtime.server_host, port=runtime.server_port)
        settings = settings.model_copy(update={"folder": folder.path.resolve()})
        folder.write_view_key(view_key(settings.run_key))
        checkpoint = saved.folder if saved else None
        spans = stack.enter_context(open_spans(recipe.telemetry, os.environ, run=folder.path.name))
        async with serve_policy(
            settings,
            parts,
            folder.logs,
            checkpoint,
            spans=spans,
            workers=recipe,
            servers=runtime.servers,
            starting=lambda what: progress.phase(what, 0, 0),
        ) as served:
            announce(Address(url=served.server.url, run_key=settings.run_key))
            ignored.client = served.client
            await _warn_of_lost_steps(served.client, folder, made=max(made, state.step), learned=state.step)
            if state.position is None:
                await _cancel_unfinished(served.client)
            for name, backend in served.backends.items():
                if settings.policies[name].trainable and isinstance(backend, Describer):
                    progress.say(f"{name}: {await asyncio.to_thread(backend.describe)}")
            parts.scorer.load(state.credit)
            trainer = Trainer(
                recipe=give_time(recipe, served.policies.speed),
                tasks=parts.tasks,
                folder=folder,
                control=served.client,
                policies=served.policies,
                evaluator=parts.evaluator,
                scorer=parts.scorer,
                plugins=plugins,
                progress=progress,
                log=log,
                state=state,
                start_workers=served.start_workers,
                spans=spans,
            )
            reached = await trainer.run()
            await ignored.said()
            return reached
    finally:
        for one in loggers:
            one.close()
        await asyncio.to_thread(stack.close)
        await curve.draw_last()


async def _cancel_unfinished(client: ServerClient) -> None:
    """What an earlier version left queued: it gave rollouts other ids, and nobody waits for these."""
    while left := await client.list_rollouts(RolloutFilter(state=RolloutState.QUEUED, mode=RolloutMode.TRAIN)):
        await client.cancel([rollout.spec.id for rollout in left])


async def _warn_of_lost_steps(client: ServerClient, folder: RunFolder, *, made: int, learned: int) -> None:
    """A step is in the ledger before it is anywhere else in the folder: one that is not has been taken away with what else was there."""
    lost = set(range(1, made + 1)) - {record.step for record in await client.steps()}
    if lost:
        logger.warning(
            "the store %r has lost its records of %d of %d steps (%d to %d): it or its write-ahead log was deleted or cut short; the "
            "weights keep what they learned up to step %d, and no step is trained twice; to have the records, put the files back and "
            "resume again",
            folder.store_url.removeprefix("sqlite:///"),
            len(lost),
            made,
            min(lost),
            max(lost),
            learned,
        )


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
    """Servers, workers and engines, up and watched; the body is cancelled with the sentence of whatever fails for good.

    `starting` is told what is being waited for. With a checkpoint the body starts the workers: what a killed run left queued belongs to
    newer weights, which it makes first.
    """
    async with AsyncExitStack() as stack:
        starting("starting the server, loading weights")
        building = asyncio.create_task(_build_backends(parts, settings, checkpoint))
        stack.push_async_callback(_close_backends, building)
        first, *others = (
            ServerProcess(one, log_path=logs / ("server.log" if number == 0 else f"server-{number + 1}.log"))
            for number, one in enumerate(_settings_of_each(settings, servers))
        )
        for server in (first, *others):  # the first makes the store; the last to be started is the first to stop
            stack.push_async_callback(server.stop)
        await first.start()
        await asyncio.gather(*(server.start() for server in others))
        client = await stack.enter_async_context(ServerClient(first.url, settings.run_key, patience_s=PATIENCE_S))
        pools: list[WorkerPool] = []
        for number, server in enumerate((first, *others)):
            pool = start_pool(
                workers,
                reachable_url(server.url),
                settings.run_key,
                logs,
                load_plugins(),
                dialects=settings.dialects,
                patience_s=PATIENCE_S,
                part=(number, servers),
            )
            if pool is not None:
                stack.push_async_callback(pool.stop)
                pools.append(pool)
        await stack.enter_async_context(_watched((first, *others), pools))
        await client.interrupt("the run was restarted")
        starter = _Starter(pools)
        if checkpoint is None:
            starter.begin()
        running: list[RunningPolicy] = []
        links: dict[str, EngineLinks] = {}
        for name, backend in (await asyncio.shield(building)).items():
            is_trained = settings.policies[name].trainable
            stack.callback(parts.evaluator.policies.connect(name, backend))
            link = EngineLinks([EngineLink(backend.engine, server.url, settings.run_key) for server in (first, *others)])
            await link.start()
            stack.push_async_callback(link.close)
            links[name] = link
            running.append(RunningPolicy(name=name, backend=backend, link=link, is_trained=is_trained))
        if checkpoint is None:
            if pools:
                starting("starting workers")
            await starter.ready()
        running = [replace(one, speed=await _measure(one.backend)) for one in running]
        yield RunningServices(
            server=first,
            client=client,
            policies=Policies(running, spans),
            backends={policy.name: policy.backend for policy in running},
            links=links,
            start_workers=starter.ready,
        )


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
    """All of a run but its loop, in a folder that `lightningrl rollouts --run` reads; and the recipe with the time that rollouts have here.
    `changes`: of the server's settings."""
    settings = server_settings(recipe, parts, make_place(folder, parts), host=recipe.runtime.server_host).model_copy(update=changes)
    async with serve_policy(settings, parts, folder / "logs", checkpoint, workers=recipe, starting=starting) as served:
        yield give_time(recipe, served.policies.speed), served


def make_place(folder: Path, parts: Parts) -> str:
    """A folder for rollouts and logs, new, empty or made as one before; returns its store's URL. Raises RunFolderError."""
    mark = {"models": dict(parts.models)}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()) and read_run_file(folder).keys() != mark.keys():
            raise RunFolderError(f"folder {str(folder)!r} holds what is none of ours; move it away")
        with create_private(folder / "run.json") as file:
            file.write(json.dumps(mark).encode())
    except OSError as error:
        raise RunFolderError(f"folder {str(folder)!r} cannot be written: {error.strerror}; give another one") from error
    return f"sqlite:///{folder.absolute() / 'store.sqlite'}"


async def _measure(backend: Backend) -> Speed | None:
    """Once all that starts has started."""
    return await asyncio.to_thread(backend.measure) if isinstance(backend, Measured) else None


class _IgnoredFields:
    """Says once, when something was measured first, which fields of the agent's calls nobody reads."""

    def __init__(self) -> None:
        self.client: ServerClient | None = None
        self._looking: asyncio.Task[None] | None = None

    def look_soon(self) -> None:
        if self._looking is None and self.client is not None:
            self._looking = asyncio.create_task(self._look(self.client))

    async def said(self) -> None:
        if self._looking is not None:
            await self._looking

    async def _look(self, client: ServerClient) -> None:
        try:
            said = explain_ignored((await client.status()).policies)
        except LightningError as error:  # the run goes on without it
            said = f"nobody can say which fields of the agent's calls are read: {error}"
        if said:
            logger.warning("%s", said)


class _Curve:
    """The learning curve, drawn anew in a thread whenever there is a new point."""

    def __init__(self, folder: RunFolder, recipe: Recipe) -> None:
        self._folder = folder
        self._recipe = recipe
        self._drawing: asyncio.Task[None] | None = None
        self._warned = ""

    def draw_soon(self) -> None:
        """Where one is being drawn already, the next has the point."""
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.create_task(asyncio.to_thread(self._draw))

    async def draw_last(self) -> None:
        if self._drawing is not None:
            await asyncio.wait({self._drawing})
        await asyncio.to_thread(self._draw)

    def _draw(self) -> None:
        try:
            if self._folder.metrics.is_file():
                temperature = self._recipe.validation_sampling.temperature
                draw_curve(self._folder.metrics, self._folder.curve, title=self._recipe.name, validation_temperature=temperature)
        except LightningError as error:
            if str(error) != self._warned:
                logger.warning("%s", error)
            self._warned = str(error)


class _Starter:
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
        """Returns once the first worker is."""
        self.begin()
        if self._starting:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)


def _settings_of_each(settings: ServerSettings, servers: int) -> list[ServerSettings]:
    """Further servers take the ports after the first one's."""
    return [settings.model_copy(update={"port": settings.port and settings.port + number}) for number in range(servers)]


def server_settings(recipe: Recipe, parts: Parts, store_url: str, *, host: str = "127.0.0.1", port: int = 0) -> ServerSettings:
    """The server's share of the recipe."""
    policies = {
        name: PolicySettings(
            model=parts.models[name],
            renderer=policy.renderer,
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
    """By policy, one after the other; where one fails, those before it are closed."""
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
    """Also those that nobody has waited for yet: what a thread loads is loaded first."""
    await asyncio.wait({building})
    if not building.cancelled() and building.exception() is None:
        for backend in building.result().values():
            await asyncio.to_thread(backend.close)


@asynccontextmanager
async def _watched(servers: Sequence[ServerProcess], pools: Sequence[WorkerPool]) -> AsyncIterator[None]:
    """Restart a server when it dies; end the body when a pool gives up."""
    body = asyncio.current_task()
    assert body is not None
    failure: list[BaseException] = []

    async def watch(watched: Awaitable[Any]) -> None:
        try:
            await watched
        except Exception as error:  # noqa: BLE001  handed to the body, which raises it
            failure.append(error)
            body.cancel()

    watchers = [asyncio.create_task(watch(watched)) for watched in (*map(_keep_alive, servers), *(pool.wait() for pool in pools))]
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
