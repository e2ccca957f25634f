"""A warm worker process: imports the agent once, then leases, runs and reports one attempt after the other.

    stdin    settings, one JSON line; then silent: its end ends the worker, for its supervisor is gone
    stdout, stderr   the log, with everything the agent prints
    HTTP     how it is, leases, results; the answer to a beat says that it is to stop

Exclusive (concurrency 1): the agent runs in the main thread, async agents on one long-lived loop there. Otherwise each
slot is a thread; async agents share a loop in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lightningrl.control_api import Orders, Result, ThenLease, WorkerBeat
from lightningrl.errors import LightningError, ServerError
from lightningrl.processes import die_with_parent, list_living
from lightningrl.records import Lease, WorkerState
from lightningrl.types import Outcome
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope
from lightningrl_client.control.blocking import ControlClient, RefusedError
from lightningrl_client.runtime.agent_loader import LoadedAgent, load_agent
from lightningrl_client.runtime.attempt import Attempt
from lightningrl_client.runtime.environment import programs_attributed, rollout_environment
from lightningrl_client.runtime.report import clean_text
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_client.runtime.worker_process import LOST_STATUS, die_with_pipe, kill_own_group, say_first, take_stdin

__all__ = ["Worker", "Workplace", "main"]

MOST_HOSTS: Final = 100
MOST_NAMES: Final = 100
LONGEST_NAME: Final = 300
ASYNC_GRACE_S: Final = 5.0
"""Seconds that an async agent may take to react to its cancellation at the time limit, before the process is killed."""

SHARED_GRACE_S: Final = 1.0
"""Seconds that a rollout's tasks, processes and programs have to end after it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """The things that the workers of a process share: patches are of the whole process."""

    agent: LoadedAgent
    redirection: Redirection
    patches: contextlib.ExitStack
    telemetry: Any
    """`runtime.telemetry.Telemetry`; None where the recipe names no adapter."""

    @classmethod
    def open(cls, settings: WorkerSettings, agent: Callable[..., Any] | None = None) -> Workplace:
        """Patch the process and load the agent. `agent`: an object of this process, which is not the agent's alone
        then. Raises LightningError."""
        is_guest = agent is not None
        scope = RolloutScope(exclusive=settings.concurrency == 1 and not is_guest)
        redirection = Redirection(
            server_url=settings.server_url,
            scope=scope,
            base_urls=settings.base_urls,
            dialects=settings.dialects,
            is_guest=is_guest,
        )
        with contextlib.ExitStack() as patches:
            redirection.install()
            patches.callback(redirection.uninstall)
            patches.enter_context(programs_attributed(redirection))
            telemetry = None
            if settings.adapters:
                from lightningrl_client.runtime.telemetry import Telemetry, load_adapter

                telemetry = Telemetry(scope, [load_adapter(name) for name in settings.adapters])
                patches.callback(telemetry.close)
                redirection.resolvers.extend(telemetry.resolvers)
            loaded = load_agent(agent or settings.agent, settings.base_dir)
            if telemetry is not None:
                telemetry.watch_agent()
            return cls(agent=loaded, redirection=redirection, patches=patches.pop_all(), telemetry=telemetry)

    def close(self) -> None:
        """Take the patches back."""
        self.patches.close()


