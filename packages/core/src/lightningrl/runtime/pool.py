"""The worker pool: keeps N warm workers alive, ends attempts that overrun, and reports for workers that died.

start ─► spawn ─► ready ─► attempts … ─┬─ attempt overran ──► kill, report `timeout`, respawn
                    │                  ├─ attempt revoked ──► kill, report `cancelled`, respawn
                    │                  └─ process died ─────► report `infrastructure_error`, respawn
                    └─ agent cannot be loaded ──► the pool fails, with that sentence
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from lightningrl.errors import ConfigError, LightningError, ServerError
from lightningrl.runtime.agent_loader import agent_reference
from lightningrl.runtime.control import ControlClient
from lightningrl.runtime.environment import worker_environment
from lightningrl.runtime.lease import Lease, LeasedTask
from lightningrl.runtime.process import HeldAttempt, WorkerProcess, open_log
from lightningrl.runtime.report import AttemptReport
from lightningrl.runtime.settings import WorkerSettings
from lightningrl.types import Outcome

__all__ = ["PoolStatus", "WorkerPool", "WorkerPoolError"]

MOST_CRASHES: Final = 5
"""Deaths of workers, one after the other without a finished attempt between them, before the pool gives up."""

logger = logging.getLogger(__name__)


class WorkerPoolError(LightningError):
    """The pool cannot go on: workers keep dying, or the server is gone."""


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
        run_key: str,
        agent: str | Callable[..., Any],
        *,
        workers: int = 2,
        concurrency: int = 1,
        adapters: Sequence[str] = (),
        base_urls: Sequence[str] = (),
        base_dir: Path | str = ".",
        log_folder: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        lease_s: float = 30.0,
        lease_wait_s: float = 10.0,
        patience_s: float = 60.0,
    ) -> None:
        """`environment` is added to ours; `base_urls` are the agent's model endpoints beside the two providers. Raises ConfigError."""
        for name, value in (("workers", workers), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: a worker pool needs at least 1")
        self._server_url = server_url.rstrip("/")
        self._run_key = run_key
        self._workers = workers
        self._settings = WorkerSettings(
            server_url=self._server_url,
            run_key=run_key,
            worker_id="",
            agent=agent_reference(agent),
            base_dir=str(Path(base_dir).resolve()),
            adapters=tuple(adapters),
            base_urls=tuple(base_urls),
            concurrency=concurrency,
            lease_s=lease_s,
            lease_wait_s=lease_wait_s,
            patience_s=patience_s,
            parent_pid=os.getpid(),
        )
        self._environment = worker_environment(self._server_url, {**os.environ, **(environment or {})})
        self._log_folder = None if log_folder is None else Path(log_folder)
        self._name = uuid.uuid4().hex[:8]
        self._processes: dict[int, WorkerProcess] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._first_ready: asyncio.Event = asyncio.Event()
        self._all_ready: asyncio.Event = asyncio.Event()
        self._ended: asyncio.Event = asyncio.Event()
        self._failure: LightningError | None = None
        self._is_stopping = False
        self._crashes = 0
        self._finished = 0
        self._killed = 0
        self._spawned = 0

    async def start(self) -> None:
        """Spawn the workers; returns when the first has imported the agent. Raises ConfigError if the agent cannot be loaded."""
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
        for process in self._processes.values():
            process.stop()
        if self._slots:
            _, late = await asyncio.wait(self._slots, timeout=grace_s)
            held = [attempt for process in self._processes.values() for attempt in process.held.values()]
            for process in tuple(self._processes.values()):
                await process.kill()
            await self._report(held, Outcome.CANCELLED, "the worker pool was stopped")
            for slot in late:
                slot.cancel()
            await asyncio.gather(*self._slots, return_exceptions=True)
        self._ended.set()

    @property
    def status(self) -> PoolStatus:
        return PoolStatus(
            workers=self._workers,
            ready=sum(process.is_ready for process in self._processes.values()),
            busy=sum(bool(process.held) for process in self._processes.values()),
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

    async def _live(self, index: int) -> None:
        """One life of worker `index`."""
        settings = replace(self._settings, worker_id=f"{self._name}-{index}")
        with open_log(self._log_folder, index) as log:
            process = await WorkerProcess.spawn(settings, environment=self._environment, log=log)
        self._processes[index] = process
        self._spawned += 1
        if self._is_stopping:
            process.stop()
        try:
            verdict = await self._listen(index, process)
            status = await (process.wait() if verdict is None else process.kill())
        finally:
            await process.kill()
            del self._processes[index]
        if not self._is_stopping:
            await self._bury(index, process, status, verdict)

    async def _listen(self, index: int, process: WorkerProcess) -> str | None:
        """Follow the worker's events. Returns why it must be killed; None = it has ended by itself."""
        async for event in process.events():
            match event.kind:
                case "ready":
                    self._first_ready.set()
                    if len(self._processes) == self._workers and all(other.is_ready for other in self._processes.values()):
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

    async def _bury(self, index: int, process: WorkerProcess, status: int, verdict: str | None) -> None:
        """Report the attempts that ended with the worker; raise if workers die without end."""
        held = process.held.values()
        if verdict is not None:
            await self._report(held, Outcome.INFRASTRUCTURE_ERROR, f"its worker was killed because {verdict}")
            return
        how = describe_exit(status)
        log = "its stderr" if self._log_folder is None else f"{str(self._log_folder / f'worker-{index}.log')!r}"
        if not process.is_ready and not self._first_ready.is_set() and status != -signal.SIGKILL:
            raise ConfigError(f"agent {self._settings.agent!r}: the worker {how} while it imported the agent; see {log}")
        logger.warning("worker %d %s; see %s", index, how, log)
        await self._report(held, Outcome.INFRASTRUCTURE_ERROR, f"the worker process {how} while it ran the agent; see {log}")
        self._crashes += 1
        if self._crashes >= MOST_CRASHES:
            raise WorkerPoolError(
                f"workers died {self._crashes} times in a row without finishing an attempt (the last one {how}); see {log}"
            )

    async def _report(self, attempts: Iterable[HeldAttempt], outcome: Outcome, error: str) -> None:
        """Tell the server how attempts ended whose worker cannot."""
        for held in attempts:
            self._killed += 1
            report = AttemptReport(outcome=outcome, error=error, duration_s=time.monotonic() - held.started_at)
            try:
                await asyncio.to_thread(self._send_report, held, report)
            except ServerError as problem:
                logger.warning("rollout %s: its outcome %s could not be reported: %s", held.rollout_id, outcome, problem)

    def _send_report(self, held: HeldAttempt, report: AttemptReport) -> None:
        client = ControlClient(self._server_url, self._run_key, patience_s=5.0 if self._is_stopping else self._settings.patience_s)
        lease = Lease(
            rollout_id=held.rollout_id,
            attempt=held.attempt,
            task=LeasedTask(id="", input=None),
            timeout_s=held.limit_s,
            key="",
            base_path="",
        )
        try:
            client.report(lease, report)
        finally:
            client.close()

    def _fail(self, error: LightningError) -> None:
        self._failure = self._failure or error
        for process in self._processes.values():
            process.stop()
        for event in (self._first_ready, self._all_ready, self._ended):
            event.set()


def describe_exit(status: int) -> str:
    """`died with SIGSEGV`, `exited with status 1`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"died with {signal.Signals(-status).name}"
    except ValueError:
        return f"died with signal {-status}"
