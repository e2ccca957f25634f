"""Routes of one attempt: lease, result and rewards, the worker's side of the control API; and an agent's reports of
itself, below its own base URL, with the key that it has anyway.

POST {OPENAI_BASE_URL}/rewards       {"rewards": {"format": 1.0}, "call": "chatcmpl-…"}
POST {OPENAI_BASE_URL}/tool_calls    {"tool_calls": [{"name": "search", "status": "ok", "tool_call_id": "call_…", …}]}
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl.control_api import ReportedToolCall
from lightningrl.dialects import Dialect, call_of
from lightningrl.errors import ServerError
from lightningrl.records import Lease
from lightningrl.sanitize import as_text
from lightningrl.types import OtherCall, OtherCallKind, Outcome, ToolCall, ToolStatus
from lightningrl_server.access import Access
from lightningrl_server.asked_calls import ReadAsked, join_reports, name_by_answers
from lightningrl_server.gateway.model_call import while_connected
from lightningrl_server.records import AttemptEnd, ToolCallRecord
from lightningrl_server.routes import BodyError, attempt_of, is_gone, route
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_server.store.protocol import CallLog, Queue
from lightningrl_server.telemetry_routes import ExportContents, ExportReader
from lightningrl_server.workers import Workers

__all__ = ["AttemptMemory", "agent_routes", "attempt_routes"]

logger = logging.getLogger(__name__)


class AttemptMemory(Protocol):
    """The gateway's memory of attempts."""

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool: ...
    def forget(self, rollout_id: str, attempt: int) -> None: ...


def attempt_routes(
    queue: Queue,
    log: CallLog,
    access: Access,
    workers: Workers,
    memory: AttemptMemory | None,
    spans: ExportReader,
    *,
    longest_wait_s: float,
) -> list[BaseRoute]:
    async def hand_over(request: Request, lease: Lease | None, worker_id: str) -> Lease | None:
        """Return the lease, undone where nobody is there to take it."""
        if lease is None:
            return None
        if is_gone(request):
            await queue.release(lease.rollout_id, lease.attempt)
            return None
        workers.note_lease(worker_id)
        return lease

    async def lease(request: Request, body: api.LeaseRequest) -> Lease | None:
        access.check_worker(request, body.worker_id)
        wait_s = min(body.wait_s, longest_wait_s)
        leasing = queue.lease(body.worker_id, body.lease_s, wait_s, exclusive=body.exclusive)
        lease = await while_connected(request.receive, leasing)
        return await hand_over(request, lease, body.worker_id)

    async def result(request: Request, body: api.Result) -> api.ResultKept:
        place, then = attempt_of(request), body.then
        if then is not None:
            access.check_worker(request, then.worker_id, then.key)
        is_of_worker = then is not None or access.is_worker(request, body.worker_key)
        try:
            contents = None if body.spans is None else await spans.read(place, body.spans)
        except ServerError as error:
            sentence = "the attempt has not ended: send its result without them"
            raise BodyError(f"the spans of the result: {error}; {sentence}") from error
        if shared := await _find_shared(log, place, body):
            _mark_shared(place[0], body, len(shared))
        end = await _end_of(place, body, contents, memory, is_of_worker=is_of_worker, untrained=shared)
        if then is None or workers.is_stopping(then.worker_id):
            state, lease = await queue.finish_and_lease(*place, end, None)
        else:
            state, next_lease = await queue.finish_and_lease(*place, end, then.worker_id, then.lease_s)
            lease = await hand_over(request, next_lease, then.worker_id)
        if memory is not None:
            memory.forget(*place)
        if contents is not None:
            await spans.forward(place, contents)
        return api.ResultKept(state=state, lease=lease)

    return [
        route(api.LEASE, access, lease),
        route(api.RESULT, access, result),
        route(
            api.REWARDS,
            access,
            lambda request, body: log.add_rewards(*attempt_of(request), body.rewards, body.transition_id),
        ),
    ]