class Worker:
    """Everything of one worker process. `run` returns when it was told to stop or lost the server."""

    def __init__(self, settings: WorkerSettings, place: Workplace | None = None) -> None:
        """`place` None = the process is this worker's own. Raises LightningError where the agent cannot be loaded."""
        self._settings = settings
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self.lost = ""
        """Why it can lease no more, from the server's sentence."""
        self._waiting: set[ControlClient] = set()
        self._runner = asyncio.Runner()
        self._shared_loop: asyncio.AbstractEventLoop | None = None
        self._slots: dict[threading.Thread, asyncio.Future[None]] = {}
        self._heart = Heart(
            self._client(), settings.worker_id, lease_s=settings.lease_s, on_stop=self.stop, on_revoked=self._revoke
        )
        self._heart.say(WorkerState.STARTING)
        self._place = place or Workplace.open(settings)
        self._agent, self._telemetry = self._place.agent, self._place.telemetry
        self._scope = self._place.redirection.scope
        self._heart.grace_s = ASYNC_GRACE_S if self._agent.is_async else 0.0

    def run(self) -> int:
        """Work until told to stop. Returns the exit status."""
        if self._agent.is_async and not self._place.redirection.is_guest:
            self._place.redirection.home_loop = self._runner.get_loop()
        self._heart.start()
        if self._scope.exclusive:
            self._serve(0)
        else:
            self._runner.run(self._serve_slots())
        self._heart.stop()
        with contextlib.suppress(RuntimeError):  # the agent may have closed the loop
            self._runner.close()
        return LOST_STATUS if self.lost else 0

    def stop(self) -> None:
        """Finish the attempts that run, take no more. From any thread."""
        self._stopping.set()
        for client in tuple(self._waiting):
            client.interrupt()

    def _client(self) -> ControlClient:
        return ControlClient(self._settings.server_url, self._settings.worker_key, patience_s=self._settings.patience_s)

    async def _serve_slots(self) -> None:
        """Serve in as many threads as attempts may run at a time, with this loop for the async agents in them."""
        self._shared_loop = asyncio.get_running_loop()
        for slot in range(self._settings.concurrency):
            name = f"lightningrl-slot-{slot}"
            thread = threading.Thread(target=self._serve_slot, args=(slot,), name=name, daemon=True)
            self._slots[thread] = self._shared_loop.create_future()
        for thread in self._slots:
            thread.start()
        await asyncio.wait(self._slots.values())

    def _serve_slot(self, slot: int) -> None:
        try:
            self._serve(slot)
        finally:
            self._end_slot(threading.current_thread())

    def _end_slot(self, thread: threading.Thread) -> None:
        """Note that the thread serves no more. May be called again, from any thread."""
        assert self._shared_loop is not None
        ended = self._slots[thread]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._shared_loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

    def _serve(self, slot: int) -> None:
        """One slot: lease, run, report, until told to stop. A report brings the next lease where one waits."""
        client = self._client()
        worker_id = f"{self._settings.worker_id}/{slot}" if self._settings.concurrency > 1 else self._settings.worker_id
        then = ThenLease(worker_id=worker_id, lease_s=self._settings.lease_s)
        lease: Lease | None = None
        while lease is not None or not self._stopping.is_set():
            if lease is None:
                self._waiting.add(client)
                try:
                    wait_s, lease_s = self._settings.lease_wait_s, self._settings.lease_s
                    lease = client.lease(worker_id=worker_id, wait_s=wait_s, lease_s=lease_s)
                except ServerError as error:
                    if not self._stopping.is_set():
                        self.lost = f"worker {worker_id} has lost the server: {error}"
                        logger.error("%s", self.lost)
                    return
                finally:
                    self._waiting.discard(client)
                # its line was cut, perhaps, when it had just been leased this
                if lease is not None and self._stopping.is_set():
                    client.close()
                    client = self._client()
            if lease is not None:
                rollout = ActiveRollout(
                    rollout_id=lease.rollout_id, attempt=lease.attempt, base_path=lease.base_path, key=lease.key
                )
                try:
                    lease = self._run_attempt(Attempt(lease, rollout, self._settings.infrastructure), client, then)
                except ServerError as error:
                    logger.error("rollout %s: its result was not taken: %s", rollout.rollout_id, error)
                    lease = None
        client.close()

    def _run_attempt(self, attempt: Attempt, client: ControlClient, then: ThenLease) -> Lease | None:
        """The next one's lease, where one came with the answer to the report."""
        lease, rollout = attempt.lease, attempt.rollout
        self._heart.add(attempt)
        try:
            with self._scope.entered(rollout), self._surroundings(rollout):
                report = attempt.run(self._agent, self._run_on_loop)
            if os.getpid() != self._pid:
                # a process that the agent has forked, and whose work ended where the agent's did, is no worker
                os._exit(1)
            threads = self._warn_of_threads(rollout)
            report = self._hand_in(attempt, client) or report
            report.left_threads = [clean_text(name, LONGEST_NAME) for name in threads[:MOST_NAMES]]
            if report.outcome is Outcome.SUCCEEDED or report.outcome.is_agents_own:
                names, report.own_calls = _work_left(rollout)
                report.left_work = [clean_text(name, LONGEST_NAME) for name in names[:MOST_NAMES]]
            if rollout.unseen_hosts:
                report.unseen_hosts = sorted(rollout.unseen_hosts)[:MOST_HOSTS]
            if self._telemetry is not None:
                report.spans = self._collect(rollout)
            report.then = None if self._stopping.is_set() else then
            return client.report(lease, report)
        finally:
            self._heart.remove(attempt)

    def _warn_of_threads(self, rollout: ActiveRollout) -> list[str]:
        """Names of the threads left behind, in an exclusive process: nothing tells them from the next rollout's."""
        names = rollout.threads.left_behind() if self._scope.exclusive else []
        if names:
            what = rollout.rollout_id, len(names), ", ".join(names[:10])
            logger.warning(
                "rollout %s: %d threads that it started still run (%s); model calls that they make from now on are "
                "taken for those of the rollouts that follow; join them before the agent returns",
                *what,
            )
        return names

    def _hand_in(self, attempt: Attempt, client: ControlClient) -> Result | None:
        """Hand in the agent's reports. Returns a failure where one is refused: the agent's if the report is wrong."""
        try:
            for report in attempt.rollout.reports:
                client.post(f"{attempt.lease.base_path}/{report.path}", report, key=attempt.lease.key)
        except ServerError as error:
            is_of_agent = isinstance(error, RefusedError) and error.is_of_report
            outcome = Outcome.AGENT_ERROR if is_of_agent else Outcome.INFRASTRUCTURE_ERROR
            return Result(outcome=outcome, error=f"what the agent reported was not taken: {error}")
        return None

    def _collect(self, rollout: ActiveRollout) -> bytes | None:
        """Spans are a view on the rollout, not the rollout: without them it still counts."""
        try:
            return self._telemetry.collect(rollout)  # type: ignore[no-any-return]
        except ValueError as error:  # a name of the agent's that is no text
            logger.warning("rollout %s: its spans are lost: %s", rollout.rollout_id, error)
            return None

    @contextlib.contextmanager
    def _surroundings(self, rollout: ActiveRollout) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._scope.exclusive:
                stack.enter_context(rollout_environment(self._settings.server_url, rollout, self._settings.dialects))
            if self._telemetry is not None:
                stack.enter_context(self._telemetry.attempt_span(self._agent.name))
            yield

    def _run_on_loop(self, awaitable: Awaitable[Any]) -> Any:
        async def run() -> tuple[Any, BaseException | None]:
            try:
                return await awaitable, None
            except (KeyboardInterrupt, SystemExit) as error:
                # raised by a task, they end the loop, which is not only this agent's
                return None, error

        if self._shared_loop is None:
            output, error = self._runner.run(run(), context=contextvars.copy_context())
        else:
            # carries this thread's context along
            output, error = asyncio.run_coroutine_threadsafe(run(), self._shared_loop).result()
        if error is not None:
            raise error
        return output

    def _revoke(self, attempt: Attempt) -> None:
        """In the heart's thread. An agent that cannot be stopped ends with its process; another is started."""
        if attempt.revoke():
            return
        client = self._client()
        try:
            client.report(attempt.lease, Result(outcome=Outcome.CANCELLED, error="the attempt was cancelled"))
        except ServerError as error:  # it has another outcome by now
            logger.info("rollout %s: %s", attempt.lease.rollout_id, error)
        try:
            self._heart.say(WorkerState.REVOKED)
        finally:
            kill_own_group()


