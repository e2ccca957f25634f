"""The server's application: control API, engine link and gateway on one port; and its generated description.

/api/v1/…       control API             run key; a worker's key to lease and report; an attempt's key for itself
/api/v1/engines engine link (WebSocket) run key
/rollouts/…     the gateway's routes, and what agents report   scoped keys
/view/…         pages that plugins mount   view key, from this machine
/metrics        for Prometheus          run key, view key
/  /health  /openapi.json
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from lightningrl import control_api as api
from lightningrl import wire
from lightningrl.control_api import ENDPOINTS, Endpoint, WorkerFilter
from lightningrl.dialects import DIALECTS, Dialect, key_headers
from lightningrl.keys import view_key
from lightningrl.machine import resident_bytes
from lightningrl.types import RolloutSpec
from lightningrl_server.access import Access
from lightningrl_server.asked_calls import ReadAsked
from lightningrl_server.attempt_routes import AttemptMemory, agent_routes, attempt_routes
from lightningrl_server.failures import ERROR_HANDLERS, BoundedBodies
from lightningrl_server.forwarding import ExportForwarder, Forwarders
from lightningrl_server.gateway.model_call import while_connected
from lightningrl_server.inflate import TELEMETRY_BYTES
from lightningrl_server.metrics import TEXT, Engines, ServerMetrics
from lightningrl_server.mounts import Live, MakePages, ServedRun
from lightningrl_server.routes import BodyError, count_of, route
from lightningrl_server.spans.otlp import parse_export, parse_logs
from lightningrl_server.store.protocol import Queue, Store
from lightningrl_server.telemetry_routes import ExportReader, telemetry_routes
from lightningrl_server.workers import Workers, worker_routes

__all__ = ["create_app", "run_routes"]


def create_app(
    store: Store,
    engines: Engines,
    *,
    run_key: str,
    routes: Sequence[BaseRoute] = (),
    memory: AttemptMemory | None = None,
    forwarders: Forwarders | None = None,
    read_asked: ReadAsked | None = None,
    tokenizers: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    mounts: Mapping[str, MakePages] | None = None,
    metrics: ServerMetrics | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    max_body_bytes: int = 32 * 2**20,
    longest_wait_s: float = 60.0,
) -> Starlette:
    """Build the server's application.

    `routes` are the gateway's and the engine link's. `memory` is the gateway, told of ended attempts. `forwarders` get
    all spans and log records. `read_asked` says what an attempt's answers asked its tools for. `mounts` make the pages
    of the run in `folder` by name (`view` lies at /view); they read its tokens with the policies' `tokenizers`.
    `metrics` is what the gateway counts with; somebody else has it watch the event loop. `dialects` are the gateway's.
    """
    access = Access(store, run_key, key_headers(dialects))
    workers, metrics, forwarders = Workers(), metrics or ServerMetrics(), forwarders or Forwarders()
    limit, decoding = min(max_body_bytes, TELEMETRY_BYTES), WeakValueDictionary[tuple[str, int], asyncio.Lock]()
    reader = partial(ExportReader, log=store, limit=limit, decoding=decoding, dialects=dialects)
    spans = reader(parse=parse_export, forwarder=forwarders.spans, read_asked=read_asked)
    log_records = reader(parse=parse_logs, forwarder=forwarders.logs)
    show_live = partial(_show_live, store, engines, workers, metrics)
    pages: list[Mount] = []
    if folder is not None:
        tokenizer_of = (tokenizers or {}).get
        run = ServedRun(
            folder=folder, store=store, tokenizer_of=tokenizer_of, live=show_live, view_key=view_key(run_key)
        )
        pages = [Mount(f"/{name}", make(run=run)) for name, make in (mounts or {}).items()]

    async def show_metrics(request: Request) -> Response:
        await access.look(request)
        return Response(await metrics.text(store, engines, workers, folder), media_type=TEXT)

    return Starlette(
        routes=[
            *pages,
            *agent_routes(store, access, dialects, read_asked),  # before the gateway, which refuses unknown paths
            *routes,
            *attempt_routes(store, store, access, workers, memory, spans, longest_wait_s=longest_wait_s),
            *telemetry_routes(access, spans, log_records),
            *worker_routes(store, access, workers, longest_wait_s=longest_wait_s),
            *run_routes(store, access, engines, forwarders.spans, metrics, longest_wait_s=longest_wait_s),
            Route("/", _welcome(pages)),
            Route("/metrics", show_metrics),
            Route("/health", _health),
            Route("/openapi.json", _description),
        ],
        exception_handlers=ERROR_HANDLERS,
        middleware=[Middleware(BoundedBodies, limit=max_body_bytes)],
    )


async def _show_live(queue: Queue, engines: Engines, workers: Workers, metrics: ServerMetrics) -> Live:
    return Live(
        policies=engines.status(),
        workers=(await workers.look(WorkerFilter(), queue.running)).workers,
        longest_pause_s=metrics.longest_pause_s,
        memory_bytes=resident_bytes(),
        calls_of_no_rollout=metrics.calls_of_no_rollout,
    )


def _welcome(pages: Sequence[Mount]) -> Callable[[Request], Awaitable[Response]]:
    there = f"its pages are at {', '.join(page.path for page in pages)}" if pages else "it has no pages"
    text = f"This is the server of a LightningRL run: {there}, and its API is described at /openapi.json.\n"

    async def welcome(_: Request) -> Response:
        return PlainTextResponse(text)

    return welcome


async def _health(_: Request) -> Response:
    return JSONResponse({"ok": True})


async def _description(_: Request) -> Response:
    return JSONResponse(_describe(ENDPOINTS))


_REF = "#/components/schemas/{name}"
_ARRAY = {"type": "string", "contentEncoding": "base64"}
"""Arrays of tokens and logprobs."""


def _describe(endpoints: Sequence[Endpoint[Any, Any]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    kinds = [kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=lambda _: _ARRAY, ref_template=_REF)
    named = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, named, components)
    about = "Order rollouts, work on them, train on what they did."
    return {
        "openapi": "3.1.0",
        "info": {"title": "LightningRL", "version": "1", "summary": about},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(endpoint: Endpoint[Any, Any], named: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer" if name == "n" else "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    about = " ".join((endpoint.about or inspect.getdoc(endpoint.body) or "").split())
    summary = about.partition(". ")[0].rstrip(".")
    operation: dict[str, Any] = {"summary": summary, "description": about, "tags": [endpoint.who]}
    if endpoint.body is bytes:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content = {"application/x-protobuf": binary, "application/json": {"schema": {}}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None and endpoint.method == "POST":
        content = {"application/json": {"schema": named[repr(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None:
        query = components[endpoint.body.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    answers: dict[str, Any] = {"default": {"description": 'Refused: {"error": {"message": sentence, "code": …}}'}}
    if endpoint.answer is not None:
        answers["200"] = {"description": "", "content": {"application/json": {"schema": named[repr(endpoint.answer)]}}}
    else:
        answers["204"] = {"description": "Done"}
    return {**operation, "parameters": parameters, "responses": answers}


_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def run_routes(
    store: Store,
    access: Access,
    engines: Engines,
    forwarder: ExportForwarder | None,
    metrics: ServerMetrics,
    *,
    longest_wait_s: float,
) -> list[BaseRoute]:
    """Build the routes of the control API that the trainer alone may use."""

    async def status(_: Request, __: None) -> api.Status:
        pause_s = metrics.longest_pause_s
        return api.Status(
            counts=await store.counts(),
            policies=engines.status(),
            spans_forwarded=None if forwarder is None else forwarder.forwarded,
            spans_not_forwarded=None if forwarder is None else forwarder.failed,
            longest_pause_s=None if pause_s is None else round(pause_s, 3),
            memory_bytes=resident_bytes(),
        )

    async def create(_: Request, body: api.Create) -> api.Count:
        for spec in body.rollouts:
            _check(spec)
        return api.Count(count=await store.create_rollouts(body.rollouts))

    async def wait(request: Request, body: api.Wait) -> api.FinishedIds:
        waiting = store.wait_finished(body.rollout_ids, min(body.wait_s, longest_wait_s), body.min_finished)
        return api.FinishedIds(finished=await while_connected(request.receive, waiting) or ())

    async def trajectories(_: Request, body: api.RolloutIds) -> Response:
        trajectories = await store.trajectories(body.rollout_ids)
        return Response(await asyncio.to_thread(wire.encode_trajectories, trajectories), media_type="application/json")

    async def mark(_: Request, body: api.Step) -> None:
        metrics = {name: value for name, value in body.metrics.items() if value is not None}
        await store.mark_trained(body.step, body.rollout_ids, metrics)

    return [
        route(api.CREATE, access, create),
        route(api.WAIT, access, wait),
        route(api.CANCEL, access, lambda _, body: count_of(store.cancel(body.rollout_ids))),
        route(api.RETRY, access, lambda _, body: count_of(store.retry(body.rollout_ids, body.timeout_s))),
        route(api.INTERRUPT, access, lambda _, body: count_of(store.interrupt(body.reason))),
        route(api.LIST, access, lambda _, where: store.list_rollouts(where)),
        route(api.ROLLOUT, access, lambda request, _: store.rollout(request.path_params["rid"])),
        route(api.TRAJECTORIES, access, trajectories),
        route(api.STEPS, access, lambda _, __: store.steps()),
        route(api.SCORES, access, lambda _, body: store.set_scores(body.scores)),
        route(api.STEP, access, mark),
        route(api.ROLLBACK, access, lambda _, body: count_of(store.rollback_steps(body.after))),
        route(api.FORGET, access, lambda _, body: count_of(store.forget_rollouts(body.through, body.slack))),
        route(api.STATUS, access, status),
    ]


def _check(spec: RolloutSpec) -> None:
    if not _ID.fullmatch(spec.id):
        raise BodyError(f"rollout id {spec.id[:80]!r} must be 1 to 200 of A-Z a-z 0-9 . _ : -")
    if not 1 <= spec.max_attempts <= api.LARGEST or not 0 < spec.timeout_s < math.inf:
        raise BodyError(f"rollout {spec.id!r} needs max_attempts from 1 to {api.LARGEST} and timeout_s > 0")
    if abs(spec.step) > api.LARGEST:
        raise BodyError(f"rollout {spec.id!r} is of step {spec.step}; number steps up to {api.LARGEST}")
