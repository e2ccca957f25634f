"""The server's application: control API, engine link and gateway on one port.

/api/v1/…       control API            run key; a worker's key to lease and report; an attempt's scoped key for its own attempt
/api/v1/engines engine link (WebSocket)   run key
/rollouts/…     the gateway's routes, and what agents report   scoped keys
/view/…         pages that others mount, for example the viewer's   view key, from this machine
/metrics        for Prometheus            run key, view key
/health  /openapi.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from lightningrl.control.api import ENDPOINTS, WorkerFilter
from lightningrl.dialects import DIALECTS, Dialect, key_headers
from lightningrl.keys import view_key
from lightningrl_server.access import Access
from lightningrl_server.agent_routes import agent_routes
from lightningrl_server.asked_calls import ReadAsked
from lightningrl_server.attempt_routes import AttemptMemory, attempt_routes
from lightningrl_server.failures import ERROR_HANDLERS, BoundedBodies
from lightningrl_server.forwarding import Forwarders
from lightningrl_server.metrics import TEXT, Engines, ServerMetrics, Vitals, memory_bytes
from lightningrl_server.mounts import Live, MakePages, ServedRun
from lightningrl_server.openapi import describe
from lightningrl_server.run_routes import run_routes
from lightningrl_server.spans.otlp import parse_export, parse_logs
from lightningrl_server.store.protocol import Store
from lightningrl_server.telemetry_routes import ExportReader, telemetry_routes
from lightningrl_server.workers import Workers, worker_routes

__all__ = ["create_app"]


def create_app(
    store: Store,
    engines: Engines,
    *,
    run_key: str,
    routes: Sequence[BaseRoute] = (),
    memory: AttemptMemory | None = None,
    forwarders: Forwarders | None = None,
    read_asked: ReadAsked | None = None,
    vitals: Vitals | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    mounts: Mapping[str, MakePages] | None = None,
    metrics: ServerMetrics | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    max_body_bytes: int = 32 * 2**20,
    longest_wait_s: float = 60.0,
) -> Starlette:
    """`routes` are the gateway's and the engine link's; `memory` is the gateway, told of ended attempts; `forwarders` get all spans and
    log records; `read_asked` says what an attempt's answers asked its tools for; `vitals`, which somebody else keeps watching, are shown;
    `folder` is the run's, and `mounts` are its pages by name (`view` lies at /view), which get the policies' `tokenizers`; without a folder
    there are none; `metrics` is what the gateway counts with; `dialects` are those of the gateway."""
    access = Access(store, run_key, key_headers(dialects))
    workers = Workers()
    forwarders = forwarders or Forwarders()
    spans = ExportReader(
        log=store, parse=parse_export, limit=max_body_bytes, forwarder=forwarders.spans, read_asked=read_asked, dialects=dialects
    )
    log_records = ExportReader(log=store, parse=parse_logs, limit=max_body_bytes, forwarder=forwarders.logs, dialects=dialects)

    async def live() -> Live:
        known = await workers.look(WorkerFilter(), store.running)
        pause = None if vitals is None else vitals.longest_pause_s
        return Live(
            policies=engines.status(),
            workers=known.workers,
            longest_pause_s=pause,
            memory_bytes=memory_bytes(),
            calls_of_no_rollout=0 if metrics is None else metrics.calls_of_no_rollout,
        )

    pages: list[Mount] = []
    if folder is not None:
        served = ServedRun(folder=folder, store=store, tokenizer_of=(tokenizers or {}).get, live=live, view_key=view_key(run_key))
        pages = [Mount(f"/{name}", make(run=served)) for name, make in (mounts or {}).items()]

    async def welcome(_: Request) -> Response:
        there = f"its pages are at {', '.join(page.path for page in pages)}" if pages else "it has no pages"
        return PlainTextResponse(f"This is the server of a LightningRL run: {there}, and its API is described at /openapi.json.\n")

    async def show_metrics(request: Request) -> Response:
        await access.look(request)
        text = await (metrics or ServerMetrics()).text(store, engines, workers, vitals, folder)
        return Response(text, media_type=TEXT)

    return Starlette(
        routes=[
            *pages,
            *agent_routes(store, access, dialects, read_asked),  # before the gateway, which refuses the paths it does not know
            *routes,
            *attempt_routes(store, store, access, workers, memory, spans, longest_wait_s=longest_wait_s),
            *telemetry_routes(access, spans, log_records),
            *worker_routes(store, access, workers, longest_wait_s=longest_wait_s),
            *run_routes(store, store, store, access, engines, forwarders.spans, vitals, longest_wait_s=longest_wait_s),
            Route("/", welcome),
            Route("/metrics", show_metrics),
            Route("/health", _health),
            Route("/openapi.json", _description),
        ],
        exception_handlers=ERROR_HANDLERS,
        middleware=[Middleware(BoundedBodies, limit=max_body_bytes)],
    )


async def _health(_: Request) -> Response:
    return JSONResponse({"ok": True})


async def _description(_: Request) -> Response:
    return JSONResponse(describe(ENDPOINTS))
