"""The gateway's endpoints: a model call of any dialect, its length, what goes to the upstream, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from lightningrl.dialects import Dialect, find_endpoint, key_headers
from lightningrl.records import AttemptInfo
from lightningrl_server.gateway.calls import PolicyCalls
from lightningrl_server.gateway.dialects.chat_answer import write_model, write_models
from lightningrl_server.gateway.dialects.format import CountingFormat, DialectFormat, DialectRequest, EventStream
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.exchange import (
    ClientGone,
    ReceivedCall,
    authorise,
    call_context,
    read_body,
    send_json,
    while_connected,
)
from lightningrl_server.gateway.refusals import RefusalLog
from lightningrl_server.gateway.request import Answer, AnswerStart, Delivery
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.gateway.threads import Threads
from lightningrl_server.gateway.upstream import Forwarder
from lightningrl_server.gateway.watch import CallWatch
from lightningrl_server.rendering.completion import TextDelta

__all__ = [
    "CountTokens",
    "ForwardEndpoint",
    "ModelCall",
    "Models",
    "OfRollout",
    "RefusedEndpoint",
    "RefusedPath",
    "Services",
    "refuse_unattributed",
    "refuse_upgrade",
]

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=DialectRequest)
T = TypeVar("T")

_TEXT_TO_JSON = 4
"""How much faster a body is parsed than its text is tokenised, at least."""


class _NamedModel(msgspec.Struct):
    model: str = ""


_decode_name = msgspec.json.Decoder(_NamedModel).decode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Services:
    """The parts that all endpoints of a gateway share."""

    policy_calls: PolicyCalls
    forwarder: Forwarder
    refusals: RefusalLog
    settings: GatewaySettings
    threads: Threads
    watch: CallWatch | None
    formats: dict[Dialect, DialectFormat[Any]]

    async def authorise(self, scope: Scope) -> AttemptInfo:
        """The attempt that a call's path names and its key opens. Raises Refusal."""
        return await authorise(self.policy_calls, key_headers(tuple(self.formats)), scope, dict(scope["headers"]))

    async def refuse(self, scope: Scope, send: Send, refusal: Refusal) -> None:
        """In the format of the dialect whose endpoint the path looks like, else of the first."""
        dialects = tuple(self.formats)
        self.count(refusal)
        found = find_endpoint(dialects, scope["path"].rstrip("/"))
        write_error = self.formats[dialects[0] if found is None else found[0]].write_error
        await send_json(send, refusal.status, write_error(refusal))

    def count(self, refusal: Refusal) -> None:
        if self.watch is not None:
            self.watch.refused(refusal.code)


