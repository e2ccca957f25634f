"""Refused calls, kept with their attempt: an agent may swallow the error, and its rollout still says what went wrong.

The record is a tool call named `refused:{path}` that no transition asked for, so that no reward or credit ever reads it as one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, OrderedDict
from secrets import token_hex

from lightningrl.errors import StoreError
from lightningrl.gateway.errors import CONTEXT_CODE, Refusal
from lightningrl.gateway.request import CallContext
from lightningrl.store.protocol import AttemptInfo, Store, ToolCallRecord
from lightningrl.types import ToolCall, ToolStatus

__all__ = ["RefusalLog", "is_refusal", "refusal_message"]

logger = logging.getLogger(__name__)

_PREFIX = "refused:"
_MOST_KEPT = 100
"""Of one attempt and kind: an agent that asks again and again would fill the store with one sentence."""
_OVERFLOW = "overflow-"
"""How the id of a call begins that was not answered because its prompt was beyond the context."""


class RefusalLog:
    """Records refusals. One per gateway."""

    def __init__(self, store: Store, *, max_attempts: int) -> None:
        self._store = store
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
        is_overflow = refusal.code == CONTEXT_CODE and not path.endswith("count_tokens")  # which only asked how long it is
        call = ToolCall(
            id=f"{_OVERFLOW if is_overflow else 'refused-'}{token_hex(12)}",
            name=f"{_PREFIX}{path}",
            arguments=json.dumps({"path": f"/{path}", "param": refusal.param}),
            result=json.dumps({"status": refusal.status, "message": refusal.message}, ensure_ascii=False),
            status=ToolStatus.ERROR,
            agent=context.agent,
            error_type=refusal.code,
        )
        try:
            await self._store.append_tool_calls(*place, [ToolCallRecord(tool_call=call, started_at=time.time())])
        except StoreError as error:  # the attempt has ended meanwhile: its outcome is decided
            logger.info("rollout %s, attempt %s: a refused call is not recorded: %s", *place, error)

    async def has_overflow(self, rollout_id: str, attempt: int) -> bool:
        """Whether a call of the attempt was refused because its prompt was beyond the context."""
        return any(call_id.startswith(_OVERFLOW) for call_id in await self._store.tool_call_ids(rollout_id, attempt))

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free an ended attempt's memory."""
        self._counts.pop((rollout_id, attempt), None)


def refusal_message(call: ToolCall) -> str:
    """What a refused call was told."""
    try:
        return str(json.loads(call.result)["message"])
    except (ValueError, KeyError, TypeError):
        return call.result


def is_refusal(call: ToolCall) -> bool:
    """Whether what is kept as a tool call is a call of a model that was refused."""
    return call.name.startswith(_PREFIX)
