"""Who may do what: the run key opens everything, a scoped key its own running attempt."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from lightningrl.errors import ServerError
from lightningrl.keys import worker_key
from lightningrl.store.errors import AttemptOver, UnknownRecord
from lightningrl.store.protocol import Store

__all__ = ["Access", "Forbidden"]


class Forbidden(ServerError):
    """A missing or wrong key. HTTP 401."""


class Access:
    """Checks the `Authorization: Bearer …` of a request, or its `x-api-key`."""

    def __init__(self, store: Store, run_key: str) -> None:
        self._store = store
        self._run_key = run_key.encode()
        self._worker_key = worker_key(run_key).encode()

    async def run(self, request: Request) -> None:
        """Raises Forbidden unless the run key is shown."""
        if not self._is_run_key(_shown(request)):
            raise Forbidden(f"wrong key for {request.url.path!r}; send the run key as 'Authorization: Bearer …'")

    async def worker(self, request: Request) -> None:
        """Raises Forbidden unless the run key or the worker key is shown."""
        if not self._is_trusted(_shown(request)):
            raise Forbidden(f"wrong key for {request.url.path!r}; send the run key as 'Authorization: Bearer …'")

    async def attempt(self, request: Request, rollout_id: str, attempt: int) -> None:
        """Raises Forbidden, UnknownRecord or AttemptOver unless the run key, the worker key or the attempt's own is shown."""
        key = _shown(request)
        if self._is_trusted(key) or await self._store.authorise(rollout_id, attempt, key) is not None:
            return
        refusal = await self._store.refusal(rollout_id, attempt, key)
        if isinstance(refusal, AttemptOver):
            raise refusal
        if isinstance(refusal, UnknownRecord):  # whoever has no key learns nothing about what exists
            raise Forbidden(f"wrong key for attempt {attempt} of rollout {rollout_id!r}; use the key of its lease")
        raise Forbidden(str(refusal))

    async def ended_attempt(self, request: Request, rollout_id: str, attempt: int) -> bool:
        """As `attempt`, but the key of an ended attempt passes too; whether it has ended as far as its key tells."""
        try:
            await self.attempt(request, rollout_id, attempt)
        except AttemptOver:
            return True
        return False

    def _is_trusted(self, key: str) -> bool:
        return self._is_run_key(key) or hmac.compare_digest(key.encode("latin-1", "replace"), self._worker_key)

    def _is_run_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode("latin-1", "replace"), self._run_key)


def _shown(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", f"bearer {request.headers.get('x-api-key', '')}").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Forbidden(f"{request.url.path!r} needs a key; send it as 'Authorization: Bearer …'")
    return key.strip()