class _Endpoint(Generic[R]):
    """The common part of all calls: a key, a bounded body, a model that is a policy's or the upstream's, errors in one format."""

    def __init__(self, services: Services, dialect: Dialect, path: str) -> None:
        self._services = services
        self._policy_calls = services.policy_calls
        self._forwarder = services.forwarder
        self._dialect = dialect
        self._format: DialectFormat[R] = services.formats[dialect]
        self._key_headers = key_headers(tuple(services.formats))
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        place = scope["path_params"]
        try:
            info = await authorise(self._policy_calls, self._key_headers, scope, headers)
        except Refusal as refusal:
            self._services.count(refusal)
            await _refuse(send, refusal, self._format, place)
            return
        path = self._path.format_map(place)
        try:
            body = await read_body(headers, receive, self._services.settings.max_body_bytes)
        except ClientGone:
            return
        except Refusal as refusal:
            await self._refuse(ReceivedCall(info=info, path=path, headers=headers, send=send, context=call_context(headers, b"")), refusal)
            return
        model = place.get("model") or (model_of(body) if self._forwarder.is_configured else "")
        call = ReceivedCall(
            info=info,
            path=path,
            query=scope.get("query_string", b""),
            model=model,
            headers=headers,
            body=body,
            context=call_context(headers, body),
            send=send,
        )
        try:
            if self._forwarder.is_configured and self._goes_upstream(call):
                work = self._forwarder.forward(call, self._dialect)
            else:
                work = self._serve(call)
            await while_connected(receive, self._guarded(work, call))
        except ClientGone:
            return
        except Refusal as refusal:
            await self._refuse(call, refusal)

    async def _guarded(self, work: Awaitable[None], call: ReceivedCall) -> None:
        try:
            await work
        except Refusal as refusal:
            await self._refuse(call, refusal)
        except RecursionError:
            await self._refuse(call, Refusal("the request is nested too deeply; flatten it"))

    async def _refuse(self, call: ReceivedCall, refusal: Refusal) -> None:
        self._services.count(refusal)
        if refusal.code != "upstream_failed":  # that exchange is on record
            await self._services.refusals.add(call.info, call.path, call.context, refusal)
        await _refuse(call.send, refusal, self._format, {"rollout_id": call.info.rollout_id, "attempt": call.info.attempt})

    def _goes_upstream(self, call: ReceivedCall) -> bool:
        return self._forwarder.takes(call.model, call.context)

    async def _parse(self, call: ReceivedCall) -> R:
        settings = self._services.settings
        return await self._services.threads.run(len(call.body) // _TEXT_TO_JSON, lambda: self._format.parse(call.body, call.path, settings))

    async def _serve(self, call: ReceivedCall) -> None:
        raise NotImplementedError


class ModelCall(_Endpoint[R]):
    """One model call, whole or streamed."""

    async def _serve(self, call: ReceivedCall) -> None:
        request = await self._parse(call)
        if request.call.stream:
            await self._stream(call, request)
            return
        async with aclosing(self._policy_calls.run(call.info, request.call, call.context)) as items:
            async for item in items:
                if isinstance(item, Answer):
                    await send_json(call.send, 200, self._format.write_answer(request, item, self._policy_calls.renderer(item.policy)))

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
                        headers = [(b"content-type", self._dialect.stream_type.encode()), (b"cache-control", b"no-cache")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": not isinstance(item, Answer)})
                    if isinstance(item, TextDelta):
                        delivery.add(item, was_sent=bool(data), with_tool_calls=stream.sends_tool_calls)
        except Refusal as refusal:
            if stream is None or not has_text:
                raise
            self._services.count(refusal)
            await self._services.refusals.add(call.info, call.path, call.context, refusal)
            await send({"type": "http.response.body", "body": stream.error(refusal)})

    def _open(self, request: R, start: AnswerStart) -> EventStream:
        return self._format.open_stream(request, self._policy_calls.renderer(start.policy), start)


class CountTokens(_Endpoint[R]):
    """How long a call would be; nothing is sampled."""

    _format: CountingFormat[R]

    async def _serve(self, call: ReceivedCall) -> None:
        request = await self._parse(call)
        tokens = await self._policy_calls.count_tokens(call.info, request.call, call.context)
        await send_json(call.send, 200, self._format.write_count(tokens))


class ForwardEndpoint(_Endpoint[R]):
    """Calls that no policy answers."""

    def _goes_upstream(self, call: ReceivedCall) -> bool:
        return self._forwarder.has_upstream(call.model)

    async def _serve(self, call: ReceivedCall) -> None:
        raise Refusal(
            f"no policy answers /{call.path}, and no upstream is configured for the model {model_of(call.body)!r}; to have your provider "
            "answer it, set base_url and api_key_env under [upstream] in the recipe",
            status=404,
            code="no_upstream",
            param="model",
        )


class Models:
    """The policies by name, as OpenAI's API lists models; and one model that would be answered, whatever the agent calls it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._services.authorise(scope)
            answer = self._write(scope)
        except Refusal as refusal:
            await self._services.refuse(scope, send, refusal)
            return
        await send_json(send, 200, answer)

    def _write(self, scope: Scope) -> bytes:
        name = scope["path_params"].get("model")
        calls = self._services.policy_calls
        if name is None:
            return write_models(calls.policies)
        if calls.may_serve(name, call_context(dict(scope["headers"]), b"")) or self._services.forwarder.has_upstream(name):
            return write_model(name)
        raise Refusal(
            f"no policy {name!r} in this run; it serves {', '.join(calls.policies)}", status=404, code="model_not_found", param="model"
        )


class RefusedEndpoint:
    """A path where nothing is answered."""

    def __init__(self, services: Services, why: Callable[[Scope], Refusal]) -> None:
        self._services = services
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._services.refuse(scope, send, self._why(scope))


class RefusedPath:
    """A path of an attempt that nobody answers: kept with the attempt where the key is right, as any refused call."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        refusal = _unknown_path(scope, tuple(services.formats))
        with suppress(Refusal):
            info = await services.authorise(scope)
            await services.refusals.add(info, scope["path_params"]["rest"][:200], call_context(dict(scope["headers"]), b""), refusal)
        await services.refuse(scope, send, refusal)


class OfRollout:
    """An endpoint of the first attempt of one rollout, for paths that name none."""

    def __init__(self, endpoint: ASGIApp, rollout_id: str) -> None:
        self._endpoint = endpoint
        self._place = {"rollout_id": rollout_id, "attempt": 1}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint({**scope, "path_params": {**scope["path_params"], **self._place}}, receive, send)


def _unknown_path(scope: Scope, dialects: tuple[Dialect, ...]) -> Refusal:
    endpoints = [f"/{endpoint}" for dialect in dialects for endpoint in dialect.endpoints]
    path = "/" + scope["path_params"]["rest"]
    hint = ""
    if path.startswith("/v1/"):
        hint = "; leave /v1 out of the client's base URL, as it adds its own"
    elif "/v1/" not in scope["path"]:
        hint = "; end the client's base URL in /v1"
    return Refusal(
        f"{scope['method']} {path!r} is not served; a policy answers POST to {', '.join(endpoints[:-1])} and {endpoints[-1]}{hint}",
        status=404,
        code="unknown_path",
    )


def refuse_unattributed(scope: Scope) -> Refusal:
    """A call outside of any rollout."""
    return Refusal(
        "this call belongs to no rollout, so it is not answered: the rollout that started it is over, or, while runtime.concurrency is "
        "above 1, it comes from a bare thread or from a program that it started, or that was started at import or by os.system; call "
        "inside of the agent's function (threads: ThreadPoolExecutor, asyncio.to_thread; programs: subprocess), and from elsewhere send it "
        "to the base URL of its rollout's attempt",
        status=403,
        code="no_rollout",
    )


async def refuse_upgrade(websocket: WebSocket) -> None:
    """Say at once that calls come over HTTP. Codex then sends its call there; after any other status it first tries for 7 s."""
    await websocket.send_denial_response(
        PlainTextResponse("calls are not answered over a WebSocket; send each as a POST, streamed or not\n", status_code=426)
    )


def model_of(body: bytes) -> str:
    """The model that a body names; empty where it names none, which its dialect then refuses."""
    try:
        return _decode_name(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


async def _refuse(send: Send, refusal: Refusal, form: DialectFormat[Any], place: dict[str, Any]) -> None:
    logger.info("rollout %s, attempt %s: call refused: %s", place["rollout_id"], place["attempt"], refusal)
    await send_json(send, refusal.status, form.write_error(refusal))
