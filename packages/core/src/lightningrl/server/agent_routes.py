"""What an agent reports of itself, below its own base URL, with the key that it has anyway: rewards, and what became of its tools.

POST {OPENAI_BASE_URL}/rewards       {"rewards": {"format": 1.0}, "call": "chatcmpl-…"}
POST {OPENAI_BASE_URL}/tool_calls    {"tool_calls": [{"name": "search", "status": "ok", "tool_call_id": "call_…", …}]}
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter

from lightningrl.server.access import Access
from lightningrl.server.guarded import guarded
from lightningrl.server.models import ReportedRewardsBody, ReportedToolCall, ReportedToolCallsBody
from lightningrl.store.errors import UnknownRecord
from lightningrl.store.protocol import Store, ToolCallRecord
from lightningrl.types import ToolCall

__all__ = ["agent_routes"]

ANSWER_IDS: Final = ("chatcmpl-", "resp_", "msg_")
"""What the dialects put before a transition's id."""


def agent_routes(store: Store, access: Access) -> APIRouter:
    """To be mounted before the gateway's routes, which refuse every path of theirs that they do not know."""
    router = APIRouter(prefix="/rollouts/{rid}/attempts/{n}/v1", tags=["agents"], route_class=guarded(access.attempt))

    @router.post("/rewards", status_code=204, summary="Report rewards by name (the attempt's key)")
    async def rewards(rid: str, n: int, body: ReportedRewardsBody) -> None:
        """Of the rollout, or of the model call whose answer has the id `call`. The last value of a name stands."""
        (transition_id,) = await find_transitions(store, rid, n, [body.call])
        await store.add_rewards(rid, n, body.rewards, transition_id)

    @router.post("/tool_calls", status_code=204, summary="Report tool calls and their outcomes (the attempt's key)")
    async def tool_calls(rid: str, n: int, body: ReportedToolCallsBody) -> None:
        """A repeated `tool_call_id` is kept once."""
        asked = await find_transitions(store, rid, n, [told.call for told in body.tool_calls])
        await store.append_tool_calls(rid, n, await asyncio.to_thread(_records, body.tool_calls, asked))

    return router


async def find_transitions(store: Store, rollout_id: str, attempt: int, answer_ids: Sequence[str | None]) -> list[str | None]:
    """The transitions that the ids of answers stand for. Raises UnknownRecord."""
    known = await store.call_ids(rollout_id, attempt) if any(answer_ids) else frozenset()
    found: list[str | None] = []
    for answer_id in answer_ids:
        if answer_id is None:
            found.append(None)
            continue
        transition_id = answer_id
        for prefix in ANSWER_IDS:
            transition_id = transition_id.removeprefix(prefix)
        if transition_id not in known:
            raise UnknownRecord(f"rollout {rollout_id!r} has no call {answer_id!r}; give the id of an answer that this attempt was given")
        found.append(transition_id)
    return found


def _records(told: Sequence[ReportedToolCall], transition_ids: Sequence[str | None]) -> list[ToolCallRecord]:
    return [_record(one, transition_id) for one, transition_id in zip(told, transition_ids, strict=True)]


def _record(told: ReportedToolCall, transition_id: str | None) -> ToolCallRecord:
    call_id = told.tool_call_id or f"tool-{uuid.uuid4().hex}"
    call = ToolCall(
        id=call_id,
        name=told.name,
        arguments=_text(told.arguments),
        result=_text(told.result),
        status=told.status,
        duration_s=told.duration_s,
        transition_id=transition_id,
        agent=told.agent,
        error_type=told.error_type,
    )
    return ToolCallRecord(tool_call=call, span_id=f"reported:{call_id}", started_at=time.time() - told.duration_s)


def _text(value: Any) -> str:
    """Texts as they are, None as nothing, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
