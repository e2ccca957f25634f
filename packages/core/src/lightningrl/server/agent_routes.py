"""What an agent reports of itself, below its own base URL, with the key that it has anyway: rewards, and what became of its tools.

POST {OPENAI_BASE_URL}/rewards       {"rewards": {"format": 1.0}, "call": "chatcmpl-…"}
POST {OPENAI_BASE_URL}/tool_calls    {"tool_calls": [{"name": "search", "status": "ok", "tool_call_id": "call_…", …}]}
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request

from lightningrl.server.access import Access
from lightningrl.server.models import ReportedRewardsBody, ReportedToolCall, ReportedToolCallsBody
from lightningrl.store.errors import UnknownRecord
from lightningrl.store.protocol import Store, ToolCallRecord
from lightningrl.types import ToolCall

__all__ = ["agent_routes"]

ANSWER_IDS: Final = ("chatcmpl-", "resp_", "msg_")
"""What the dialects put before a transition's id."""


def agent_routes(store: Store, access: Access) -> APIRouter:
    """To be mounted before the gateway's routes, which refuse every path of theirs that they do not know."""
    router = APIRouter(prefix="/rollouts/{rid}/attempts/{n}/v1", tags=["agents"])

    @router.post("/rewards", status_code=204, summary="Report rewards by name (the attempt's key)")
    async def rewards(rid: str, n: int, body: ReportedRewardsBody, request: Request) -> None:
        """Of the rollout, or of the model call whose answer has the id `call`. The last value of a name stands."""
        await access.attempt(request, rid, n)
        transition_id = None if body.call is None else await find_transition(store, rid, n, body.call)
        await store.add_rewards(rid, n, body.rewards, transition_id)

    @router.post("/tool_calls", status_code=204, summary="Report tool calls and their outcomes (the attempt's key)")
    async def tool_calls(rid: str, n: int, body: ReportedToolCallsBody, request: Request) -> None:
        """A repeated `tool_call_id` is kept once."""
        await access.attempt(request, rid, n)
        records = [_record(one, one.call and await find_transition(store, rid, n, one.call)) for one in body.tool_calls]
        await store.append_tool_calls(rid, n, records)

    return router


async def find_transition(store: Store, rollout_id: str, attempt: int, answer_id: str) -> str:
    """The transition that an answer's id stands for. Raises UnknownRecord."""
    transition_id = answer_id
    for prefix in ANSWER_IDS:
        transition_id = transition_id.removeprefix(prefix)
    if all(call.transition.id != transition_id for call in await store.calls(rollout_id, attempt)):
        raise UnknownRecord(f"rollout {rollout_id!r} has no call {answer_id!r}; give the id of an answer that this attempt was given")
    return transition_id


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
