"""Routes for an agent's telemetry, under the attempt's key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl.control import api
from lightningrl.server.access import Access
from lightningrl.server.attempt_routes import attempt_of
from lightningrl.server.export_reader import ExportReader
from lightningrl.server.routes import route
from lightningrl.telemetry.otlp import encode_answer, read_media_type

__all__ = ["telemetry_routes"]


def telemetry_routes(access: Access, spans: ExportReader, log_records: ExportReader) -> list[BaseRoute]:
    async def keep(reader: ExportReader, request: Request) -> Response:
        """Keep what an export holds for us, and hand all of it on."""
        place = attempt_of(request)
        media_type = read_media_type(request.headers.get("content-type", ""))
        contents = await reader.read(place, await request.body(), media_type, request.headers.get("content-encoding", "").lower())
        kept: list[Awaitable[object]] = []
        if contents.tool_calls:
            kept.append(reader.log.append_tool_calls(*place, contents.tool_calls))
        if contents.spans:
            kept.append(reader.log.append_spans(*place, contents.spans))
        await asyncio.gather(*kept)  # one commit
        for transition_id, rewards in contents.rewards.items():
            await reader.log.add_rewards(*place, rewards, transition_id)
        reader.forward(place, contents)
        return Response(encode_answer(media_type, contents.rejected), media_type=media_type)

    async def traces(request: Request, _: bytes) -> Response:
        return await keep(spans, request)

    async def logs(request: Request, _: bytes) -> Response:
        return await keep(log_records, request)

    return [route(api.TRACES, access, traces), route(api.LOGS, access, logs)]
