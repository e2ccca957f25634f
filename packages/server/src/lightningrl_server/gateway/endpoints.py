"""The endpoints beside a model call: a call's length, what goes to the upstream, the models, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from lightningrl.dialects import Dialect
from lightningrl_server.gateway.dialects.chat_answer import write_model, write_models
from lightningrl_server.gateway.dialects.format import CountingFormat
from lightningrl_server.gateway.model_call import Endpoint, R, Services, call_context, model_of, send_json
from lightningrl_server.gateway.request import CallContext, Refusal
from lightningrl_server.gateway.upstream import Forwarder, ReceivedCall

__all__ = ["CountTokens", "ForwardEndpoint", "Models", "RefusedEndpoint", "RefusedPath", "refuse_upgrade"]


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
            "have your provider answer it, set base_url and api_key_env under [upstream] in the recipe",
            status=404,
            code="no_upstream",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class Models:
    """The policies by name, as OpenAI's API lists models; and one model that would be answered, whatever the agent
    calls it."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            await self.services.authorise(scope, headers)
            answer = self._write(scope["path_params"].get("model"), call_context(headers, b""))
        except Refusal as refusal:
            await self.services.refuse(scope, send, refusal)
            return
        await send_json(send, 200, answer)

    def _write(self, name: str | None, context: CallContext) -> bytes:
        routing, forwarder = self.services.policy_calls.routing, self.services.forwarder
        if name is None:
            return write_models(routing.policies)
        if routing.may_serve(name, context.agent) or (forwarder is not None and forwarder.has_upstream(name)):
            return write_model(name)
        raise Refusal(
            f"no policy {name!r} in this run; it serves {', '.join(routing.policies)}",
            status=404,
            code="model_not_found",
            param="model",
        )


@dataclass(frozen=True, slots=True)
class RefusedEndpoint:
    """A path outside of any attempt, where nothing is answered."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.services.refuse(scope, send, _unattributed())


@dataclass(frozen=True, slots=True)
class RefusedPath:
    """A path of an attempt that nobody answers: kept with the attempt where the key is right, as any refused call."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _unknown_path(scope, tuple(self.services.formats))
        with suppress(Refusal):
            headers = dict(scope["headers"])
            info = await self.services.authorise(scope, headers)
            path = scope["path_params"]["rest"][:200]
            await self.services.refusals.add(info, path, call_context(headers, b""), refusal)
        await self.services.refuse(scope, send, refusal)


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


def _unattributed() -> Refusal:
    """A call outside of any rollout."""
    return Refusal(
        "this call belongs to no rollout, so it is not answered: the rollout that started it is over, or, while "
        "runtime.concurrency is above 1, it comes from a bare thread or from a program that it started, or that was "
        "started at import or by os.system; call inside of the agent's function (threads: ThreadPoolExecutor, "
        "asyncio.to_thread; programs: subprocess), and from elsewhere send it to the base URL of its rollout's attempt",
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
