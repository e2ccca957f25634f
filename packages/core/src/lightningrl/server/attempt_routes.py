"""The worker's side of the control API: lease, heartbeat, result, rewards, spans of one attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lightningrl.server.access import Access
from lightningrl.server.asked_calls import ReadAsked, join_to_answers
from lightningrl.server.forwarding import SpanForwarder
from lightningrl.server.guarded import guarded
from lightningrl.server.models import (
    HeartbeatAnswer,
    HeartbeatBody,
    LeaseAnswer,
    LeaseBody,
    LeasedTask,
    ResultAnswer,
    ResultBody,
    RewardsBody,
)
from lightningrl.server.otlp import JSON, PROTOBUF, encode_answer, parse_export, read_media_type
from lightningrl.store.protocol import Store
from lightningrl.types import Outcome

__all__ = ["AttemptMemory", "attempt_routes", "while_connected"]

T = TypeVar("T")


class AttemptMemory(Protocol):
    """What the gateway remembers of an attempt."""

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool: ...
    def forget(self, rollout_id: str, attempt: int) -> None: ...


def attempt_routes(
    store: Store,
    access: Access,
    memory: AttemptMemory | None,
    forwarder: SpanForwarder | None = None,
    read_asked: ReadAsked | None = None,
    *,
    max_body_bytes: int,
    longest_wait_s: float,
) -> APIRouter:
    router = APIRouter()
    leases, ended, running = (
        APIRouter(prefix="/api/v1", tags=["attempts"], route_class=guarded(check))
        for check in (access.worker, access.ended_attempt, access.attempt)
    )
    base = "/rollouts/{rid}/attempts/{n}"

    @leases.post(
        "/leases",
        response_model=LeaseAnswer,
        summary="Lease the next attempt (worker key or run key; long poll)",
        responses={204: {"description": "None yet"}},
    )
    async def lease(body: LeaseBody, request: Request) -> Any:
        """The oldest queued rollout's next attempt, with its scoped key; 204 where none comes within `wait_s`."""
        wait_s = min(body.wait_s, longest_wait_s)
        found = await while_connected(request, store.lease(body.worker_id, body.lease_s, wait_s, exclusive=body.exclusive))
        if found is None:
            return Response(status_code=204)
        if await request.is_disconnected():
            await store.release(found.rollout_id, found.attempt)
            return Response(status_code=204)
        return LeaseAnswer(
            rollout_id=found.rollout_id,
            attempt=found.attempt,
            task=LeasedTask(id=found.task.id, input=found.task.input, metadata=dict(found.task.metadata)),
            mode=found.mode,
            timeout_s=found.timeout_s,
            key=found.key,
            base_path=found.base_path,
            expires_at=found.expires_at,
        )

    @ended.post(base + "/heartbeat", response_model=HeartbeatAnswer, summary="Keep the lease (attempt, worker or run key)")
    async def heartbeat(rid: str, n: int, body: HeartbeatBody) -> HeartbeatAnswer:
        """`continue: false` = the attempt is over: stop working on it."""
        return HeartbeatAnswer(continue_=await store.heartbeat(rid, n, body.lease_s))

    @ended.post(base + "/result", response_model=ResultAnswer, summary="End the attempt (attempt, worker or run key)")
    async def result(rid: str, n: int, body: ResultBody) -> ResultAnswer:
        """The first result counts; the same outcome again is acknowledged, another is refused (409)."""
        outcome = body.outcome
        if outcome is Outcome.AGENT_ERROR and memory is not None and await memory.is_overflowed(rid, n):
            outcome = Outcome.CONTEXT_OVERFLOW
        state = await store.finish_attempt(rid, n, outcome, body.output, body.error, body.duration_s)
        if memory is not None:
            memory.forget(rid, n)
        return ResultAnswer(state=state)

    @running.post(base + "/rewards", status_code=204, summary="Add rewards by name (attempt, worker or run key)")
    async def rewards(rid: str, n: int, body: RewardsBody) -> None:
        """Of the attempt, or of one transition; null = nobody scored it."""
        await store.add_rewards(rid, n, body.rewards, body.transition_id)

    @running.post(
        base + "/v1/traces",
        summary="Export spans: OTLP over HTTP, protobuf or JSON, plain or gzip (attempt, worker or run key)",
        response_class=Response,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {PROTOBUF: {"schema": {"type": "string", "format": "binary"}}, JSON: {"schema": {"type": "object"}}},
            }
        },
    )
    async def traces(rid: str, n: int, request: Request) -> Response:
        """Spans of tools become tool calls. Repeating an export adds nothing; spans without an id are told of as a partial success."""
        return await take_spans(store, forwarder, read_asked, rid, n, request, max_body_bytes)

    for part in (leases, ended, running):
        router.include_router(part)
    return router


async def take_spans(
    store: Store,
    forwarder: SpanForwarder | None,
    read_asked: ReadAsked | None,
    rollout_id: str,
    attempt: int,
    request: Request,
    limit: int,
) -> Response:
    """Keep what an export holds for us, and hand all of it on."""
    media_type = read_media_type(request.headers.get("content-type", ""))
    encoding = request.headers.get("content-encoding", "").lower()
    export = await asyncio.to_thread(parse_export, await request.body(), media_type, encoding, limit)
    tool_calls = export.tool_calls
    if export.loose and read_asked is not None:
        asked = await read_asked(rollout_id, attempt)
        tool_calls = await asyncio.to_thread(join_to_answers, tool_calls, export.loose, asked)
    if tool_calls:
        await store.append_tool_calls(rollout_id, attempt, tool_calls)
    if export.spans:
        await store.append_spans(rollout_id, attempt, export.spans)
    if forwarder is not None:
        forwarder.offer(export.request, rollout_id, attempt)
    return Response(encode_answer(media_type, export.rejected), media_type=media_type)


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
