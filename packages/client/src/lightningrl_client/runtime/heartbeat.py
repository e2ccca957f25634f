"""A worker's pulse, in a thread of its own: says how the worker is, keeps its leases, hears what it is to do."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lightningrl.control_api import Orders, WorkerBeat
from lightningrl.errors import ServerError
from lightningrl.records import WorkerState
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.runtime.attempt import Attempt

__all__ = ["Heart"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Heart:
    """Beats three times per lease. An order to stop is heard at once: the server holds the beat until there is one."""

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
