"""Refusals as `{"error": {"message": sentence, "code": …}}`, and bodies that are bounded before they are read."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightningrl.errors import LightningError, StoreError
from lightningrl.sanitize import clean_text
from lightningrl_server.access import Forbidden
from lightningrl_server.inflate import TELEMETRY_BYTES, BadBody
from lightningrl_server.routes import BodyError
from lightningrl_server.store.errors import AttemptOver, Conflict, StoreFull, StoreTrouble, UnknownRecord

__all__ = ["ERROR_HANDLERS", "BoundedBodies", "error_response", "nobody_listens"]

logger = logging.getLogger(__name__)

REPORTS: Final = ("/v1/rewards", "/v1/tool_calls")
SMALL_BYTES: Final = 256 * 1024
"""Largest body that holds a few numbers; larger ones would only keep the event loop busy."""
_LIMITS: Final = (
    (("/v1/rewards", "/rewards", "/beat", "/leases"), SMALL_BYTES),
    (("/v1/traces", "/v1/logs"), TELEMETRY_BYTES),
)
"""Bytes of bodies, by the ends of their paths."""
LONGEST_PATH: Final = 2000
LONGEST_SENTENCE: Final = 10_000
_STATUSES: tuple[tuple[type[LightningError], int, str], ...] = (
    (AttemptOver, 409, "attempt_over"),
    (Conflict, 409, "conflict"),
    (UnknownRecord, 404, "unknown"),
    (StoreFull, 507, "store_full"),
    (StoreTrouble, 503, "store_error"),
    (Forbidden, 401, "wrong_key"),
    (BodyError, 400, "invalid_body"),
    (StoreError, 400, "store_refused"),
)


def error_response(status: int, message: str, code: str) -> Response:
    content = msgspec.json.encode({"error": {"message": clean_text(message)[:LONGEST_SENTENCE], "code": code}})
    return Response(content, status, media_type="application/json")


async def _lightning(_: Request, error: Exception) -> Response:
    if isinstance(error, BadBody):
        return error_response(error.status, error.message, error.code)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            if status >= 500:
                logger.error("%s", error)
            return error_response(status, str(error), code)
    return error_response(400, str(error), "refused")


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        "Not Found": f"there is nothing at {request.url.path!r}; see /openapi.json",
        "Method Not Allowed": f"{request.url.path!r} does not take {request.method}; see /openapi.json",
    }.get(error.detail, error.detail)
    codes = {404: "unknown_path", 405: "wrong_method", 413: "body_too_large", 415: "wrong_content_type"}
    return error_response(error.status_code, message, codes.get(error.status_code, "http"))


async def _defect(request: Request, error: Exception) -> Response:
    problem = f"{request.method} {request.url.path!r} failed: {type(error).__name__}: {error}"
    return error_response(500, f"{problem}; see the server's log", "defect")


async def nobody_listens(_: Request, __: Exception) -> Response:
    """Answer a client that left during its body, so that it is no defect in the log."""
    return Response(status_code=400)


ERROR_HANDLERS: Final[Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]] = {
    LightningError: _lightning,
    HTTPException: _http,
    ClientDisconnect: nobody_listens,
    Exception: _defect,
}


class BoundedBodies:
    """Refuses larger bodies of the control API and of reports (the gateway bounds its own), and any endless path."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > LONGEST_PATH:
            problem = f"the path has {len(scope['path'])} characters, more than {LONGEST_PATH}"
            sentence = f"{problem}; see /openapi.json for those there are"
            await error_response(414, sentence, "path_too_long")(scope, receive, send)
            return
        if scope["type"] != "http" or not (scope["path"].startswith("/api/") or scope["path"].endswith(REPORTS)):
            await self._app(scope, receive, send)
            return
        limits = (bytes_ for ends, bytes_ in _LIMITS if scope["path"].endswith(ends))
        limit = min(self._limit, next(limits, self._limit))
        sentence = f"the request body is larger than {limit} bytes; send less at a time"
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            await error_response(413, sentence, "body_too_large")(scope, receive, send)
            return
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise HTTPException(413, sentence)
            return message

        await self._app(scope, bounded, send)
