"""Keeps N workers of this machine alive. `lightningrl train` and `lightningrl work` have one; so has every Ray node.

spawn ─► attempts … ─┬─ an attempt overran ──► kill, report `timeout` ──────────────┐
  ▲                  └─ the process ended ───► report `infrastructure_error`, pause ─┤
  └──────────────────────────────────────────────────────────────────────────────────┘
         the agent cannot be loaded, workers keep dying ─► tell the server, start no more

How its workers are and what they run it asks the server; of the processes it sees the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lightningrl import control_api as api
from lightningrl.errors import ConfigError, LightningError, ServerError
from lightningrl.keys import process_key
from lightningrl.records import RunningAttempt, WorkerRecord, WorkerState
from lightningrl.types import Outcome
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.launcher import WorkerPlan, WorkerPoolError
from lightningrl_client.runtime.report import clean_text
from lightningrl_client.runtime.worker_process import LOST_STATUS, WorkerProcess, describe_exit

__all__ = ["LocalLauncher", "Supervisor", "end_attempts", "give_back", "tell_failure"]

LOOK_S: Final = 1.0
"""Between two looks at what the workers run; as much later may an attempt be killed that overran."""
STOP_PATIENCE_S: Final = 5.0
MOST_CRASHES: Final = 5
"""Deaths of workers, one after the other without a finished attempt between them, before the supervisor gives up."""
RESTART_PAUSE_S: Final = 0.1
"""After the first death; twice as long after each that follows."""
KILLED: Final = -9
"""The status of a process that was killed from outside, which says nothing about the agent."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _HeldAttempt:
    attempt: RunningAttempt
    started_at: float
    """`time.monotonic()` when it was first seen."""
    deadline: float


@dataclass(slots=True)
class _Life:
    """One process of a worker."""

    worker_id: str
    process: WorkerProcess
    held: Mapping[tuple[str, int], _HeldAttempt] = field(default_factory=dict[tuple[str, int], _HeldAttempt])
    finished: int = 0
    """Attempts that it was given and runs no more."""
    was_ready: bool = False
    is_overdue: bool = False
    """True if it was killed because an attempt overran."""
    has_ended: bool = False
    """True once its attempts were ended for it; they are none that it finished."""

    def overdue(self) -> list[_HeldAttempt]:
        now = time.monotonic()
        return [held for held in self.held.values() if held.deadline <= now]


