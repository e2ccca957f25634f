"""Endpoints as routes: the key is looked at before a body is read, and bodies are of bounded depth and real text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from lightningrl import wire
from lightningrl.control_api import Count, Endpoint
from lightningrl.errors import ServerError
from lightningrl.sanitize import parse_json
from lightningrl_server.access import Access
from lightningrl_server.inflate import check_values

__all__ = ["LONG_BYTES", "BodyError", "attempt_of", "count_of", "is_gone", "route"]

LONG_BYTES: Final = 64 * 1024
"""Bodies above this are parsed in a thread: the event loop has other calls to serve."""

B = TypeVar("B")
A = TypeVar("A")


class BodyError(ServerError):
    """A body or query that is not what the endpoint takes. HTTP 400."""


def route(endpoint: Endpoint[B, A], access: Access, handler: Callable[[Request, B], Awaitable[A | Response]]) -> Route:
    """Make the endpoint's route. `handler` may answer with a Response of its own."""
    check: Callable[[Request], Awaitable[None]] = getattr(access, endpoint.who)

    async def answer(request: Request) -> Response:
        await check(request)
        result = await handler(request, await _read(request, endpoint))
        if isinstance(result, Response):
            return result
        if result is None:
            return Response(status_code=204)
        return Response(wire.encode(result), media_type="application/json")

    return Route(endpoint.path, answer, methods=[endpoint.method])


async def _read(request: Request, endpoint: Endpoint[B, A]) -> B:
    """Read the body or query. Raises BodyError with the place and the problem."""
    if endpoint.body is None or endpoint.body is bytes:
        return cast("B", None)
    try:
        if endpoint.method != "POST":
            return cast("B", msgspec.convert(dict(request.query_params), endpoint.body, strict=False))
        body = await request.body()
        if len(body) > LONG_BYTES:
            return cast("B", await asyncio.to_thread(_parse, body, endpoint))
        return cast("B", _parse(body, endpoint))
    except (ValueError, msgspec.MsgspecError) as error:
        is_json = not isinstance(error, UnicodeDecodeError | json.JSONDecodeError)
        problem = str(error) if is_json else "it is not JSON"
        raise BodyError(f"{request.method} {request.url.path!r}: the body: {problem}; see /openapi.json") from None


def _parse(body: bytes, endpoint: Endpoint[Any, Any]) -> Any:
    if endpoint.who.endswith("attempt"):  # an agent has its key
        check_values(body)
    return wire.convert(parse_json(body), endpoint.body)


async def count_of(work: Awaitable[int]) -> Count:
    """Answer with the number of what was done."""
    return Count(count=await work)


def attempt_of(request: Request) -> tuple[str, int]:
    """Return rollout and number of the path's attempt, once `Access` has looked at it."""
    return request.path_params["rid"], int(request.path_params["n"])


def is_gone(request: Request) -> bool:
    """Return whether the client has left, at once; Starlette's `is_disconnected` takes as long as a lease."""
    asking = cast("Coroutine[Any, Any, Message]", request.receive())
    try:
        asking.send(None)
    except StopIteration as told:
        return bool(told.value["type"] == "http.disconnect")
    asking.close()  # it would wait
    return False
