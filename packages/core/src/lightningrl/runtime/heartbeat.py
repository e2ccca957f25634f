"""Keeps a worker's leases alive from a thread of its own, and notices attempts that were taken away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lightningrl.control.blocking import ControlClient
from lightningrl.errors import ServerError
from lightningrl.runtime.attempt import Attempt

__all__ = ["Heart"]

logger = logging.getLogger(__name__)


class Heart:
    """Beats three times per lease for each attempt in `running`."""

    def __init__(self, client: ControlClient, *, lease_s: float, on_revoked: Callable[[Attempt], None]) -> None:
        self._client = client
        self._lease_s = lease_s
        self._on_revoked = on_revoked
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], Attempt] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lightningrl-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._client.interrupt()

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self._running[attempt.lease.rollout_id, attempt.lease.attempt] = attempt

    def remove(self, attempt: Attempt) -> None:
        with self._lock:
            self._running.pop((attempt.lease.rollout_id, attempt.lease.attempt), None)

    def _beat(self) -> None:
        while not self._stopped.wait(self._lease_s / 3):
            with self._lock:
                attempts = list(self._running.values())
            for attempt in attempts:
                try:
                    is_ours = self._client.heartbeat(attempt.lease, lease_s=self._lease_s)
                except ServerError as error:
                    logger.warning("rollout %s: no heartbeat: %s", attempt.lease.rollout_id, error)
                    continue
                if not is_ours:
                    self.remove(attempt)
                    self._on_revoked(attempt)