@dataclass(eq=False)
class Heart:
    """A worker's pulse, in a thread of its own: says how the worker is, keeps its leases, hears what it is to do.

    It beats three times per lease. An order to stop is heard at once: the server holds the beat until there is one.
    """

    client: ControlClient
    """The heart's own."""
    worker_id: str
    lease_s: float
    on_stop: Callable[[], None]
    on_revoked: Callable[[Attempt], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], Attempt] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lightningrl-heart", daemon=True)
        self.grace_s = 0.0
        """Seconds that an attempt may go on beyond its limit before the worker is to be killed."""

    def start(self) -> None:
        """The worker is ready."""
        self.say(WorkerState.READY)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.client.interrupt()

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self._running[attempt.lease.rollout_id, attempt.lease.attempt] = attempt

    def remove(self, attempt: Attempt) -> None:
        with self._lock:
            self._running.pop((attempt.lease.rollout_id, attempt.lease.attempt), None)

    def say(self, state: WorkerState, *, wait_s: float = 0.0) -> Orders:
        """One beat. Before `start`, or from the heart's own thread."""
        with self._lock:
            running = list(self._running)
        beat = WorkerBeat(
            pid=os.getpid(),
            host=socket.gethostname(),
            state=state,
            grace_s=self.grace_s,
            running=running,
            lease_s=self.lease_s,
            wait_s=wait_s,
        )
        return self.client.beat(self.worker_id, beat)

    def _beat(self) -> None:
        wait_s = self.lease_s / 3
        while not self._stopped.is_set():
            try:
                orders = self.say(WorkerState.READY, wait_s=wait_s)
            except ServerError as error:
                if not self._stopped.wait(wait_s):
                    logger.warning("no heartbeat: %s", error)
                continue
            for place in orders.over:
                with self._lock:
                    attempt = self._running.pop(place, None)
                if attempt is not None:
                    self.on_revoked(attempt)
            if orders.stop:
                self.on_stop()
                self._stopped.wait(wait_s)
        self.client.close()


