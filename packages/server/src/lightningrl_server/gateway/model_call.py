"""One model call over HTTP: who it is, what it sent, what it gets, whole or streamed, and whether it still listens.

key ─► AttemptInfo ─► body (bounded) ─► a policy's or the upstream's? ─► parsed ─► PolicyCalls.run ─► written
Refused at any place in the dialect's own format, and kept with the attempt.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from codecs import BOM_UTF8
from collections.abc import Awaitable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.types import Message, Receive, Scope, Send

from lightningrl.call_origin import LONGEST_ROLE
from lightningrl.dialects import Dialect, find_endpoint
from lightningrl_server.gateway.calls import PolicyCalls
from lightningrl_server.gateway.dialects.checks import decode_clean
from lightningrl_server.gateway.dialects.format import DialectFormat, DialectRequest, EventStream
from lightningrl_server.gateway.prompt import LONG, Threads
from lightningrl_server.gateway.refusals import RefusalLog
from lightningrl_server.gateway.request import Answer, AnswerStart, CallContext, Delivery, Refusal
from lightningrl_server.gateway.settings import CallWatch, GatewaySettings
from lightningrl_server.gateway.upstream import Forwarder, ReceivedCall
from lightningrl_server.inflate import GZIP, MOST_VALUES, BadBody, check_values, inflate
from lightningrl_server.records import AttemptInfo
from lightningrl_server.rendering.completion import TextDelta
from lightningrl_server.store.errors import AttemptOver
from lightningrl_server.store.protocol import CallLog

__all__ = [
    "Endpoint",
    "ModelCall",
    "Services",
    "call_context",
    "is_anthropic",
    "model_of",
    "named_role",
    "send_json",
    "while_connected",
    "with_request_id",
]

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=DialectRequest)
T = TypeVar("T")

_TEXT_TO_JSON = 4
"""Least factor by which a body is parsed faster than its text is tokenised."""
_JSON = (b"content-type", b"application/json")
_RETRY = {503: b"true", 409: b"false"}
"""For SDKs, which try again by status: a call that has diverged, or whose id is taken, is refused each time."""


class _NamedModel(msgspec.Struct):
    model: str = ""


_decode_name = msgspec.json.Decoder(_NamedModel).decode


class _ClientGone(Exception):
    """Nobody listens any more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Services:
    """The parts that all endpoints of a gateway share."""

    log: CallLog
    policy_calls: PolicyCalls
    forwarder: Forwarder | None
    """None = no upstream is configured."""
    refusals: RefusalLog
    settings: GatewaySettings
    threads: Threads
    watch: CallWatch | None
    formats: dict[Dialect, DialectFormat[Any]]
    key_headers: tuple[str, ...]
    """Headers that may carry a key beside `authorization`."""

    def place(self, scope: Scope) -> tuple[str, int]:
        """The attempt that a path names, or the plain rollout's first one."""
        params = scope["path_params"]
        return params.get("rollout_id", self.settings.plain_rollout), params.get("attempt", 1)

    async def authorise(self, scope: Scope, headers: Mapping[bytes, bytes]) -> AttemptInfo:
        """The attempt that a call's path names and its key opens. Raises Refusal."""
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not key:
            key = next(
                (headers[name.encode()].decode("latin-1") for name in self.key_headers if name.encode() in headers), ""
            )
        if not key:
            ways = " or ".join(["'Authorization: Bearer …'", *(f"'{name}: …'" for name in self.key_headers)])
            raise Refusal(
                f"the call shows no key; send the attempt's key as {ways}", status=401, code="invalid_api_key"
            )
        (rollout_id, attempt), key = self.place(scope), key.strip()
        if attempt < 2**63:
            info = await self.log.authorise(rollout_id, attempt, key)
            if info is not None:
                return info
            reason = await self.log.refusal(rollout_id, attempt, key)
            if isinstance(reason, AttemptOver):
                raise Refusal(str(reason), status=410, code="attempt_over")
        raise Refusal(  # one answer, whether there is such a rollout or not: who has no key need not know
            f"wrong key for attempt {attempt} of rollout {rollout_id!r}; use the key of its lease",
            status=401,
            code="invalid_api_key",
        )

    def dialect_of(self, scope: Scope) -> Dialect:
        """The dialect whose endpoint the path looks like, or whose header there is, else the first."""
        dialects = tuple(self.formats)
        endpoint = find_endpoint(dialects, scope["path"].rstrip("/"))
        if is_anthropic(scope) and (endpoint is None or scope["path"].rpartition("/v1/")[2].startswith("models")):
            return next((dialect for dialect in dialects if dialect.name == "messages"), dialects[0])
        return dialects[0] if endpoint is None else endpoint[0]

    async def refuse(self, scope: Scope, send: Send, refusal: Refusal) -> None:
        """Refuse in the format of the dialect that the call is of."""
        self.count(refusal)
        dialect = self.dialect_of(scope)
        send, refusal.request_id = with_request_id(send, dialect)
        await send_json(send, refusal.status, self.formats[dialect].write_error(refusal))

    def count(self, refusal: Refusal) -> None:
        if self.watch is not None:
            self.watch.refused(refusal.code)


