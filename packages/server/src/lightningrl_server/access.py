"""Permissions, by the key that is shown.

run key      the trainer's: everything
view key     a spectator's: pages and metrics
worker key   a supervisor's: lease, and whatever an attempt's key may do, for every worker and attempt; say why workers
             cannot go on, list and stop them, give back what they ran; no trajectories, scores, lists or engine link
process key  a worker process's: beat and lease as that worker; its attempts it reports with their own keys
attempt key  an agent's: its own running attempt
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request

from lightningrl.errors import ServerError
from lightningrl.keys import process_key, view_key, worker_key, worker_of
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.protocol import CallLog

__all__ = ["Access", "Forbidden"]

_LONGEST_NUMBER: Final = 9
"""Digits of an attempt's number."""


class Forbidden(ServerError):
    """A missing or wrong key. HTTP 401."""


class Access:
    """Checks the `Authorization: Bearer …` of a request, or a dialect's own key header, before its body is read."""

    def __init__(self, calls: CallLog, run_key: str, key_headers: Sequence[str] = ()) -> None:
        self._calls = calls
        self._key_headers = key_headers
        self._run_key = run_key.encode()
        self._worker_key = worker_key(run_key)
        self._view_key = view_key(run_key).encode()

    async def run(self, request: Request) -> None:
        """Raise Forbidden unless the run key is shown."""
        key = self._shown(request)
        if not _is_same(key, self._run_key):
            whose = "a worker's key does not open" if self._worker(key) is not None else "wrong key for"
            raise Forbidden(f"{whose} {request.url.path!r}; send the run key as 'Authorization: Bearer …'")

    async def look(self, request: Request) -> None:
        """Raise Forbidden unless the run key or the view key is shown."""
        key = self._shown(request)
        if not (_is_same(key, self._run_key) or _is_same(key, self._view_key)):
            raise Forbidden(f"wrong key for {request.url.path!r}; send the run's view key as 'Authorization: Bearer …'")

    async def supervisor(self, request: Request) -> None:
        """Raise Forbidden unless the run key or the worker key is shown."""
        if self.worker_shown(request):
            problem = f"the key of one worker does not open {request.url.path!r}"
            raise Forbidden(f"{problem}; send the worker key as 'Authorization: Bearer …'")

    async def worker(self, request: Request) -> None:
        """Raise Forbidden unless the run key, the worker key or a worker process's key is shown."""
        self.worker_shown(request)

    def worker_shown(self, request: Request, key: str = "") -> str:
        """Return the worker whose process shows its key; "" = run key or worker key, which speak for all. `key` is one
        from the body, instead of the header's. Raises Forbidden."""
        worker = self._worker(key or self._shown(request))
        if worker is None:
            raise Forbidden(f"wrong key for {request.url.path!r}; send the run key as 'Authorization: Bearer …'")
        return worker

    def is_worker(self, request: Request, key: str = "") -> bool:
        """True for a worker's key or the run's. `key` stands in place of the header's. Raises Forbidden for another."""
        if key:
            self.worker_shown(request, key)
            return True
        return self._worker(self._shown(request)) is not None

    def check_worker(self, request: Request, worker_id: str, key: str = "") -> None:
        """Raise Forbidden unless the key speaks for that worker. `worker_id` may name a slot of it: `id/slot`."""
        worker = self.worker_shown(request, key)
        if worker and worker != worker_id.partition("/")[0]:
            raise Forbidden(f"the key of worker {worker!r} does not speak for {worker_id[:200]!r}; use that one's own")

    async def attempt(self, request: Request) -> None:
        """Raise Forbidden, UnknownRecord or AttemptOver without the key of the run, a worker or the path's attempt.
        Whoever has none of them learns nothing about what exists."""
        key = self._shown(request)
        rollout_id, number = request.path_params["rid"], request.path_params["n"]
        is_number = number.isascii() and number.isdigit() and len(number) <= _LONGEST_NUMBER
        if self._is_trusted(key):
            if is_number:
                return
            raise UnknownRecord(f"rollout {rollout_id!r} has no attempt {number[:20]!r}; attempts start with a lease")
        wrong = Forbidden(f"wrong key for attempt {number[:20]} of rollout {rollout_id!r}; use the key of its lease")
        if not is_number:
            raise wrong
        if await self._calls.authorise(rollout_id, int(number), key) is not None:
            return
        refusal = await self._calls.refusal(rollout_id, int(number), key)
        raise refusal if isinstance(refusal, AttemptOver) else wrong

    async def ended_attempt(self, request: Request) -> None:
        """Raise as `attempt` does, but let the key of an ended attempt pass."""
        try:
            await self.attempt(request)
        except AttemptOver:
            return

    def _shown(self, request: Request) -> str:
        named = next((request.headers[name] for name in self._key_headers if name in request.headers), "")
        scheme, _, key = request.headers.get("authorization", f"bearer {named}").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Forbidden(f"{request.url.path!r} needs a key; send it as 'Authorization: Bearer …'")
        return key.strip()

    def _is_trusted(self, key: str) -> bool:
        return _is_same(key, self._run_key) or _is_same(key, self._worker_key.encode())

    def _worker(self, key: str) -> str | None:
        """The worker that the key speaks for; "" = all; None = none."""
        if self._is_trusted(key):
            return ""
        worker_id = worker_of(key)
        is_right = worker_id and _is_same(key, process_key(self._worker_key, worker_id).encode())
        return worker_id if is_right else None


def _is_same(key: str, expected: bytes) -> bool:
    return hmac.compare_digest(key.encode("latin-1", "replace"), expected)
