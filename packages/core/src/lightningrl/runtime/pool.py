"""The worker pool: keeps N warm workers alive, ends attempts that overrun, and reports for workers that died. Where they run is the
launcher's; what becomes of them and their attempts is the same everywhere.

start ─► spawn ─► ready ─► attempts … ─┬─ attempt overran ──► kill, report `timeout`, respawn
                    │                  ├─ attempt revoked ──► kill, report `cancelled`, respawn
                    │                  └─ process died ─────► report `infrastructure_error`, respawn
                    └─ agent cannot be loaded ──► the pool fails, with that sentence
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from lightningrl.control.api import Result
from lightningrl.control.blocking import ControlClient
from lightningrl.errors import ConfigError, LightningError, ServerError
from lightningrl.keys import is_worker_key, worker_key
from lightningrl.runtime.agent_loader import agent_reference
from lightningrl.runtime.launcher import WorkerExit, WorkerLauncher, WorkerPoolError
from lightningrl.runtime.process import LocalLauncher
from lightningrl.runtime.settings import WorkerSettings
from lightningrl.runtime.watched import HeldAttempt, WatchedWorker
from lightningrl.store.protocol import Lease
from lightningrl.types import Outcome, RolloutMode, Task

__all__ = ["PoolStatus", "WorkerPool", "WorkerPoolError"]

MOST_CRASHES: Final = 5
"""Deaths of workers, one after the other without a finished attempt between them, before the pool gives up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolStatus:
    """The pool at one moment."""

    workers: int
    ready: int
    busy: int
    finished: int
    """Attempts that workers ended by themselves."""
    killed: int
    """Attempts that ended with their worker: timeouts, cancellations, deaths."""
    spawned: int