class Endpoint(Generic[R]):
    """The common part of all calls: a key, a bounded body, a policy's or the upstream's model, one format of errors."""

    def __init__(self, services: Services, dialect: Dialect, path: str) -> None:
        self._services = services
        self._policy_calls = services.policy_calls
        self._forwarder = services.forwarder
        self._dialect = dialect
        self._format: DialectFormat[R] = services.formats[dialect]
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, params = dict(scope["headers"]), scope["path_params"]
        send, request_id = with_request_id(send, self._dialect)
        try:
            info = await self._services.authorise(scope, headers)
        except Refusal as refusal:
            self._services.count(refusal)
            refusal.request_id = request_id
            await self._send_refusal(send, refusal, *self._services.place(scope))
            return
        path, forwarder = self._path.format_map(params), self._forwarder
        try:
            body = await read_body(headers, receive, self._services.settings.max_body_bytes)
        except _ClientGone:
            return
        except (Refusal, BadBody) as refusal:
            context = call_context(headers, b"")
            call = ReceivedCall(
                info=info, path=path, headers=headers, send=send, context=context, request_id=request_id
            )
            await self._refuse(call, _as_refusal(refusal))
            return
        model = params.get("model") or (model_of(body) if forwarder is not None else "")
        call = ReceivedCall(
            info=info,
            path=path,
            request_id=request_id,
            query=scope.get("query_string", b""),
            model=model,
            headers=headers,
            body=body,
            context=replace(call_context(headers, body), connection="{}:{}".format(*scope.get("client") or ("", ""))),
            send=send,
        )
        goes_upstream = forwarder is not None and self._goes_upstream(forwarder, call)
        work = forwarder.forward(call, self._dialect) if forwarder is not None and goes_upstream else self._serve(call)
        await while_connected(receive, self._guarded(work, call))

    async def _guarded(self, work: Awaitable[None], call: ReceivedCall) -> None:
        try:
            await work
        except (Refusal, BadBody) as refusal:
            await self._refuse(call, _as_refusal(refusal))
        except RecursionError:
            await self._refuse(call, Refusal("the request is nested too deeply; flatten it"))

    async def _refuse(self, call: ReceivedCall, refusal: Refusal) -> None:
        await self._note(call, refusal)
        await self._send_refusal(call.send, refusal, call.info.rollout_id, call.info.attempt)

    async def _send_refusal(self, send: Send, refusal: Refusal, rollout_id: str, attempt: int) -> None:
        logger.info("rollout %s, attempt %s: call %s refused: %s", rollout_id, attempt, refusal.request_id, refusal)
        await send_json(send, refusal.status, self._format.write_error(refusal))

    async def _note(self, call: ReceivedCall, refusal: Refusal) -> None:
        refusal.request_id = call.request_id
        self._services.count(refusal)
        if refusal.code != "upstream_failed":  # that exchange is on record
            await self._services.refusals.add(call.info, call.path, call.context, refusal)

    def _goes_upstream(self, forwarder: Forwarder, call: ReceivedCall) -> bool:
        return forwarder.takes(call.model, call.context)

    async def _parse(self, call: ReceivedCall) -> R:
        size = len(call.body) // _TEXT_TO_JSON
        if size < LONG:
            return self._read(call)
        return await self._services.threads.run(size, lambda: self._read(call))

    def _read(self, call: ReceivedCall) -> R:
        if len(call.body) > MOST_VALUES:  # each has a comma or a bracket
            check_values(call.body)
        return self._format.parse(call.body, call.path, self._services.settings)

    async def _serve(self, call: ReceivedCall) -> None:
        raise NotImplementedError


