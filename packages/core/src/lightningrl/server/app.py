"""The server's application: control API, engine link and gateway on one port.

/api/v1/…       control API            run key; a worker's key to lease and report; an attempt's scoped key for its own attempt
/api/v1/engines engine link (WebSocket)   run key
/rollouts/…     the gateway's routes, and what agents report   scoped keys
/health  /openapi.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute

from lightningrl.server.access import Access
from lightningrl.server.agent_routes import agent_routes
from lightningrl.server.asked_calls import ReadAsked
from lightningrl.server.attempt_routes import AttemptMemory, attempt_routes
from lightningrl.server.failures import BoundedBodies, add_error_handlers
from lightningrl.server.forwarding import SpanForwarder
from lightningrl.server.run_routes import Engines, run_routes
from lightningrl.server.vitals import Vitals
from lightningrl.store.protocol import Store

__all__ = ["create_app"]


def create_app(
    store: Store,
    engines: Engines,
    *,
    run_key: str,
    routes: Sequence[BaseRoute] = (),
    memory: AttemptMemory | None = None,
    forwarder: SpanForwarder | None = None,
    read_asked: ReadAsked | None = None,
    vitals: Vitals | None = None,
    max_body_bytes: int = 32 * 2**20,
    longest_wait_s: float = 60.0,
) -> FastAPI:
    """`routes` are the gateway's and the engine link's; `memory` is the gateway, told of ended attempts; `forwarder` gets all spans;
    `read_asked` says what an attempt's answers asked its tools for; `vitals`, which somebody else keeps watching, are shown."""
    app = FastAPI(
        title="LightningRL", version="1", summary="Order rollouts, work on them, train on what they did.", docs_url=None, redoc_url=None
    )
    access = Access(store, run_key)
    app.include_router(agent_routes(store, access))  # before the gateway, which refuses the paths it does not know
    app.router.routes.extend(routes)
    app.include_router(
        attempt_routes(store, access, memory, forwarder, read_asked, max_body_bytes=max_body_bytes, longest_wait_s=longest_wait_s)
    )
    app.include_router(run_routes(store, access, engines, forwarder, vitals, longest_wait_s=longest_wait_s))

    @app.get("/health", tags=["server"], summary="Is it up?")
    async def health() -> dict[str, Any]:
        return {"ok": True}

    add_error_handlers(app)
    app.add_middleware(BoundedBodies, limit=max_body_bytes)
    return app
