"""Workers in threads of this process, for an agent that no other can import: a notebook's cell, a closure, an instance.

WorkerPool ─► ThreadLauncher ─► ThreadWorker ─► the leases, gateway, attribution and traces of a worker process

A thread cannot be killed. An agent that does not stop at its time limit is left to itself: its attempt is a `timeout`,
what it asks from then on is refused, and another worker goes on in its place; after `MOST_LEFT` of them the run stops.
An agent that ends its process (`os._exit`, a crash) ends the run, what it prints goes where the run prints, and model
calls of its bare threads are nobody's: they go where its client sends them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from lightningrl.control_api import Result, ThenLease, WorkerBeat
from lightningrl.errors import ServerError
from lightningrl.records import Lease, WorkerState
from lightningrl.types import Outcome
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.attempt import Attempt
from lightningrl_client.runtime.environment import worker_environment
from lightningrl_client.runtime.launcher import WorkerPlan
from lightningrl_client.runtime.report import clean_text
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_client.runtime.supervisor import STOP_PATIENCE_S, give_back
from lightningrl_client.runtime.worker import Worker, Workplace

__all__ = ["ThreadLauncher"]

MOST_LEFT: Final = 32
"""Attempts that did not stop, before the run does."""

logger = logging.getLogger(__name__)


class ThreadLauncher:
    """Workers as threads of this process."""

    def __init__(self, agent: Callable[..., Any]) -> None:
        self._agent = agent
        self._settings: WorkerSettings
        self._place: Workplace | None = None
        self._workers: list[ThreadWorker] = []
        self._left = 0
        self._is_stopping = False
        self._lock = threading.Lock()
        self._variables: dict[str, str | None] = {}
        """Variables of the environment, as they were."""

    async def start(self, count: int, plan: WorkerPlan) -> None:
        """One worker for as many attempts at a time as `count`: async agents share an event loop, and clients in it."""
        self._settings = replace(plan.settings, concurrency=count * plan.settings.concurrency)
        wanted = worker_environment(plan.settings.server_url, os.environ)
        keys = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
        names = ["NO_PROXY", "no_proxy", *keys]
        self._variables = {name: os.environ.get(name) for name in names}
        os.environ.update({name: wanted[name] for name in names})  # a client asks for a key when it is made
        self._place = Workplace.open(self._settings, self._agent)
        await asyncio.to_thread(self._add)

    async def stop(self, grace_s: float) -> None:
        self._is_stopping = True
        until = time.monotonic() + grace_s
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            await asyncio.to_thread(worker.ended.wait, max(0.0, until - time.monotonic()))
        if self._workers:
            settings = self._settings
            async with ServerClient(settings.server_url, settings.worker_key, patience_s=STOP_PATIENCE_S) as client:
                await give_back(client, f"{self._settings.worker_id}-")
            for attempt, reporter in [known for worker in self._workers for known in tuple(worker.attempts.items())]:
                attempt.rollout.is_over = True
                attempt.revoke()
                reporter.interrupt()  # its outcome is told: when it ends, late, it waits for no server
        for name, value in self._variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        self._leave_place()

    def describe(self) -> str:
        return "in this process"

    def _leave_place(self) -> None:
        """Take the patches back, unless something runs still: what it asks must be refused. Its end takes them back."""
        with self._lock:
            if self._place is not None and self._is_stopping and not any(worker.attempts for worker in self._workers):
                self._place.close()
                self._place = None

    def _add(self) -> None:
        if self._place is None or self._is_stopping:
            return
        settings = replace(self._settings, worker_id=f"{self._settings.worker_id}-{len(self._workers)}")
        worker = ThreadWorker(settings, self._place, self._replace, self._leave_place)
        self._workers.append(worker)
        threading.Thread(target=worker.run, name=f"lightningrl-{settings.worker_id}", daemon=True).start()

    def _replace(self, worker: ThreadWorker) -> None:
        """Have another worker go on; called in a thread of the worker that was left with an attempt."""
        with self._lock:
            self._left += 1
            is_first, worker.is_replaced = not worker.is_replaced, True
        try:
            if self._left >= MOST_LEFT:
                worker.tell_lost(
                    f"{self._left} rollouts did not stop at their time limit, and threads cannot be killed; "
                    "put the agent into a file (agent = 'agent.py:answer'), so that it runs in processes that can be"
                )
            elif is_first:
                self._add()
        except ServerError as error:  # the pool notices that, too
            logger.warning("no worker goes on in the place of one that was left: %s", error)


class ThreadWorker(Worker):
    """A worker that is not alone in its process."""

    def __init__(
        self,
        settings: WorkerSettings,
        place: Workplace,
        on_left: Callable[[ThreadWorker], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_left(worker)`: an attempt did not stop; `on_end()`: an attempt ended, late or not."""
        super().__init__(settings, place)
        self.ended = threading.Event()
        self.attempts: dict[Attempt, ControlClient] = {}
        """Attempts that run, also those that did not stop, with the clients that report them."""
        self.is_replaced = False
        self._on_left = on_left
        self._on_end = on_end

    def run(self) -> int:
        try:
            status = super().run()
            if self.lost:
                self.tell_lost(self.lost)
            return status
        finally:
            self.ended.set()

    def tell_lost(self, sentence: str) -> None:
        """To whoever waits for the workers: no other would fare better."""
        host, error = socket.gethostname(), clean_text(sentence)
        beat = WorkerBeat(pid=os.getpid(), host=host, state=WorkerState.LOST, error=error)
        try:
            with closing(ControlClient(self._settings.server_url, self._settings.worker_key, patience_s=0.0)) as client:
                client.beat(self._settings.worker_id, beat)
        except ServerError as problem:
            logger.error("%s; nor can the server be told: %s", sentence, problem)

    def _run_attempt(self, attempt: Attempt, client: ControlClient, then: ThenLease) -> Lease | None:
        limit_s = attempt.lease.timeout_s + self._heart.grace_s
        sentence = f"the agent ran longer than its time limit of {limit_s:g} s; its thread was left to itself"
        result = Result(outcome=Outcome.TIMEOUT, error=sentence, duration_s=limit_s)
        timer = threading.Timer(limit_s, self._leave, (attempt, result, threading.current_thread()))
        timer.daemon = True
        self.attempts[attempt] = client
        timer.start()
        try:
            return super()._run_attempt(attempt, client, then)
        finally:
            timer.cancel()
            self.attempts.pop(attempt, None)
            self._on_end()

    def _revoke(self, attempt: Attempt) -> None:
        """An agent that cannot be stopped goes on until its time limit; what it asks is refused, as it is over."""
        attempt.rollout.is_over = True
        attempt.revoke()

    def _leave(self, attempt: Attempt, result: Result, thread: threading.Thread) -> None:
        if attempt.has_ended:
            return
        attempt.rollout.is_over = True
        self._heart.remove(attempt)
        logger.warning("rollout %s: %s", attempt.lease.rollout_id, result.error)
        try:
            with closing(self._client()) as client:
                client.report(attempt.lease, result)
        except ServerError as error:  # it has another outcome by now
            logger.info("rollout %s: %s", attempt.lease.rollout_id, error)
        self.stop()
        self._on_left(self)
        self._end_slot(thread)
