"""The gateway's routes: model calls of rollouts, each under its attempt's path and key; and what stands beside them.

/rollouts/{rollout}/attempts/{n}{base}/{endpoint}   POST   each dialect's (`lightningrl.dialects`): policy or upstream
/rollouts/{rollout}/attempts/{n}/v1/models[/{name}] GET    the policies by name
/v1/…                                               403: a call that belongs to no rollout fails closed;
                                                    or the calls of `settings.plain_rollout`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from lightningrl.dialects import DIALECTS, Dialect, key_headers
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.calls import PolicyCalls
from lightningrl_server.gateway.dialects.chat import write_model, write_models
from lightningrl_server.gateway.dialects.format import CountingFormat, load_format
from lightningrl_server.gateway.model_call import (
    Endpoint,
    ModelCall,
    R,
    Services,
    call_context,
    is_anthropic,
    model_of,
    send_json,
    with_request_id,
)
from lightningrl_server.gateway.prompt import Threads
from lightningrl_server.gateway.refusals import RefusalLog
from lightningrl_server.gateway.request import CallContext, Refusal
from lightningrl_server.gateway.settings import CallWatch, GatewaySettings
from lightningrl_server.gateway.upstream import Forwarder, ReceivedCall
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import CallLog

__all__ = ["Gateway", "create_gateway"]


class _CountTokens(Endpoint[R]):
    """Length of a call; nothing is sampled."""

    _format: CountingFormat[R]

    async def _serve(self, call: ReceivedCall) -> None:
        request = await self._parse(call)
        tokens = await self._policy_calls.count_tokens(call.info, request.call, call.context)
        await send_json(call.send, 200, self._format.write_count(tokens))


class _ForwardEndpoint(Endpoint[R]):
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
class _Models:
    """The policies by name, as OpenAI lists models; and one model that would be answered, whatever its name."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = dict(scope["headers"])
            await self.services.authorise(scope, headers)
            answer = self._write(scope, call_context(headers, b""))
        except Refusal as refusal:
            await self.services.refuse(scope, send, refusal)
            return
        await send_json(with_request_id(send, self.services.dialect_of(scope))[0], 200, answer)

    def _write(self, scope: Scope, context: CallContext) -> bytes:
        routing, forwarder = self.services.policy_calls.routing, self.services.forwarder
        name, for_anthropic = scope["path_params"].get("model"), is_anthropic(scope)
        if name is None:
            return write_models(routing.policies, for_anthropic=for_anthropic)
        if routing.may_serve(name, context.agent) or (forwarder is not None and forwarder.has_upstream(name)):
            return write_model(name, for_anthropic=for_anthropic)
        sentence = f"no policy {name!r} in this run; it serves {', '.join(routing.policies)}"
        raise Refusal(sentence, status=404, code="model_not_found", param="model")


@dataclass(frozen=True, slots=True)
class _RefusedEndpoint:
    """A path outside of any attempt, where nothing is answered."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = Refusal(
            "this call belongs to no rollout, so it is not answered: the rollout that started it is over, or, while "
            "runtime.concurrency is above 1, it comes from a bare thread or from a program that it started, or that "
            "was started at import or by os.system; call inside of the agent's function (threads: ThreadPoolExecutor, "
            "asyncio.to_thread; programs: subprocess), and from elsewhere send it to the base URL of its rollout's "
            "attempt",
            status=403,
            code="no_rollout",
        )
        await self.services.refuse(scope, send, refusal)


@dataclass(frozen=True, slots=True)
class _RefusedPath:
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
    those = f"a policy answers POST to {', '.join(endpoints[:-1])} and {endpoints[-1]}{hint}"
    return Refusal(f"{scope['method']} {path!r} is not served; {those}", status=404, code="unknown_path")


async def _refuse_upgrade(websocket: WebSocket) -> None:
    """Say at once that calls come over HTTP. Codex then sends it there; after another status it tries for 7 s."""
    sentence = "calls are not answered over a WebSocket; send each as a POST, streamed or not\n"
    await websocket.send_denial_response(PlainTextResponse(sentence, status_code=426))


MODELS = ("/v1/models", "/v1/models/{model:path}")


class Gateway:
    """Routes to mount, and what the server asks of the gateway beside them."""

    def __init__(self, services: Services) -> None:
        self._services = services
        attempt = "/rollouts/{rollout_id}/attempts/{attempt:int}"
        calls: dict[str, ASGIApp] = {}
        for dialect in services.formats:
            served: dict[str, ASGIApp] = {
                **{endpoint: ModelCall[Any](services, dialect, endpoint) for endpoint in dialect.endpoints},
                **{endpoint: _CountTokens[Any](services, dialect, endpoint) for endpoint in dialect.counting},
                **{endpoint: _ForwardEndpoint[Any](services, dialect, endpoint) for endpoint in dialect.forwarded},
            }
            calls |= {f"{base}/{endpoint}": serve for base in dialect.bases for endpoint, serve in served.items()}
        models, unknown, unattributed = _Models(services), _RefusedPath(services), _RefusedEndpoint(services)

        def answered(prefix: str) -> list[BaseRoute]:
            return [
                *(Route(f"{prefix}{path}", serve, methods=["POST"]) for path, serve in calls.items()),
                *(Route(f"{prefix}{path}", models, methods=["GET"]) for path in MODELS),
                Route(f"{prefix}/v1/{{rest:path}}", unknown),
            ]

        self.routes: list[BaseRoute] = [*answered(attempt), Route(f"{attempt}/{{rest:path}}", unknown)]
        if services.settings.plain_rollout is not None:
            self.routes += answered("")
        self.routes += [
            WebSocketRoute(path, _refuse_upgrade) for path in (f"{attempt}/{{rest:path}}", "/v1/{rest:path}")
        ]
        self.routes += [Route(path, unattributed) for path in ("/v1/{rest:path}", "/chat/completions", *calls)]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free the memory of an attempt that has ended. Call it when its result arrives."""
        self._services.policy_calls.forget(rollout_id, attempt)
        self._services.refusals.forget(rollout_id, attempt)

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool:
        """True if a call of the attempt was refused because its prompt was beyond the context: an `agent_error` is then
        a `context_overflow`. The store remembers it, also after a restart."""
        return await self._services.refusals.has_overflow(rollout_id, attempt)

    async def close(self) -> None:
        """Close the connections to the upstream and let go of the threads."""
        if self._services.forwarder is not None:
            await self._services.forwarder.close()
        self._services.threads.close()


def create_gateway(
    log: CallLog,
    engines: EngineRegistry,
    renderers: Mapping[str, PolicyRenderer],
    settings: GatewaySettings | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    watch: CallWatch | None = None,
) -> Gateway:
    """A run's gateway: `app.router.routes.extend(create_gateway(...).routes)`. `renderers` by policy. ConfigError."""
    settings = settings or GatewaySettings()
    threads = Threads()
    policy_calls = PolicyCalls(log, engines, renderers, settings, threads, watch)
    has_upstream = settings.upstream is not None or bool(settings.upstream_models)
    counting = frozenset(endpoint for dialect in dialects for endpoint in dialect.counting)
    return Gateway(
        Services(
            log=log,
            policy_calls=policy_calls,
            forwarder=Forwarder(log, policy_calls.routing, settings) if has_upstream else None,
            refusals=RefusalLog(log, max_attempts=settings.max_attempts_in_memory, counting=counting),
            settings=settings,
            threads=threads,
            watch=watch,
            formats={dialect: load_format(dialect) for dialect in dialects},
            key_headers=key_headers(dialects),
        )
    )
