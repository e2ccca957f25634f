"""Routes for an agent's reports of itself, below its own base URL, with the key that it has anyway.

POST {OPENAI_BASE_URL}/rewards       {"rewards": {"format": 1.0}, "call": "chatcmpl-…"}
POST {OPENAI_BASE_URL}/tool_calls    {"tool_calls": [{"name": "search", "status": "ok", "tool_call_id": "call_…", …}]}
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl.control_api import ReportedToolCall
from lightningrl.dialects import Dialect, call_of
from lightningrl.sanitize import as_text
from lightningrl.types import ToolCall, ToolStatus
from lightningrl_server.access import Access
from lightningrl_server.asked_calls import ReadAsked, join_reports
from lightningrl_server.records import ToolCallRecord
from lightningrl_server.routes import attempt_of, route
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.protocol import CallLog

__all__ = ["agent_routes"]


def agent_routes(
    log: CallLog, access: Access, dialects: Sequence[Dialect], read_asked: ReadAsked | None = None
) -> list[BaseRoute]:
    """Build the routes, to be mounted before the gateway's, which refuse every path of theirs that they do not know.

    `read_asked` reads what the attempt's answers asked for, so that a report which does not name its tool call finds
    it.
    """

    async def rewards(request: Request, body: api.ReportedRewards) -> None:
        place = attempt_of(request)
        (transition_id,) = await find_transitions(log, dialects, *place, [body.call])
        await log.add_rewards(*place, body.rewards, transition_id)

    async def tool_calls(request: Request, body: api.ReportedToolCalls) -> None:
        place = attempt_of(request)
        transition_ids = await find_transitions(log, dialects, *place, [report.call for report in body.tool_calls])
        records = await asyncio.to_thread(lambda: list(map(_record, body.tool_calls, transition_ids)))
        if read_asked is not None:
            records = join_reports(records, await read_asked(*place))
        await log.append_tool_calls(*place, records)

    return [route(api.REPORT_REWARDS, access, rewards), route(api.REPORT_TOOL_CALLS, access, tool_calls)]


async def find_transitions(
    log: CallLog, dialects: Sequence[Dialect], rollout_id: str, attempt: int, answer_ids: Sequence[str | None]
) -> list[str | None]:
    """The transitions that the ids of answers stand for. Raises UnknownRecord."""
    call_ids = await log.call_ids(rollout_id, attempt) if any(answer_ids) else frozenset()
    transition_ids: list[str | None] = []
    for answer_id in answer_ids:
        if answer_id is None:
            transition_ids.append(None)
            continue
        transition_id = call_of(answer_id, dialects)
        if transition_id not in call_ids:
            problem = f"rollout {rollout_id!r} has no call {answer_id!r}"
            raise UnknownRecord(f"{problem}; give the id of an answer that this attempt was given")
        transition_ids.append(transition_id)
    return transition_ids


def _record(report: ReportedToolCall, transition_id: str | None) -> ToolCallRecord:
    call_id = report.tool_call_id or f"tool-{uuid.uuid4().hex}"
    call = ToolCall(
        id=call_id,
        name=report.name,
        arguments="" if report.arguments is None else as_text(report.arguments),
        result="" if report.result is None else as_text(report.result),
        status=ToolStatus(report.status),
        duration_s=report.duration_s,
        transition_id=transition_id,
        agent=report.agent,
        error_type=report.error_type,
    )
    return ToolCallRecord(tool_call=call, span_id=f"reported:{call_id}", started_at=time.time() - report.duration_s)
