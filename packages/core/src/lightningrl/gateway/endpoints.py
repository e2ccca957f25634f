"""The gateway's endpoints: a model call of any dialect, its length, what goes to the upstream, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from lightningrl.gateway.calls import Caller
from lightningrl.gateway.dialects.chat_answer import write_error, write_models
from lightningrl.gateway.dialects.dialect import Dialect, DialectRequest, EventStream
from lightningrl.gateway.dialects.messages import parse_messages_request
from lightningrl.gateway.dialects.messages_answer import MessagesDialect, write_count
from lightningrl.gateway.errors import Refusal
from lightningrl.gateway.exchange import EVENTS, ClientGone, authorise, call_context, read_body, send_json, while_connected
from lightningrl.gateway.refusals import RefusalLog
from lightningrl.gateway.request import Answer, Begun, CallContext, Delivery
from lightningrl.gateway.settings import GatewaySettings
from lightningrl.gateway.threads import Threads
from lightningrl.gateway.upstream import Forwarder
from lightningrl.rendering.completion import TextDelta
from lightningrl.store.protocol import AttemptInfo

__all__ = ["CountTokens", "Forwarded", "ModelCall", "Models", "OfRollout", "Refused", "RefusedPath", "refuse_unattributed"]

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=DialectRequest)
T = TypeVar("T")
WriteError = Callable[[Refusal], bytes]

_TEXT_TO_JSON = 4
"""How much faster a body is parsed than its text is tokenised, at least."""


class _Named(msgspec.Struct):
    model: str = ""


_decode_name = msgspec.json.Decoder(_Named).decode


class _Endpoint:
    """What all calls have in common: a key, a bounded body, a model that is a policy's or the upstream's, errors in one format."""

    path: str
    write_error: WriteError

    def __init__(self, caller: Caller, forwarder: Forwarder, refusals: RefusalLog, settings: GatewaySettings, threads: Threads) -> None:
        self._caller = caller
        self._forwarder = forwarder
        self._refusals = refusals
        self._settings = settings
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            info = await authorise(self._caller, scope, headers)
        except Refusal as refusal:
            await _refuse(send, refusal, self.write_error, scope["path_params"])
            return
        try:
            body = await read_body(headers, receive, self._settings.max_body_bytes)
            context = call_context(headers, body)
            if self._forwarder.is_configured and self._goes_upstream(body, context):
                work = self._forwarder.forward(info, self.path, headers, body, context, send)
            else:
                work = self._serve(info, body, context, send)
            await while_connected(receive, self._guarded(work, info, context, send))
        except ClientGone:
            return
        except Refusal as refusal:
            await self._refuse(send, refusal, info, call_context(headers, b""))

    async def _guarded(self, work: Awaitable[None], info: AttemptInfo, context: CallContext, send: Send) -> None:
        try:
            await work
        except Refusal as refusal:
            await self._refuse(send, refusal, info, context)
        except RecursionError:
            await self._refuse(send, Refusal("the request is nested too deeply; flatten it"), info, context)

    async def _refuse(self, send: Send, refusal: Refusal, info: AttemptInfo, context: CallContext) -> None:
        if refusal.code != "upstream_failed":  # that exchange is on record
            await self._refusals.add(info, self.path, context, refusal)
        await _refuse(send, refusal, self.write_error, {"rollout_id": info.rollout_id, "attempt": info.attempt})

    def _goes_upstream(self, body: bytes, context: CallContext) -> bool:
        return self._forwarder.takes(model_of(body), context)

    async def _parsed(self, body: bytes, parse: Callable[[], T]) -> T:
        return await self._threads.run(len(body) // _TEXT_TO_JSON, parse)

    async def _serve(self, info: AttemptInfo, body: bytes, context: CallContext, send: Send) -> None:
        raise NotImplementedError


class ModelCall(_Endpoint, Generic[R]):
    """One model call, whole or streamed."""

    def __init__(
        self,
        caller: Caller,
        forwarder: Forwarder,
        refusals: RefusalLog,
        settings: GatewaySettings,
        threads: Threads,
        path: str,
        dialect: Dialect[R],
    ) -> None:
        super().__init__(caller, forwarder, refusals, settings, threads)
        self.path = path
        self.write_error = dialect.write_error
        self._dialect = dialect

    async def _serve(self, info: AttemptInfo, body: bytes, context: CallContext, send: Send) -> None:
        request = await self._parsed(body, lambda: self._dialect.parse(body, self._settings))
        if request.call.stream:
            await self._stream(info, request, context, send)
            return
        async with aclosing(self._caller.run(info, request.call, context)) as items:
            async for item in items:
                if isinstance(item, Answer):
                    await send_json(send, 200, self._dialect.write_answer(request, item, self._caller.renderer(item.policy)))

    async def _stream(self, info: AttemptInfo, request: R, context: CallContext, send: Send) -> None:
        stream: EventStream | None = None
        has_text = False
        delivery = Delivery()
        try:
            async with aclosing(self._caller.run(info, request.call, context, delivery)) as items:
                async for item in items:
                    if isinstance(item, Begun):
                        stream = self._open(request, item)
                        continue
                    if stream is None:
                        assert isinstance(item, Answer)
                        stream = self._open(request, item.begun)
                    data = stream.finish(item) if isinstance(item, Answer) else stream.delta(item)
                    if data and not has_text:
                        has_text = True
                        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": not isinstance(item, Answer)})
                    if isinstance(item, TextDelta):
                        delivery.add(item, was_sent=bool(data), with_tool_calls=stream.sends_tool_calls)
        except Refusal as refusal:
            if stream is None or not has_text:
                raise
            await self._refusals.add(info, self.path, context, refusal)
            await send({"type": "http.response.body", "body": stream.error(refusal)})

    def _open(self, request: R, begun: Begun) -> EventStream:
        return self._dialect.open_stream(request, self._caller.renderer(begun.policy), begun)


class CountTokens(_Endpoint):
    """How long a messages call would be; nothing is sampled."""

    path = "messages/count_tokens"
    write_error = staticmethod(MessagesDialect().write_error)

    async def _serve(self, info: AttemptInfo, body: bytes, context: CallContext, send: Send) -> None:
        request = await self._parsed(body, lambda: parse_messages_request(body))
        tokens = await self._caller.count_tokens(info, request.call, context)
        await send_json(send, 200, write_count(tokens))


class Forwarded(_Endpoint):
    """What no policy answers."""

    write_error = staticmethod(write_error)

    def __init__(
        self, caller: Caller, forwarder: Forwarder, refusals: RefusalLog, settings: GatewaySettings, threads: Threads, path: str
    ) -> None:
        super().__init__(caller, forwarder, refusals, settings, threads)
        self.path = path

    def _goes_upstream(self, body: bytes, context: CallContext) -> bool:
        return self._forwarder.has_upstream(model_of(body))

    async def _serve(self, info: AttemptInfo, body: bytes, context: CallContext, send: Send) -> None:
        raise Refusal(
            f"no policy answers /{self.path}, and no upstream is configured for the model {model_of(body)!r}; to have your provider answer "
            "it, set base_url and api_key_env under [upstream] in the recipe",
            status=404,
            code="no_upstream",
            param="model",
        )


class Models:
    """The policies by name."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await authorise(self._caller, scope, dict(scope["headers"]))
        except Refusal as refusal:
            await send_json(send, refusal.status, write_error(refusal))
            return
        await send_json(send, 200, write_models(self._caller.policies))


