"""The worker's side of the control API: lease, result, rewards, telemetry of one attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl.control import api
from lightningrl.dialects import Dialect
from lightningrl.server.access import Access
from lightningrl.server.asked_calls import ReadAsked, join_to_answers
from lightningrl.server.evaluations import keep_evaluations
from lightningrl.server.forwarding import ExportForwarder, Forwarders
from lightningrl.server.routes import LONG_BYTES, route
from lightningrl.server.workers import Workers
from lightningrl.store.errors import AttemptOver
from lightningrl.store.protocol import CallLog, Lease, Queue
from lightningrl.telemetry.otlp import encode_answer, encode_logs_answer, parse_export, parse_logs, read_media_type
from lightningrl.types import OtherCall, OtherCallKind, Outcome

__all__ = ["AttemptMemory", "attempt_of", "attempt_routes", "while_connected"]

T = TypeVar("T")


class AttemptMemory(Protocol):
    """What the gateway remembers of an attempt."""

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool: ...
    def forget(self, rollout_id: str, attempt: int) -> None: ...


def attempt_routes(
    queue: Queue,
    log: CallLog,
    access: Access,
    workers: Workers,
    memory: AttemptMemory | None,
    forwarders: Forwarders,
    read_asked: ReadAsked | None = None,
    dialects: Sequence[Dialect] = (),
    *,
    max_body_bytes: int,
    longest_wait_s: float,
) -> list[BaseRoute]:
    async def lease(request: Request, body: api.LeaseRequest) -> Lease | None:
        wait_s = min(body.wait_s, longest_wait_s)
        found = await while_connected(request, queue.lease(body.worker_id, body.lease_s, wait_s, exclusive=body.exclusive))
        if found is not None and await request.is_disconnected():
            await queue.release(found.rollout_id, found.attempt)
            return None
        if found is not None:
            workers.note_lease(body.worker_id)
        return found

    async def result(request: Request, body: api.Result) -> api.ResultKept:
        place, outcome = attempt_of(request), body.outcome
        if outcome is Outcome.AGENT_ERROR and memory is not None and await memory.is_overflowed(*place):
            outcome = Outcome.CONTEXT_OVERFLOW
        if body.unseen_hosts:
            await _keep_unseen(log, place, body.unseen_hosts)
        state = await queue.finish_attempt(*place, outcome, body.output, body.error, body.duration_s)
        if memory is not None:
            memory.forget(*place)
        return api.ResultKept(state=state)

    async def rewards(request: Request, body: api.Rewards) -> None:
        await log.add_rewards(*attempt_of(request), body.rewards, body.transition_id)

    async def traces(request: Request, _: bytes) -> Response:
        return await take_spans(log, forwarders.spans, read_asked, dialects, *attempt_of(request), request, max_body_bytes)

    async def logs(request: Request, _: bytes) -> Response:
        return await take_logs(log, forwarders.logs, dialects, *attempt_of(request), request, max_body_bytes)

    return [
        route(api.LEASE, access, lease),
        route(api.RESULT, access, result),
        route(api.REWARDS, access, rewards),
        route(api.TRACES, access, traces),
        route(api.LOGS, access, logs),
    ]


def attempt_of(request: Request) -> tuple[str, int]:
    """Rollout and number of the attempt in the path, once `Access` has looked at it."""
    return request.path_params["rid"], int(request.path_params["n"])


async def _keep_unseen(log: CallLog, place: tuple[str, int], hosts: Sequence[str]) -> None:
    """Hosts of models that the agent called past the gateway. A result that is repeated finds its attempt over."""
    with contextlib.suppress(AttemptOver):
        await log.append_other_calls(*place, [OtherCall(kind=OtherCallKind.ELSEWHERE, path=host) for host in hosts])


async def take_spans(
    log: CallLog,
    forwarder: ExportForwarder | None,
    read_asked: ReadAsked | None,
    dialects: Sequence[Dialect],
    rollout_id: str,
    attempt: int,
    request: Request,
    limit: int,
) -> Response:
    """Keep what an export holds for us, and hand all of it on."""
    media_type, export = await _read_export(request, parse_export, limit)
    tool_calls = export.tool_calls
    if export.loose and read_asked is not None:
        asked = await read_asked(rollout_id, attempt)
        tool_calls = await asyncio.to_thread(join_to_answers, tool_calls, export.loose, asked)
    kept: list[Awaitable[object]] = []
    if tool_calls:
        kept.append(log.append_tool_calls(rollout_id, attempt, tool_calls))
    if export.spans:
        kept.append(log.append_spans(rollout_id, attempt, export.spans))
    await asyncio.gather(*kept)  # one commit
    if export.evaluations:
        await keep_evaluations(log, dialects, rollout_id, attempt, export.evaluations)
    if forwarder is not None:
        forwarder.offer(export.request, rollout_id, attempt)
    return Response(encode_answer(media_type, export.rejected), media_type=media_type)


async def take_logs(
    log: CallLog,
    forwarder: ExportForwarder | None,
    dialects: Sequence[Dialect],
    rollout_id: str,
    attempt: int,
    request: Request,
    limit: int,
) -> Response:
    """Keep the evaluations among log records, and hand all of them on."""
    media_type, export = await _read_export(request, parse_logs, limit)
    if export.evaluations:
        await keep_evaluations(log, dialects, rollout_id, attempt, export.evaluations)
    if forwarder is not None:
        forwarder.offer(export.request, rollout_id, attempt)
    return Response(encode_logs_answer(media_type), media_type=media_type)


async def _read_export(request: Request, parse: Callable[[bytes, str, str, int], T], limit: int) -> tuple[str, T]:
    """The media type that it came in, and what it holds."""
    media_type = read_media_type(request.headers.get("content-type", ""))
    encoding = request.headers.get("content-encoding", "").lower()
    body = await request.body()
    if encoding or len(body) > LONG_BYTES:
        return media_type, await asyncio.to_thread(parse, body, media_type, encoding, limit)
    return media_type, parse(body, media_type, encoding, limit)  # a thread costs more than it spares the event loop


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for the work, or give it up when the client goes away."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