def _work_left(rollout: ActiveRollout) -> tuple[list[str], list[str]]:
    """Names of the work, and of the programs with its key, that go on a moment after the rollout; and the ids of the
    calls that were made in none of it. None without such work."""
    until = time.monotonic() + SHARED_GRACE_S
    while True:
        # no variable keeps a work while this sleeps: it ends with the last context that has it
        left = [(work.name, work.calls) for work in rollout.works if not work.is_done()]
        living = set(list_living(os.getpid())) if rollout.programs else ()
        programs = [name for pid, name in rollout.programs.items() if pid in living]
        if not (left or programs):
            return [], []
        if time.monotonic() > until:
            names = sorted({*programs, *(name for name, _ in left)})
            return names, sorted(rollout.asked.difference(*(calls for _, calls in left)))
        time.sleep(0.01)


def log_to_stderr() -> None:
    """Write our own log to stderr; the root logger is the agent's."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    for package in ("lightningrl", "lightningrl_client"):
        ours = logging.getLogger(package)
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False


def main() -> int:
    """Process main: settings from stdin, then work."""
    faulthandler.enable()  # what a crash in C leaves in the log
    lifeline = take_stdin()
    log_to_stderr()
    settings = msgspec.json.decode(lifeline.readline(), type=WorkerSettings)
    if settings.first_words:
        os.set_inheritable(settings.first_words, False)
    die_with_parent(settings.parent_pid)
    threading.Thread(target=die_with_pipe, args=(lifeline,), name="lightningrl-lifeline", daemon=True).start()
    try:
        worker = Worker(settings)
    except LightningError as error:
        logger.error("%s", error, exc_info=True)
        say_first(settings.first_words, clean_text(str(error)))
        return 3
    say_first(settings.first_words)
    return worker.run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that the agent left behind must not keep the process