async def _find_shared(log: CallLog, place: tuple[str, int], body: api.Result) -> list[str]:
    """Keys of the calls in what goes on after the attempt, perhaps for attempts beside it: all but those that its
    worker made for it. Programs give their calls no id, and forked processes ids of their own."""
    if not body.left_work:
        return []
    own = {f"id:{call_id}" for call_id in body.own_calls}
    keys = [call.call_key for call in await log.calls(*place)]
    return [key for key in keys if key.partition("#")[0] not in own and not key.startswith("broken:")]


def _mark_shared(rollout_id: str, body: api.Result, count: int) -> None:
    """Have a success count as a failure of the world, and say why; a failure stays the agent's."""
    is_success = body.outcome is Outcome.SUCCEEDED
    untrained = "nothing is trained on this rollout" if is_success else f"these {count} calls are not trained"
    sentence = (
        f"{', '.join(body.left_work[:10])}, started by this rollout, goes on after it; model calls in it are recorded "
        f"here, though other rollouts may have asked for them, so {untrained}; let each rollout start and end its own"
    )
    logger.warning("rollout %s: %s", rollout_id, sentence)
    body.error = "; ".join(filter(None, (body.error, sentence)))
    body.outcome = Outcome.INFRASTRUCTURE_ERROR if is_success else body.outcome


async def _end_of(
    place: tuple[str, int],
    body: api.Result,
    contents: ExportContents | None,
    memory: AttemptMemory | None,
    *,
    is_of_worker: bool,
    untrained: Sequence[str],
) -> AttemptEnd:
    is_overflow = body.outcome is Outcome.AGENT_ERROR and memory is not None and await memory.is_overflowed(*place)
    return AttemptEnd(
        outcome=Outcome.CONTEXT_OVERFLOW if is_overflow else body.outcome,
        output=body.output,
        error=body.error,
        duration_s=body.duration_s,
        tool_calls=() if contents is None else contents.tool_calls,
        spans=() if contents is None or all(span.agent is None for span in contents.spans) else contents.spans,
        rewards={} if contents is None else contents.rewards,
        other_calls=[OtherCall(kind=OtherCallKind.ELSEWHERE, path=host) for host in body.unseen_hosts],
        may_go_again=is_of_worker and not untrained,
        left_threads=body.left_threads,
        untrained=untrained,
    )


def agent_routes(
    log: CallLog, access: Access, dialects: Sequence[Dialect], read_asked: ReadAsked | None = None
) -> list[BaseRoute]:
    """Build the routes, to be mounted before the gateway's, which refuse every path of theirs that they do not know.
    `read_asked` reads what the attempt's answers asked for, so that a report finds the tool call it does not name."""

    async def rewards(request: Request, body: api.ReportedRewards) -> None:
        place = attempt_of(request)
        (transition_id,) = await find_transitions(log, dialects, *place, [body.call])
        await log.add_rewards(*place, body.rewards, transition_id)

    async def tool_calls(request: Request, body: api.ReportedToolCalls) -> None:
        place = attempt_of(request)
        transition_ids = await find_transitions(log, dialects, *place, [report.call for report in body.tool_calls])
        records = await asyncio.to_thread(lambda: list(map(_record, body.tool_calls, transition_ids)))
        if read_asked is not None:
            records = join_reports(await name_by_answers(records, log, place), await read_asked(*place))
        await log.append_tool_calls(*place, records)

    return [route(api.REPORT_REWARDS, access, rewards), route(api.REPORT_TOOL_CALLS, access, tool_calls)]


async def find_transitions(
    log: CallLog, dialects: Sequence[Dialect], rollout_id: str, attempt: int, answer_ids: Sequence[str | None]
) -> list[str | None]:
    """The transitions that the ids of answers stand for. Raises UnknownRecord."""
    call_ids = await log.call_ids(rollout_id, attempt) if any(answer_ids) else frozenset()
    transition_ids = [None if answer_id is None else call_of(answer_id, dialects) for answer_id in answer_ids]
    for answer_id, transition_id in zip(answer_ids, transition_ids, strict=True):
        if answer_id is not None and transition_id not in call_ids:
            problem = f"rollout {rollout_id!r} has no call {answer_id!r}"
            raise UnknownRecord(f"{problem}; give the id of an answer that this attempt was given")
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
