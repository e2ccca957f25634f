"""Routes that look at the key before they read a body, and that read it clean: bounded depth, no lone surrogates, long ones in a thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lightningrl.clean import parse_json

__all__ = ["LONG_BYTES", "guarded"]

LONG_BYTES: Final = 64 * 1024
"""Bodies above this are parsed in a thread: the event loop has other calls to serve."""


class _CleanRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return await asyncio.to_thread(parse_json, body) if len(body) > LONG_BYTES else parse_json(body)
        except UnicodeDecodeError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            raise HTTPException(400, f"{self.method} {self.url.path!r}: the body: {error}") from None


def guarded(check: Callable[[Request], Awaitable[None]]) -> type[APIRoute]:
    """For `APIRouter(route_class=…)`: `check` sees path and headers, and raises what is answered; only then is the body read."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def handle(request: Request) -> Response:
                await check(request)
                return await handler(_CleanRequest(request.scope, request.receive))

            return handle

    return GuardedRoute
