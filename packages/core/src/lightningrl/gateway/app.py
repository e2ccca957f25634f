"""The gateway's routes: model calls of rollouts, each under its attempt's own path and key.

/rollouts/{rollout}/attempts/{n}/v1/chat/completions        POST   a policy, or the upstream
/rollouts/{rollout}/attempts/{n}/v1/responses               POST   a policy, or the upstream
/rollouts/{rollout}/attempts/{n}/v1/messages                POST   a policy, or the upstream
/rollouts/{rollout}/attempts/{n}/v1/messages/count_tokens   POST   a policy, or the upstream
/rollouts/{rollout}/attempts/{n}/v1/embeddings              POST   the upstream
/rollouts/{rollout}/attempts/{n}/v1/models                  GET
/rollouts/{rollout}/attempts/{n}/messages, …/count_tokens   POST   the same, for clients that add no /v1
/v1/…                                                       403: a call that belongs to no rollout fails closed;
                                                            or the calls of `settings.plain_rollout`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from lightningrl.engines.registry import EngineRegistry
from lightningrl.gateway.calls import Caller
from lightningrl.gateway.dialects.chat_answer import ChatDialect
from lightningrl.gateway.dialects.messages_answer import MessagesDialect
from lightningrl.gateway.dialects.responses_answer import ResponsesDialect
from lightningrl.gateway.endpoints import (
    CountTokens,
    Forwarded,
    ModelCall,
    Models,
    OfRollout,
    Refused,
    RefusedPath,
    refuse_unattributed,
)
from lightningrl.gateway.refusals import RefusalLog
from lightningrl.gateway.settings import GatewaySettings
from lightningrl.gateway.threads import Threads
from lightningrl.gateway.upstream import Forwarder
from lightningrl.rendering.renderer import PolicyRenderer
from lightningrl.store.protocol import CallLog

__all__ = ["Gateway", "create_gateway"]


class Gateway:
    """Routes to mount, and what the server asks of the gateway beside them."""

    def __init__(self, caller: Caller, forwarder: Forwarder, refusals: RefusalLog, settings: GatewaySettings, threads: Threads) -> None:
        self._caller = caller
        self._forwarder = forwarder
        self._refusals = refusals
        self._threads = threads
        attempt = "/rollouts/{rollout_id}/attempts/{attempt:int}"
        parts = (caller, forwarder, refusals, settings, threads)
        calls: dict[str, ASGIApp] = {
            "chat/completions": ModelCall(*parts, "chat/completions", ChatDialect()),
            "responses": ModelCall(*parts, "responses", ResponsesDialect()),
            "messages": ModelCall(*parts, "messages", MessagesDialect()),
            "messages/count_tokens": CountTokens(*parts),
            "embeddings": Forwarded(*parts, "embeddings"),
        }
        unknown = RefusedPath(caller, refusals)

        def served(base: str, wrap: Callable[[ASGIApp], ASGIApp] = lambda endpoint: endpoint) -> list[BaseRoute]:
            return [
                *(Route(f"{base}/{path}", wrap(endpoint), methods=["POST"]) for path, endpoint in calls.items()),
                Route(f"{base}/models", wrap(Models(caller)), methods=["GET"]),
                Route(f"{base}/{{rest:path}}", wrap(unknown)),
            ]

        plain = settings.plain_rollout
        self.routes: list[BaseRoute] = [
            *served(f"{attempt}/v1"),
            *(Route(f"{attempt}/{path}", calls[path], methods=["POST"]) for path in ("messages", "messages/count_tokens")),
            Route(f"{attempt}/{{rest:path}}", unknown),
            *(served("/v1", lambda endpoint: OfRollout(endpoint, plain)) if plain is not None else []),
            Route("/v1/{rest:path}", Refused(refuse_unattributed)),
            Route("/chat/completions", Refused(refuse_unattributed)),
        ]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free the memory of an attempt that has ended. Call it when its result arrives."""
        self._caller.forget(rollout_id, attempt)
        self._refusals.forget(rollout_id, attempt)

    async def is_overflowed(self, rollout_id: str, attempt: int) -> bool:
        """Whether a call of the attempt was refused because its prompt was beyond the context: an `agent_error` is then a
        `context_overflow`. The store remembers it, also after a restart."""
        return await self._refusals.has_overflow(rollout_id, attempt)

    async def close(self) -> None:
        """Close the connections to the upstream and let go of the threads."""
        await self._forwarder.close()
        self._threads.close()


def create_gateway(
    log: CallLog, engines: EngineRegistry, renderers: Mapping[str, PolicyRenderer], settings: GatewaySettings | None = None
) -> Gateway:
    """The gateway of a run: `app.router.routes.extend(create_gateway(...).routes)`. `renderers` by policy name."""
    settings = settings or GatewaySettings()
    threads = Threads()
    caller = Caller(log, engines, renderers, settings, threads)
    refusals = RefusalLog(log, max_attempts=settings.max_attempts_in_memory)
    return Gateway(caller, Forwarder(log, caller, settings), refusals, settings, threads)
