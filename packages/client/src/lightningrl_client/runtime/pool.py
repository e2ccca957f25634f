"""A run's workers as trainer and command line hold them: started by a launcher, known by what the server says of them.

WorkerPool ─ start, stop ─► WorkerLauncher ─► Supervisor ─► workers ─ ready, failed, lost ─► server ─► WorkerPool
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from lightningrl import control_api as api
from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.errors import ConfigError, LightningError, ServerError
from lightningrl.keys import is_worker_key, worker_key
from lightningrl.records import WorkerRecord, WorkerState
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.agent_loader import agent_reference
from lightningrl_client.runtime.launcher import WorkerLauncher, WorkerPlan, WorkerPoolError
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_client.runtime.supervisor import LocalLauncher

__all__ = ["WorkerPool", "WorkerPoolError"]

LOOK_S: Final = 30.0
"""Seconds that the server may hold the question for the workers' states; it answers at once where one changes."""

logger = logging.getLogger(__name__)


class WorkerPool:
    """Runs `agent` for the rollouts of a server. An async context manager; or `start`, `wait`, `stop`."""

    def __init__(
        self,
        server_url: str,
        key: str,
        agent: str | Mapping[str, Any] | Callable[..., Any],
        *,
        workers: int = 2,
        concurrency: int = 1,
        adapters: Sequence[str] = (),
        base_urls: Sequence[str] = (),
        dialects: Sequence[Dialect] = DIALECTS,
        base_dir: Path | str = ".",
        log_folder: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        infrastructure: Sequence[str] = (),
        withheld: Sequence[str] = (),
        launcher: WorkerLauncher | None = None,
        lease_s: float = 30.0,
        lease_wait_s: float = 10.0,
        patience_s: float = 60.0,
    ) -> None:
        """`key` is the run's or a worker's; workers get a worker's in any case. `environment` is added to that of the
        workers' machine, less the variables that are `withheld`; `base_urls` are the agent's model endpoints beside the
        hosts of the `dialects`; `infrastructure` names exceptions of the agent's that the world causes; `launcher` says
        where workers run, None = here, as processes. Raises ConfigError.
        """
        for name, value in (("workers", workers), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: a worker pool needs at least 1")
        settings = WorkerSettings(
            server_url=server_url.rstrip("/"),
            worker_key=key if is_worker_key(key) else worker_key(key),
            worker_id=uuid.uuid4().hex[:8],
            agent=agent_reference(agent),
            base_dir=str(Path(base_dir).resolve()),
            adapters=tuple(adapters),
            base_urls=tuple(base_urls),
            dialects=tuple(dialects),
            infrastructure=tuple(infrastructure),
            withheld=tuple(withheld),
            concurrency=concurrency,
            lease_s=lease_s,
            lease_wait_s=lease_wait_s,
            patience_s=patience_s,
        )
        folder = None if log_folder is None else Path(log_folder)
        self._plan = WorkerPlan(settings=settings, environment=dict(environment or {}), log_folder=folder)
        self._workers = workers
        self._launcher = launcher or LocalLauncher()
        self._first_ready = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._failure: LightningError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start workers; returns when the first has imported the agent. Raises ConfigError or WorkerPoolError."""
        self._tasks = [asyncio.create_task(self._launch()), asyncio.create_task(self._watch())]
        await self._until(self._first_ready)

    async def wait_ready(self) -> None:
        """Returns when all workers have imported the agent."""
        await self._until(self._all_ready)

    async def wait(self) -> None:
        """Returns when the pool was stopped; raises what ended it otherwise."""
        await self._until(self._ended)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no more work, give running attempts `grace_s`, then kill. What is killed is given back to others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launcher.stop(grace_s)
        self._ended.set()

    def describe(self) -> str:
        """`4 workers on this machine`, or wherever they run."""
        return f"{self._workers} worker{'s' if self._workers > 1 else ''} {self._launcher.describe()}"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop(grace_s=0.0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _until(self, event: asyncio.Event) -> None:
        await event.wait()
        if self._failure is not None:
            raise self._failure

    async def _launch(self) -> None:
        try:
            await self._launcher.start(self._workers, self._plan)
        except LightningError as error:
            self._fail(error)
        except Exception as error:  # the boundary: a launcher's defect must not be waited for in silence
            logger.exception("the launcher failed")
            self._fail(WorkerPoolError(f"workers cannot be started: {type(error).__name__}: {error}"))

    async def _watch(self) -> None:
        """Follow what the server says of the workers, until one cannot go on."""
        settings = self._plan.settings
        seen = 0
        async with ServerClient(settings.server_url, settings.worker_key, patience_s=settings.patience_s) as client:
            while self._failure is None:
                where = api.WorkerFilter(prefix=settings.worker_id, seen=seen, wait_s=LOOK_S)
                try:
                    answer = await client.ask(api.WORKERS, where, wait_s=LOOK_S)
                except ServerError as error:
                    verb = "has lost" if seen else "cannot work for"
                    self._fail(WorkerPoolError(f"the worker pool {verb} the server: {error}"))
                    return
                seen = answer.version
                self._note(answer.workers)

    def _note(self, workers: Sequence[WorkerRecord]) -> None:
        for worker in workers:
            if worker.state is WorkerState.FAILED:
                self._fail(ConfigError(worker.error))
            elif worker.state is WorkerState.LOST:
                self._fail(WorkerPoolError(worker.error))
        ready = sum(worker.state is WorkerState.READY for worker in workers)
        if ready:
            self._first_ready.set()
        if ready >= self._workers:
            self._all_ready.set()

    def _fail(self, error: LightningError) -> None:
        self._failure = self._failure or error
        for event in (self._first_ready, self._all_ready, self._ended):
            event.set()
