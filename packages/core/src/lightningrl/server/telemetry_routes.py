"""What an agent's telemetry tells of its attempt, under the attempt's key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl.control import api
from lightningrl.server.access import Access
from lightningrl.server.attempt_routes import attempt_of
from lightningrl.server.export_readers import LogReader, SpanReader
from lightningrl.server.routes import route
from lightningrl.telemetry.otlp import encode_answer, encode_logs_answer, read_media_type

__all__ = ["telemetry_routes"]


def telemetry_routes(access: Access, spans: SpanReader, log_records: LogReader) -> list[BaseRoute]:
    async def traces(request: Request, _: bytes) -> Response:
        return await _keep_spans(spans, attempt_of(request), request)

    async def logs(request: Request, _: bytes) -> Response:
        return await _keep_logs(log_records, attempt_of(request), request)

    return [route(api.TRACES, access, traces), route(api.LOGS, access, logs)]


async def _keep_spans(spans: SpanReader, place: tuple[str, int], request: Request) -> Response:
    """Keep what an export holds for us, and hand all of it on."""
    media_type, encoding = _format_of(request)
    read = await spans.read(place, await request.body(), media_type, encoding)
    kept: list[Awaitable[object]] = []
    if read.tool_calls:
        kept.append(spans.log.append_tool_calls(*place, read.tool_calls))
    if read.spans:
        kept.append(spans.log.append_spans(*place, read.spans))
    await asyncio.gather(*kept)  # one commit
    for transition_id, rewards in read.rewards.items():
        await spans.log.add_rewards(*place, rewards, transition_id)
    spans.forward(place, read)
    return Response(encode_answer(media_type, read.rejected), media_type=media_type)


async def _keep_logs(records: LogReader, place: tuple[str, int], request: Request) -> Response:
    """Keep the evaluations among log records, and hand all of them on."""
    media_type, encoding = _format_of(request)
    read = await records.read(place, await request.body(), media_type, encoding)
    for transition_id, rewards in read.rewards.items():
        await records.log.add_rewards(*place, rewards, transition_id)
    records.forward(place, read)
    return Response(encode_logs_answer(media_type), media_type=media_type)


def _format_of(request: Request) -> tuple[str, str]:
    """Media type and encoding of an export."""
    return read_media_type(request.headers.get("content-type", "")), request.headers.get("content-encoding", "").lower()
