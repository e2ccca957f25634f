"""One id per logical model call, the same on every retry of it, so that the gateway records the call once.

A request that failed (an exception, or a status of 400 and more) gives its id back, and the next request of the same
rollout with the same body takes it up again: that is the retry, whoever makes it (the SDK, the user's own loop), with
or without `x-stainless-retry-count`. A request whose answer came has used its id up: asking the same thing again is a
new sample.

A process that is forked starts a ledger of its own: what it asks is never a retry of what its parent or its siblings
asked.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_hex
from weakref import WeakSet

__all__ = ["CallLedger", "ClaimedCall"]


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A request's place in the ledger."""

    id: str
    body: bytes
    """Digest of the request body."""


class CallLedger:
    """The call ids of one attempt. Safe to use from several threads."""

    def __init__(self) -> None:
        self._start_empty()
        _ledgers.add(self)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._name = token_hex(4)
        """Tells the ids of this ledger from those of its copies in other processes."""
        self._issued = 0
        self._returned: defaultdict[bytes, list[str]] = defaultdict(list)
        self._latest: dict[bytes, str] = {}

    def claim(self, body: bytes, *, is_retry: bool = False) -> ClaimedCall:
        """The id for a request with this body. `is_retry` = the SDK says that it re-sends."""
        digest = blake2b(body, digest_size=8).digest()
        with self._lock:
            if self._returned[digest]:
                return ClaimedCall(self._returned[digest].pop(), digest)
            if is_retry and digest in self._latest:
                return ClaimedCall(self._latest[digest], digest)
            self._issued += 1
            self._latest[digest] = f"{self._name}-{self._issued}-{digest.hex()}"
            return ClaimedCall(self._latest[digest], digest)

    def give_back(self, call: ClaimedCall) -> None:
        """The request failed: its retry is the same call."""
        with self._lock:
            self._returned[call.body].append(call.id)


_ledgers: WeakSet[CallLedger] = WeakSet()


def _start_empty_after_fork() -> None:
    for ledger in _ledgers:
        ledger._start_empty()


os.register_at_fork(after_in_child=_start_empty_after_fork)