class Refused:
    """A path where nothing is answered."""

    def __init__(self, why: Callable[[Scope], Refusal]) -> None:
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_refusal(scope, send, self._why(scope))


class RefusedPath:
    """A path of an attempt that nobody answers: kept with the attempt where the key is right, as any refused call."""

    def __init__(self, caller: Caller, refusals: RefusalLog) -> None:
        self._caller = caller
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        refusal = _unknown_path(scope)
        with suppress(Refusal):
            info = await authorise(self._caller, scope, headers)
            await self._refusals.add(info, scope["path_params"]["rest"][:200], call_context(headers, b""), refusal)
        await _send_refusal(scope, send, refusal)


class OfRollout:
    """An endpoint of the first attempt of one rollout, for paths that name none."""

    def __init__(self, endpoint: ASGIApp, rollout_id: str) -> None:
        self._endpoint = endpoint
        self._place = {"rollout_id": rollout_id, "attempt": 1}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint({**scope, "path_params": {**scope["path_params"], **self._place}}, receive, send)


async def _send_refusal(scope: Scope, send: Send, refusal: Refusal) -> None:
    is_messages = scope["path"].rstrip("/").endswith(("/messages", "/count_tokens"))
    write = MessagesDialect().write_error if is_messages else write_error
    await send_json(send, refusal.status, write(refusal))


def _unknown_path(scope: Scope) -> Refusal:
    path = "/" + scope["path_params"]["rest"]
    hint = ""
    if path.startswith("/v1/"):
        hint = "; leave /v1 out of the client's base URL, as it adds its own"
    elif "/v1/" not in scope["path"]:
        hint = "; end the client's base URL in /v1"
    return Refusal(
        f"{scope['method']} {path!r} is not served; a policy answers POST to /chat/completions, /responses and /messages{hint}",
        status=404,
        code="unknown_path",
    )


def refuse_unattributed(scope: Scope) -> Refusal:
    """A call outside of any rollout."""
    return Refusal(
        "this call belongs to no rollout, so it is not answered: the rollout that started it is over, or it comes from a bare thread "
        "while runtime.concurrency is more than 1; call inside of the agent's function (threads: ThreadPoolExecutor, asyncio.to_thread), "
        "and from elsewhere send it to the base URL of its rollout's attempt",
        status=403,
        code="no_rollout",
    )


def model_of(body: bytes) -> str:
    """The model that a body names; empty where it names none, which its dialect then refuses."""
    try:
        return _decode_name(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


async def _refuse(send: Send, refusal: Refusal, write: WriteError, place: dict[str, Any]) -> None:
    logger.info("rollout %s, attempt %s: call refused: %s", place["rollout_id"], place["attempt"], refusal)
    await send_json(send, refusal.status, write(refusal))