class WorkerPool:
    """Runs `agent` for the rollouts of a server. An async context manager; or `start`, `wait`, `stop`."""

    def __init__(
        self,
        server_url: str,
        key: str,
        agent: str | Callable[..., Any],
        *,
        workers: int = 2,
        concurrency: int = 1,
        adapters: Sequence[str] = (),
        base_urls: Sequence[str] = (),
        base_dir: Path | str = ".",
        log_folder: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        launcher: WorkerLauncher | None = None,
        lease_s: float = 30.0,
        lease_wait_s: float = 10.0,
        patience_s: float = 60.0,
    ) -> None:
        """`key` is the run's or a worker's; workers get a worker's in any case. `environment` is added to that of the workers' machine;
        `base_urls` are the agent's model endpoints beside the two providers; `launcher` says where workers run, None = as processes of
        this machine. Raises ConfigError.
        """
        for name, value in (("workers", workers), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: a worker pool needs at least 1")
        self._server_url = server_url.rstrip("/")
        self._worker_key = key if is_worker_key(key) else worker_key(key)
        self._workers = workers
        self._settings = WorkerSettings(
            server_url=self._server_url,
            worker_key=self._worker_key,
            worker_id="",
            agent=agent_reference(agent),
            base_dir=str(Path(base_dir).resolve()),
            adapters=tuple(adapters),
            base_urls=tuple(base_urls),
            concurrency=concurrency,
            lease_s=lease_s,
            lease_wait_s=lease_wait_s,
            patience_s=patience_s,
        )
        self._environment = dict(environment or {})
        self._launcher = launcher or LocalLauncher()
        self._is_open = False
        self._log_folder = None if log_folder is None else Path(log_folder)
        self._name = uuid.uuid4().hex[:8]
        self._living: dict[int, WatchedWorker] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._first_ready: asyncio.Event = asyncio.Event()
        self._all_ready: asyncio.Event = asyncio.Event()
        self._ended: asyncio.Event = asyncio.Event()
        self._failure: LightningError | None = None
        self._is_stopping = False
        self._crashes = 0
        self._lost_nodes: set[str] = set()
        self._finished = 0
        self._killed = 0
        self._spawned = 0

    async def open(self) -> None:
        """Get ready to spawn workers. Raises ConfigError, within seconds, where none could be: an unreachable cluster, for example."""
        if not self._is_open:
            await self._launcher.open(self._server_url)
            self._is_open = True

    async def start(self) -> None:
        """Spawn the workers; returns when the first has imported the agent. Raises ConfigError if the agent cannot be loaded."""
        await self._opened()
        self._slots = [asyncio.create_task(self._keep(index), name=f"worker-{index}") for index in range(self._workers)]
        await self._until(self._first_ready)

    async def wait_ready(self) -> None:
        """Returns when all workers have imported the agent."""
        await self._until(self._all_ready)

    async def wait(self) -> None:
        """Returns when the pool was stopped; raises what ended it otherwise."""
        await self._until(self._ended)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no more work, give running attempts `grace_s` to finish, then kill. Attempts that are killed are reported as cancelled."""
        self._is_stopping = True
        for process in self._living.values():
            process.stop()
        if self._slots:
            _, late = await asyncio.wait(self._slots, timeout=grace_s)
            held = [attempt for process in self._living.values() for attempt in process.held.values()]
            for process in tuple(self._living.values()):
                await process.kill()
            await self._report(held, Outcome.CANCELLED, "the worker pool was stopped")
            for slot in late:
                slot.cancel()
            await asyncio.gather(*self._slots, return_exceptions=True)
        await self._launcher.close()
        self._ended.set()

    @property
    def status(self) -> PoolStatus:
        return PoolStatus(
            workers=self._workers,
            ready=sum(process.is_ready for process in self._living.values()),
            busy=sum(bool(process.held) for process in self._living.values()),
            finished=self._finished,
            killed=self._killed,
            spawned=self._spawned,
        )

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def _opened(self) -> None:
        """`open`, for a pool that others wait for."""
        try:
            await self.open()
        except LightningError as error:
            self._fail(error)
            raise

    async def _until(self, event: asyncio.Event) -> None:
        await event.wait()
        if self._failure is not None:
            raise self._failure

    async def _keep(self, index: int) -> None:
        """Keep worker `index` alive until the pool stops or fails."""
        try:
            while not self._is_stopping and self._failure is None:
                await self._live(index)
        except LightningError as error:
            self._fail(error)
        except OSError as error:
            self._fail(WorkerPoolError(f"worker {index} cannot be started: {error}"))
        except Exception as error:  # the boundary: a pool that loses a worker must not wait for it in silence
            logger.exception("worker %d: its supervision failed", index)
            self._fail(WorkerPoolError(f"worker {index} cannot be supervised any more: {type(error).__name__}: {error}"))

    async def _live(self, index: int) -> None:
        """One life of worker `index`."""
        settings = replace(self._settings, worker_id=f"{self._name}-{index}", event_token=secrets.token_hex(16))
        log = None if self._log_folder is None else self._log_folder / f"worker-{index}.log"
        line = await self._launcher.spawn(settings, environment=self._environment, log=log)
        process = WatchedWorker(line, settings.event_token)
        self._living[index] = process
        self._spawned += 1
        if self._is_stopping:
            process.stop()
        try:
            verdict = await self._listen(index, process)
            ended = await (process.wait() if verdict is None else process.kill())
        finally:
            await process.kill()
            del self._living[index]
        if not self._is_stopping:
            await self._bury(index, process, ended, verdict)

    async def _listen(self, index: int, process: WatchedWorker) -> str | None:
        """Follow the worker's events. Returns why it must be killed; None = it has ended by itself."""
        async for event in process.events():
            match event.kind:
                case "ready":
                    self._first_ready.set()
                    if len(self._living) == self._workers and all(other.is_ready for other in self._living.values()):
                        self._all_ready.set()
                case "finished":
                    self._finished += 1
                    self._crashes = 0
                case "failed":
                    raise ConfigError(event.error)
                case "lost":
                    raise WorkerPoolError(f"worker {index} has lost the server: {event.error}")
                case "revoked":
                    held = process.held.pop((event.rollout_id, event.attempt), None)
                    if held is not None:
                        await self._report([held], Outcome.CANCELLED, "the attempt was cancelled")
                        return "another attempt was cancelled"
        overdue = process.overdue()
        for held in overdue:
            del process.held[held.rollout_id, held.attempt]
        for held in overdue:
            message = f"the agent ran longer than its time limit of {held.limit_s:g} s; its worker was killed"
            await self._report([held], Outcome.TIMEOUT, message)
        return "another attempt ran longer than its time limit" if overdue else None

    async def _bury(self, index: int, process: WatchedWorker, ended: WorkerExit, verdict: str | None) -> None:
        """Report the attempts that ended with the worker; raise if workers die without end."""
        held = process.held.values()
        if verdict is not None:
            await self._report(held, Outcome.INFRASTRUCTURE_ERROR, f"its worker was killed because {verdict}")
            return
        log = "its stderr" if self._log_folder is None else f"{str(self._log_folder / f'worker-{index}.log')!r}"
        if not process.is_ready and not self._first_ready.is_set() and not ended.is_foreign:
            raise ConfigError(f"agent {self._settings.agent!r}: the worker {ended.how} while it imported the agent; see {log}")
        logger.warning("worker %d %s; see %s", index, ended.how, log)
        await self._report(held, Outcome.INFRASTRUCTURE_ERROR, f"the worker process {ended.how} while it ran the agent; see {log}")
        if ended.lost_node is not None:
            if ended.lost_node in self._lost_nodes:
                return
            self._lost_nodes.add(ended.lost_node)
        self._crashes += 1
        if self._crashes >= MOST_CRASHES:
            raise WorkerPoolError(
                f"workers died {self._crashes} times in a row without finishing an attempt (the last one {ended.how}); see {log}"
            )

    async def _report(self, attempts: Iterable[HeldAttempt], outcome: Outcome, error: str) -> None:
        """Tell the server how attempts ended whose worker cannot."""
        for held in attempts:
            self._killed += 1
            report = Result(outcome=outcome, error=error, duration_s=time.monotonic() - held.started_at)
            try:
                await asyncio.to_thread(self._send_report, held, report)
            except ServerError as problem:
                logger.warning("rollout %s: its outcome %s could not be reported: %s", held.rollout_id, outcome, problem)

    def _send_report(self, held: HeldAttempt, report: Result) -> None:
        client = ControlClient(self._server_url, self._worker_key, patience_s=5.0 if self._is_stopping else self._settings.patience_s)
        lease = Lease(
            rollout_id=held.rollout_id,
            attempt=held.attempt,
            task=Task(id="", input=None),
            mode=RolloutMode.TRAIN,
            timeout_s=held.limit_s,
            key="",
            expires_at=0.0,
        )
        try:
            client.report(lease, report)
        finally:
            client.close()

    def _fail(self, error: LightningError) -> None:
        self._failure = self._failure or error
        for process in self._living.values():
            process.stop()
        for event in (self._first_ready, self._all_ready, self._ended):
            event.set()
