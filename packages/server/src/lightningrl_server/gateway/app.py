"""The gateway's routes: model calls of rollouts, each under its attempt's own path and key.

/rollouts/{rollout}/attempts/{n}{base}/{endpoint}   POST   each dialect's (`lightningrl.dialects`): policy or upstream
/rollouts/{rollout}/attempts/{n}/v1/models[/{name}] GET    the policies by name
/v1/…                                               403: a call that belongs to no rollout fails closed;
                                                    or the calls of `settings.plain_rollout`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from lightningrl.dialects import DIALECTS, Dialect, key_headers
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.calls import PolicyCalls
from lightningrl_server.gateway.dialects.format import load_format
from lightningrl_server.gateway.endpoints import (
    CountTokens,
    ForwardEndpoint,
    Models,
    RefusedEndpoint,
    RefusedPath,
    refuse_upgrade,
)
from lightningrl_server.gateway.model_call import ModelCall, Services
from lightningrl_server.gateway.prompt import Threads
from lightningrl_server.gateway.refusals import RefusalLog
from lightningrl_server.gateway.settings import CallWatch, GatewaySettings
from lightningrl_server.gateway.upstream import Forwarder
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import CallLog

__all__ = ["Gateway", "create_gateway"]

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
                **{endpoint: CountTokens[Any](services, dialect, endpoint) for endpoint in dialect.counting},
                **{endpoint: ForwardEndpoint[Any](services, dialect, endpoint) for endpoint in dialect.forwarded},
            }
            calls |= {f"{base}/{endpoint}": serve for base in dialect.bases for endpoint, serve in served.items()}
        models, unknown, unattributed = Models(services), RefusedPath(services), RefusedEndpoint(services)

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
            WebSocketRoute(path, refuse_upgrade) for path in (f"{attempt}/{{rest:path}}", "/v1/{rest:path}")
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
    """The gateway of a run: `app.router.routes.extend(create_gateway(...).routes)`. `renderers` by policy name. Raises
    ConfigError."""
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
