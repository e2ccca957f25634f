"""The trainer's side of the control API: order rollouts, wait, fetch trajectories, keep scores and steps, look on."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl import wire
from lightningrl.types import RolloutSpec
from lightningrl_server.access import Access
from lightningrl_server.forwarding import ExportForwarder
from lightningrl_server.gateway.model_call import while_connected
from lightningrl_server.metrics import Engines, ServerMetrics, memory_bytes
from lightningrl_server.routes import BodyError, count_of, route
from lightningrl_server.store.protocol import Store

__all__ = ["run_routes"]

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
            memory_bytes=memory_bytes(),
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
