"""The gateway's routes: model calls of rollouts, each under its attempt's own path and key.

/rollouts/{rollout}/attempts/{n}/v1/chat/completions   POST
/rollouts/{rollout}/attempts/{n}/v1/models             GET
/v1/…                                                  403: a call that belongs to no rollout fails closed
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from lightningrl.gateway.calls import Caller
from lightningrl.gateway.dialects.chat import ChatRequest, parse_chat_request
from lightningrl.gateway.dialects.chat_answer import ChatStream, write_answer, write_error, write_models
from lightningrl.gateway.engines import EngineRegistry
from lightningrl.gateway.errors import Refusal
from lightningrl.gateway.rendering import PolicyRenderer
from lightningrl.gateway.request import Answer, Begun, CallContext
from lightningrl.gateway.settings import GatewaySettings
from lightningrl.store.protocol import AttemptInfo, Store

__all__ = ["Gateway", "create_gateway"]

_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Gateway:
    """Routes to mount, and what the server asks of the gateway beside them."""

    def __init__(self, caller: Caller, settings: GatewaySettings) -> None:
        self._caller = caller
        base = "/rollouts/{rollout_id}/attempts/{attempt:int}/v1"
        self.routes: list[BaseRoute] = [
            Route(f"{base}/chat/completions", _ChatCompletions(caller, settings), methods=["POST"]),
            Route(f"{base}/models", _Models(caller), methods=["GET"]),
            Route(f"{base}/{{rest:path}}", _NotServed()),
            Route("/v1/{rest:path}", _Unattributed()),
            Route("/chat/completions", _Unattributed()),
        ]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free the memory of an attempt that has ended. Call it when its result arrives."""
        self._caller.forget(rollout_id, attempt)

    def is_overflowed(self, rollout_id: str, attempt: int) -> bool:
        """Whether a call of the attempt was refused because its prompt was beyond the context: an `agent_error` is then a
        `context_overflow`. Ask before `forget`."""
        return self._caller.is_overflowed(rollout_id, attempt)


def create_gateway(
    store: Store, engines: EngineRegistry, renderers: Mapping[str, PolicyRenderer], settings: GatewaySettings | None = None
) -> Gateway:
    """The gateway of a run: `app.router.routes.extend(create_gateway(...).routes)`. `renderers` by policy name."""
    settings = settings or GatewaySettings()
    return Gateway(Caller(store, engines, renderers, settings), settings)


class _ClientGoneError(Exception):
    """Nobody listens any more."""


class _Models:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _authorise(self._caller, scope)
        except Refusal as refusal:
            await _send_refusal(send, refusal)
            return
        await _send_json(send, 200, write_models(self._caller.policies))


class _NotServed:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].partition("/v1")[2]
        await _send_refusal(
            send, Refusal(f"{scope['method']} {path!r} is not served; a policy answers /chat/completions", status=404, code="unknown_path")
        )


class _Unattributed:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = Refusal(
            "this call belongs to no rollout, so it is not answered; send it to the base URL of its rollout's attempt",
            status=403,
            code="no_rollout",
        )
        await _send_refusal(send, refusal)


class _ChatCompletions:
    """One model call, whole or streamed."""

    def __init__(self, caller: Caller, settings: GatewaySettings) -> None:
        self._caller = caller
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            info = await _authorise(self._caller, scope, headers)
            body = await _read_body(headers, receive, self._settings.max_body_bytes)
            request = parse_chat_request(body, max_choices=self._settings.max_choices)
            context = _context(headers, body)
        except Refusal as refusal:
            await _send_refusal(send, refusal)
            return
        except _ClientGoneError:
            return
        answer = self._stream if request.call.stream else self._answer
        await _while_connected(receive, answer(info, request, context, send))

    async def _answer(self, info: AttemptInfo, request: ChatRequest, context: CallContext, send: Send) -> None:
        try:
            async with aclosing(self._caller.run(info, request.call, context)) as items:
                async for item in items:
                    if isinstance(item, Answer):
                        await _send_json(send, 200, write_answer(request, item, self._caller.renderer(item.policy)))
        except Refusal as refusal:
            await _send_refusal(send, refusal)

    async def _stream(self, info: AttemptInfo, request: ChatRequest, context: CallContext, send: Send) -> None:
        stream: ChatStream | None = None
        has_text = False
        try:
            async with aclosing(self._caller.run(info, request.call, context)) as items:
                async for item in items:
                    if isinstance(item, Begun):
                        stream = ChatStream(request, self._caller.renderer(item.policy), int(time.time()), item.id)
                        continue
                    if stream is None:
                        assert isinstance(item, Answer)
                        stream = ChatStream(request, self._caller.renderer(item.policy), item.created, item.id)
                    if not has_text:
                        has_text = True
                        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                    if isinstance(item, Answer):
                        last = b"".join((*stream.whole(item), *stream.end(item)))
                        await send({"type": "http.response.body", "body": last})
                    else:
                        data = stream.delta(item)
                        if data:
                            await send({"type": "http.response.body", "body": data, "more_body": True})
        except Refusal as refusal:
            if stream is not None and has_text:
                await send({"type": "http.response.body", "body": stream.error(refusal)})
            else:
                await _send_refusal(send, refusal)


async def _while_connected(receive: Receive, work: Any) -> None:
    """Finish the work, or cancel it when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()


async def _authorise(caller: Caller, scope: Scope, headers: Mapping[bytes, bytes] | None = None) -> AttemptInfo:
    headers = dict(scope["headers"]) if headers is None else headers
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Refusal("the call shows no key; send the attempt's key as 'Authorization: Bearer …'", status=401, code="invalid_api_key")
    place = scope["path_params"]
    return await caller.authorise(place["rollout_id"], place["attempt"], key.strip())


async def _read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    declared = headers.get(b"content-length", b"")
    too_large = Refusal(f"the request body is larger than {limit} bytes; shorten the messages", status=413, code="body_too_large")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _context(headers: Mapping[bytes, bytes], body: bytes) -> CallContext:
    retries = headers.get(b"x-stainless-retry-count", b"0")
    call_id = headers.get(b"x-lightningrl-call-id")
    agent = headers.get(b"x-lightningrl-agent")
    parent = headers.get(b"traceparent", b"").split(b"-")
    return CallContext(
        call_id=call_id.decode("latin-1") if call_id else None,
        retries=int(retries) if retries.isdigit() else 0,
        agent=_unquote(agent) if agent else None,
        span_id=parent[2].decode("latin-1") if len(parent) == 4 and len(parent[2]) == 16 else None,
        body_digest="" if call_id else hashlib.blake2b(body, digest_size=12).hexdigest(),
    )


def _unquote(value: bytes) -> str:
    """Names may be sent percent-encoded, as headers carry ASCII only."""
    from urllib.parse import unquote

    return unquote(value.decode("latin-1"))


async def _send_refusal(send: Send, refusal: Refusal) -> None:
    extra = [(b"x-should-retry", b"true")] if refusal.status == 503 else []
    await _send_json(send, refusal.status, write_error(refusal), extra)


async def _send_json(send: Send, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body)), *(extra or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