class Supervisor:
    """Workers as processes of this one, which end with it. Made and used on one event loop."""

    def __init__(self, plan: WorkerPlan, workers: int) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._name = plan.settings.worker_id
        settings = plan.settings
        self._client = ServerClient(settings.server_url, settings.worker_key, patience_s=settings.patience_s)
        self._workers = workers
        self._living: dict[int, _Life] = {}
        self._stopping = asyncio.Event()
        self._has_been_ready = False
        self._may_follow = asyncio.Event()
        """Where cores are few, imports side by side only make the first worker late: the others wait for it."""
        if workers < (os.cpu_count() or 1):
            self._may_follow.set()
        self._crashes = 0
        self._running: asyncio.Task[None] | None = None
        self._slots: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Spawn the workers."""
        self._slots = [asyncio.create_task(self._keep(index), name=f"worker-{index}") for index in range(self._workers)]
        self._running = asyncio.create_task(self._run(), name=f"supervisor {self._name}")

    async def stop(self, grace_s: float) -> None:
        """Take no more work, let running attempts finish for `grace_s`, then kill; others run what was killed."""
        self._stopping.set()
        settings = self._settings
        until = time.monotonic() + grace_s
        async with ServerClient(settings.server_url, settings.worker_key, patience_s=STOP_PATIENCE_S) as client:
            with contextlib.suppress(ServerError):  # nobody can be told: what runs is killed
                while self._living and (left := until - time.monotonic()) > 0:
                    await client.ask(api.STOP_WORKERS, api.WorkerPrefix(prefix=f"{self._name}-"))
                    await asyncio.wait(self._slots, timeout=min(left, LOOK_S))
            for life in tuple(self._living.values()):
                await life.process.kill()
            await give_back(client, f"{self._name}-")
        tasks = [*self._slots, *filter(None, [self._running])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _run(self) -> None:
        """Watch, and tell the server of an error that ends the watch or a slot."""
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(watch, *self._slots)
        except Exception as error:  # noqa: BLE001  workers that nobody supervises must not be waited for in silence
            self._stopping.set()
            await tell_failure(self._client, self._name, error)
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Kill workers whose attempts overran."""
        seen = 0
        while True:
            deadlines = (held.deadline for life in self._living.values() for held in life.held.values())
            soonest = min(deadlines, default=time.monotonic() + LOOK_S)
            seen = (await self._look(seen, min(LOOK_S, max(0.05, soonest - time.monotonic())))).version
            for life in tuple(self._living.values()):
                if life.overdue() and not (life.is_overdue or life.has_ended):
                    life.is_overdue = True
                    await life.process.kill()

    async def _look(self, seen: int = 0, wait_s: float = 0.0) -> api.Workers:
        """Ask the server how the workers are and what they run."""
        where = api.WorkerFilter(prefix=f"{self._name}-", seen=seen, wait_s=wait_s)
        workers = await self._client.ask(api.WORKERS, where, wait_s=wait_s)
        for life in self._living.values():
            if not life.has_ended:
                self._note(life, workers)
        return workers

    def _note(self, life: _Life, workers: api.Workers) -> None:
        """Note the attempts that the process runs. A process that is not ready runs nothing: the attempts listed were
        its predecessor's. Nothing is forgotten of a process that a restarted server does not know yet."""
        record = _record(life, workers)
        life.was_ready = life.was_ready or (record is not None and record.state is WorkerState.READY)
        self._has_been_ready = self._has_been_ready or life.was_ready
        if life.was_ready:
            self._may_follow.set()
        now = time.monotonic()
        held: dict[tuple[str, int], _HeldAttempt] = {}
        for attempt in workers.running:
            place = attempt.rollout_id, attempt.attempt
            if attempt.worker_id.partition("/")[0] != life.worker_id or not life.was_ready:
                continue
            if place in life.held:
                held[place] = life.held[place]
            elif record is not None:
                deadline = now + attempt.timeout_s + record.grace_s
                held[place] = _HeldAttempt(attempt=attempt, started_at=now, deadline=deadline)
        life.held = held
        finished = 0 if record is None else record.leases - len(held)
        if finished > life.finished:
            life.finished = finished
            self._crashes = 0

    async def _keep(self, index: int) -> None:
        """Keep worker `index` alive."""
        name = f"{self._name}-{index}"
        settings = replace(self._settings, worker_id=name, worker_key=process_key(self._settings.worker_key, name))
        log = None if self._plan.log_folder is None else self._plan.log_folder / f"worker-{index}.log"
        where = f"the supervisor's stderr on {socket.gethostname()}" if log is None else repr(str(log))
        if index:
            await self._may_follow.wait()
        while not self._stopping.is_set():
            try:
                life = _Life(settings.worker_id, WorkerProcess.spawn(settings, self._plan.environment, log))
            except OSError as error:
                raise WorkerPoolError(f"worker {index} cannot be started: {error}") from error
            self._living[index] = life
            try:
                status = await life.process.wait()
                if not self._stopping.is_set():
                    await self._bury(index, life, status, where)
            finally:
                await life.process.kill()
                del self._living[index]
            self._may_follow.set()

    async def _bury(self, index: int, life: _Life, status: int, log: str) -> None:
        """Report the attempts that ended with the worker; raise if workers die without end."""
        record = _record(life, await self._look())
        life.has_ended = True
        if life.is_overdue or (record is not None and record.state is WorkerState.REVOKED):
            overdue = life.overdue() if life.is_overdue else []
            for held in overdue:
                limit_s = held.deadline - held.started_at
                why = f"the agent ran longer than its time limit of {limit_s:g} s; its worker was killed"
                await self._report([held], Outcome.TIMEOUT, why)
            if len(life.held) > len(overdue):  # a slot's id goes on after a slash: `w-1/` is none of `w-10`
                why = "ran longer than its time limit" if life.is_overdue else "was cancelled"
                reason = f"its worker was killed because another attempt {why}"
                await give_back(self._client, f"{life.worker_id}/", reason)
            return
        if life.process.failure:
            raise ConfigError(clean_text(life.process.failure))
        how = describe_exit(status)
        if not self._has_been_ready and status not in (KILLED, LOST_STATUS):
            problem = f"the worker {how} while it imported the agent"
            raise ConfigError(f"agent {self._settings.agent!r}: {problem}; see {log}")
        logger.warning("worker %d %s; see %s", index, how, log)
        sentence = f"the worker process {how} while it ran the agent; see {log}"
        # one crash may be the machine's; a second of the same rollout is the agent's own doing, unless it was killed
        again = [held for held in life.held.values() if held.attempt.attempt > 1 and status != KILLED]
        is_of_agent = len(again) == len(life.held) == 1
        outcome = Outcome.AGENT_ERROR if is_of_agent else Outcome.INFRASTRUCTURE_ERROR
        repeated = "; so it did in an attempt before, or that was lost as well" if is_of_agent else ""
        await self._report(life.held.values(), outcome, sentence + repeated)
        self._crashes += 1
        if self._crashes >= MOST_CRASHES:
            times = f"{self._crashes} times in a row without finishing an attempt"
            raise WorkerPoolError(f"workers died {times} (the last one {how}); see {log}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), RESTART_PAUSE_S * 2 ** (self._crashes - 1))

    async def _report(self, attempts: Iterable[_HeldAttempt], outcome: Outcome, error: str) -> None:
        """Tell the server how attempts ended whose worker cannot."""
        for held in attempts:
            await _end(self._client, held.attempt, outcome, error, time.monotonic() - held.started_at)


def _record(life: _Life, workers: api.Workers) -> WorkerRecord | None:
    """The process's own report of its state, if the server has one."""
    mine = (record for record in workers.workers if record.id == life.worker_id and record.pid == life.process.pid)
    return next(mine, None)


async def tell_failure(client: ServerClient, name: str, error: Exception) -> None:
    """Tell the server, and with it whoever waits for them, why workers cannot go on."""
    if not isinstance(error, LightningError):
        logger.error("%s: supervision failed", name, exc_info=error)
        error = WorkerPoolError(f"workers cannot be supervised any more: {type(error).__name__}: {error}")
    state = WorkerState.FAILED if isinstance(error, ConfigError) else WorkerState.LOST
    beat = api.WorkerBeat(pid=os.getpid(), host=socket.gethostname(), state=state, error=clean_text(str(error)))
    try:
        await client.ask(api.BEAT, beat, wid=name)
    except ServerError as problem:
        logger.error("%s; nor can the server be told: %s", error, problem)


async def give_back(client: ServerClient, prefix: str, reason: str = "the worker pool was stopped") -> None:
    """Have others run, uncharged, what workers of this prefix did not finish, or were leased and never received."""
    try:
        await client.ask(api.INTERRUPT_WORKERS, api.InterruptWorkers(prefix=prefix, reason=reason))
    except ServerError as problem:
        logger.warning("what workers ran could not be given back: %s", problem)


async def end_attempts(client: ServerClient, prefix: str, error: str) -> None:
    """End what workers of this prefix run: they are gone."""
    try:
        workers = await client.ask(api.WORKERS, api.WorkerFilter(prefix=prefix))
    except ServerError as problem:
        logger.warning("what workers ran could not be ended: %s", problem)
        return
    for attempt in workers.running:
        await _end(client, attempt, Outcome.INFRASTRUCTURE_ERROR, error)


async def _end(
    client: ServerClient, attempt: RunningAttempt, outcome: Outcome, error: str, duration_s: float = 0.0
) -> None:
    try:
        await client.finish_attempt(attempt.rollout_id, attempt.attempt, outcome, None, error, duration_s)
    except ServerError as problem:
        logger.warning("rollout %s: its outcome %s could not be reported: %s", attempt.rollout_id, outcome, problem)


class LocalLauncher:
    """Workers of this machine, supervised by this process."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None

    async def start(self, count: int, plan: WorkerPlan) -> None:
        self._supervisor = Supervisor(plan, count)
        self._supervisor.start()

    async def stop(self, grace_s: float) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await supervisor.stop(grace_s)

    def describe(self) -> str:
        return "on this machine"
