"""Endpoints to routes: the key is looked at before a body is read, and a body is read clean: bounded depth, no lone surrogates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightningrl import wire
from lightningrl.control.api import Endpoint
from lightningrl.errors import ServerError
from lightningrl.sanitize import parse_json
from lightningrl.server.access import Access

__all__ = ["LONG_BYTES", "BodyError", "route"]

LONG_BYTES: Final = 64 * 1024
"""Bodies above this are parsed in a thread: the event loop has other calls to serve."""

B = TypeVar("B")
A = TypeVar("A")


class BodyError(ServerError):
    """A body or query that is not what the endpoint takes. HTTP 400."""


def route(endpoint: Endpoint[B, A], access: Access, handler: Callable[[Request, B], Awaitable[A | Response]]) -> Route:
    """`handler` may answer with a Response of its own."""
    check: Callable[[Request], Awaitable[None]] = getattr(access, endpoint.who)

    async def answer(request: Request) -> Response:
        await check(request)
        result = await handler(request, await _read(request, endpoint))
        if isinstance(result, Response):
            return result
        return Response(status_code=204) if result is None else Response(wire.encode(result), media_type="application/json")

    return Route(endpoint.path, answer, methods=[endpoint.method])


async def _read(request: Request, endpoint: Endpoint[B, A]) -> B:
    """Raises BodyError with the place and the problem."""
    if endpoint.body is None or endpoint.body is bytes:
        return cast("B", None)
    try:
        if endpoint.method != "POST":
            return cast("B", msgspec.convert(dict(request.query_params), endpoint.body, strict=False))
        body = await request.body()
        if len(body) > LONG_BYTES:
            return cast("B", await asyncio.to_thread(_parse, body, endpoint.body))
        return cast("B", _parse(body, endpoint.body))
    except (ValueError, msgspec.MsgspecError) as error:
        is_json = not isinstance(error, UnicodeDecodeError | json.JSONDecodeError)
        problem = str(error) if is_json else "it is not JSON"
        raise BodyError(f"{request.method} {request.url.path!r}: the body: {problem}; see /openapi.json") from None


def _parse(body: bytes, kind: Any) -> Any:
    return wire.convert(parse_json(body), kind)