class ModelCall(Endpoint[R]):
    """One model call, whole or streamed."""

    async def _serve(self, call: ReceivedCall) -> None:
        request = await self._parse(call)
        if request.call.stream:
            await self._stream(call, request)
            return
        async with aclosing(self._policy_calls.run(call.info, request.call, call.context)) as items:
            async for item in items:
                if isinstance(item, Answer):
                    renderer = self._policy_calls.renderer(item.policy)
                    await send_json(call.send, 200, self._format.write_answer(request, item, renderer))

    async def _stream(self, call: ReceivedCall, request: R) -> None:
        stream: EventStream | None = None
        has_text = False
        delivery = Delivery()
        send = call.send
        try:
            async with aclosing(self._policy_calls.run(call.info, request.call, call.context, delivery)) as items:
                async for item in items:
                    if isinstance(item, AnswerStart):
                        stream = self._open(request, item)
                        continue
                    if stream is None:
                        assert isinstance(item, Answer)
                        stream = self._open(request, item.start)
                    data = stream.finish(item) if isinstance(item, Answer) else stream.delta(item)
                    if data and not has_text:
                        has_text = True
                        kind = self._dialect.stream_type.encode()
                        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    if data:
                        more = not isinstance(item, Answer)
                        await send({"type": "http.response.body", "body": data, "more_body": more})
                    if isinstance(item, TextDelta):
                        delivery.add(item, was_sent=bool(data), with_tool_calls=stream.sends_tool_calls)
        except Refusal as refusal:
            if stream is None or not has_text:
                raise
            await self._note(call, refusal)
            await send({"type": "http.response.body", "body": stream.error(refusal)})

    def _open(self, request: R, start: AnswerStart) -> EventStream:
        return self._format.open_stream(request, self._policy_calls.renderer(start.policy), start)


def _as_refusal(error: Refusal | BadBody) -> Refusal:
    return error if isinstance(error, Refusal) else Refusal(error.message, status=error.status, code=error.code)


def _too_large(limit: int) -> Refusal:
    sentence = f"the request body is larger than {limit} bytes; shorten the messages"
    return Refusal(sentence, status=413, code="body_too_large")


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body. Raises Refusal or BadBody beyond the limit or for headers that no call may have, _ClientGone
    without one."""
    if len(named_role(headers) or "") > LONGEST_ROLE:
        raise Refusal(
            f"the role in 'x-lightningrl-agent' is longer than {LONGEST_ROLE} characters; give it a shorter name"
        )
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            coding = headers.get(b"content-encoding", b"").decode("latin-1")
            if coding or body.startswith(GZIP):
                body = await asyncio.to_thread(inflate, body, coding, limit)
            return body.removeprefix(BOM_UTF8)


def is_anthropic(scope: Scope) -> bool:
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def with_request_id(send: Send, dialect: Dialect) -> tuple[Send, str]:
    """Have the answer carry an id of its call, unless an upstream gave it one; returns the id as well."""
    header, request_id = dialect.request_id_header.encode(), f"req_{secrets.token_hex(12)}"

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start" and all(name != header for name, _ in message["headers"]):
            message = {**message, "headers": [*message["headers"], (header, request_id.encode())]}
        await send(message)

    return send_with_id, request_id


def named_role(headers: Mapping[bytes, bytes]) -> str | None:
    """The role that the call's header names; None = none."""
    agent = headers.get(b"x-lightningrl-agent")
    return unquote(agent.decode("latin-1")) if agent else None  # headers carry ASCII only


def call_context(headers: Mapping[bytes, bytes], body: bytes) -> CallContext:
    """The call's context, from its headers."""
    retries = headers.get(b"x-stainless-retry-count", b"0")
    call_id = headers.get(b"x-lightningrl-call-id")
    agent = named_role(headers)
    parent = headers.get(b"traceparent", b"").split(b"-")
    return CallContext(
        call_id=call_id.decode("latin-1") if call_id else None,
        retries=int(retries) if retries.isdigit() and len(retries) < 10 else 0,
        agent=agent and agent[:LONGEST_ROLE],  # of a longer one the refusal is kept
        span_id=parent[2].decode("latin-1") if len(parent) == 4 and len(parent[2]) == 16 else None,
        body_digest="" if call_id else hashlib.blake2b(body, digest_size=12).hexdigest(),
    )


def model_of(body: bytes) -> str:
    """The model that a body names; empty where it names none, which its dialect then refuses."""
    try:
        return decode_clean(_decode_name, body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


async def send_json(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if status in _RETRY:
        headers.append((b"x-should-retry", _RETRY[status]))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Finish the work, or cancel it when the client goes away (None)."""
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
        return await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        return None
    finally:
        watcher.cancel()
        if is_gone:
            task.uncancel()
