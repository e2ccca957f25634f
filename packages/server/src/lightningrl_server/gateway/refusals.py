"""Refused calls, kept with their attempt: an agent may swallow the error, its rollout says what went wrong."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from typing import Final

from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable, GrammarError, StoreError
from lightningrl.types import OtherCall, OtherCallKind
from lightningrl_server.gateway.request import CONTEXT_CODE, CallContext, CallRequest, Refusal
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.errors import AttemptOver, StoreFull
from lightningrl_server.store.protocol import CallLog

__all__ = ["RefusalLog", "refusal_of"]

logger = logging.getLogger(__name__)

_MOST_KEPT = 100
"""Refusals of one attempt and kind: an agent that asks again and again would fill the store with one sentence."""
_FAILURES: Final = (
    (EngineUnavailable, 503, "engine_unavailable"),
    (BackendError, 502, "engine_failed"),
    (AttemptOver, 410, "attempt_over"),
    (StoreFull, 503, "store_full"),
)


class RefusalLog:
    """Records refusals. One per gateway."""

    def __init__(self, log: CallLog, *, max_attempts: int, counting: frozenset[str]) -> None:
        """`counting` are the endpoints that only say how long a call would be."""
        self._log = log
        self._counting = counting
        self._max_attempts = max_attempts
        self._counts: OrderedDict[tuple[str, int], Counter[str]] = OrderedDict()

    async def add(self, info: AttemptInfo, path: str, context: CallContext, refusal: Refusal) -> None:
        """Keep one, unless the attempt is over or has had its share of this kind."""
        place = (info.rollout_id, info.attempt)
        counts = self._counts.setdefault(place, Counter())
        if counts[refusal.code] >= _MOST_KEPT:
            return
        counts[refusal.code] += 1
        self._counts.move_to_end(place)
        if len(self._counts) > self._max_attempts:
            self._counts.popitem(last=False)
        call = OtherCall(
            kind=OtherCallKind.REFUSED,
            path=path,
            agent=context.agent,
            status=refusal.status,
            code=refusal.code,
            message=refusal.message,
            request=None if refusal.param is None else {"param": refusal.param},
            started_at=time.time(),
        )
        try:
            await self._log.append_other_calls(*place, [call])
        except StoreError as error:  # the attempt has ended meanwhile: its outcome is decided
            logger.info("rollout %s, attempt %s: a refused call is not recorded: %s", *place, error)

    async def has_overflow(self, rollout_id: str, attempt: int) -> bool:
        """True if a call of the attempt was refused because its prompt was beyond the context."""
        calls = await self._log.other_calls(rollout_id, attempt)
        return any(call.code == CONTEXT_CODE and call.path not in self._counting for call in calls)

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free an ended attempt's memory."""
        self._counts.pop((rollout_id, attempt), None)


def refusal_of(
    error: ContextOverflow | EngineUnavailable | BackendError | StoreError, request: CallRequest | None = None
) -> Refusal:
    """The sentence for an agent whose call failed."""
    if isinstance(error, ContextOverflow):
        return Refusal(str(error), code=CONTEXT_CODE, param="messages")
    if isinstance(error, GrammarError):
        wanted = None if request is None or request.forced else request.format
        param = "tools" if wanted is None else wanted.param
        return Refusal(f"{param}: {error}", param=param)
    for kind, status, code in _FAILURES:
        if isinstance(error, kind):
            return Refusal(str(error), status=status, code=code)
    return Refusal(f"the call could not be recorded: {error}", status=503, code="store_error")
