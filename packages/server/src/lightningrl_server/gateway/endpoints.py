"""The endpoints beside a model call: a call's length, what goes to the upstream, the models, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from lightningrl.dialects import Dialect
from lightningrl_server.gateway.dialects.chat_answer import write_model, write_models
from lightningrl_server.gateway.dialects.format import CountingFormat
from lightningrl_server.gateway.model_call import Endpoint, R, Services, call_context, model_of, send_json
from lightningrl_server.gateway.request import CallContext, Refusal
from lightningrl_server.gateway.upstream import Forwarder, ReceivedCall

__all__ = [
    "CountTokens",
    "ForwardEndpoint",
    "Models",
    "OfRollout",
    "RefusedEndpoint",
    "RefusedPath",
    "refuse_unattributed",
    "refuse_upgrade",
]


class CountTokens(Endpoint[R]):
    """Length of a call; nothing is sampled."""

    _format: CountingFormat[R]

    async def _serve(self, call: ReceivedCall) -> None:
        request = await self._parse(call)
        tokens = await self._policy_calls.count_tokens(call.info, request.call, call.context)
        await send_json(call.send, 200, self._format.write_count(tokens))


class ForwardEndpoint(Endpoint[R]):
    """Calls that no policy answers."""

    def _goes_upstream(self, forwarder: Forwarder, call: ReceivedCall) -> bool:
        return forwarder.has_upstream(call.model)

    async def _serve(self, call: ReceivedCall) -> None:
        raise Refusal(
            f"no policy answers /{call.path}, and no upstream is configured for the model {model_of(call.body)!r}; to "
            "have your provider "
            "answer it, set base_url and api_key_env under [upstream] in the recipe",
            status=404,
            code="no_upstream",
            param="model",
        )


class Models:
    """The policies by name, as OpenAI's API lists models; and one model that would be answered, whatever the agent
    calls it."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            await self._services.authorise(scope, headers)
            answer = self._write(scope["path_params"].get("model"), call_context(headers, b""))
        except Refusal as refusal:
            await self._services.refuse(scope, send, refusal)
            return
        await send_json(send, 200, answer)

    def _write(self, name: str | None, context: CallContext) -> bytes:
        calls, forwarder = self._services.policy_calls, self._services.forwarder
        if name is None:
            return write_models(calls.policies)
        if calls.may_serve(name, context) or (forwarder is not None and forwarder.has_upstream(name)):
            return write_model(name)
        raise Refusal(
            f"no policy {name!r} in this run; it serves {', '.join(calls.policies)}",
            status=404,
            code="model_not_found",
            param="model",
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
            headers = dict(scope["headers"])
            info = await services.authorise(scope, headers)
            path = scope["path_params"]["rest"][:200]
            await services.refusals.add(info, path, call_context(headers, b""), refusal)
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
        f"{scope['method']} {path!r} is not served; a policy answers POST to {', '.join(endpoints[:-1])} and "
        f"{endpoints[-1]}{hint}",
        status=404,
        code="unknown_path",
    )


def refuse_unattributed(scope: Scope) -> Refusal:
    """A call outside of any rollout."""
    return Refusal(
        "this call belongs to no rollout, so it is not answered: the rollout that started it is over, or, while "
        "runtime.concurrency is "
        "above 1, it comes from a bare thread or from a program that it started, or that was started at import or by "
        "os.system; call "
        "inside of the agent's function (threads: ThreadPoolExecutor, asyncio.to_thread; programs: subprocess), and "
        "from elsewhere send it "
        "to the base URL of its rollout's attempt",
        status=403,
        code="no_rollout",
    )


async def refuse_upgrade(websocket: WebSocket) -> None:
    """Say at once that calls come over HTTP. Codex then sends its call there; after any other status it first tries for
    7 s."""
    await websocket.send_denial_response(
        PlainTextResponse(
            "calls are not answered over a WebSocket; send each as a POST, streamed or not\n", status_code=426
        )
    )
