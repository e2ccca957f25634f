"""The trainer's side of the control API: order rollouts, wait, fetch trajectories, keep scores and steps, look on."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from lightningrl import control_api as api
from lightningrl import wire
from lightningrl.records import RolloutFilter, RolloutRecord, StepRecord
from lightningrl.types import RolloutSpec
from lightningrl_server.access import Access
from lightningrl_server.forwarding import ExportForwarder
from lightningrl_server.metrics import Engines, Vitals, memory_bytes
from lightningrl_server.routes import BodyError, route, while_connected
from lightningrl_server.store.protocol import Ledger, Look, Queue, Store

__all__ = ["run_routes"]

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def run_routes(
    store: Store,
    access: Access,
    engines: Engines,
    forwarder: ExportForwarder | None = None,
    vitals: Vitals | None = None,
    *,
    longest_wait_s: float,
) -> list[BaseRoute]:
    """Build the routes of the control API that the trainer alone may use."""

    async def status(_: Request, __: None) -> api.Status:
        return api.Status(
            counts=await store.counts(),
            policies=engines.status(),
            spans_forwarded=None if forwarder is None else forwarder.forwarded,
            spans_not_forwarded=None if forwarder is None else forwarder.failed,
            longest_pause_s=None if vitals is None else round(vitals.longest_pause_s, 3),
            memory_bytes=memory_bytes(),
        )

    return [
        *_queue_routes(store, access, longest_wait_s),
        *_look_routes(store, access),
        *_ledger_routes(store, access),
        route(api.STATUS, access, status),
    ]


def _queue_routes(queue: Queue, access: Access, longest_wait_s: float) -> list[BaseRoute]:
    async def create(_: Request, body: api.Create) -> api.Count:
        for spec in body.rollouts:
            _check(spec)
        return api.Count(count=await queue.create_rollouts(body.rollouts))

    async def wait(request: Request, body: api.Wait) -> api.FinishedIds:
        waiting = queue.wait_finished(body.rollout_ids, min(body.wait_s, longest_wait_s), body.min_finished)
        return api.FinishedIds(finished=await while_connected(request, waiting) or ())

    async def cancel(_: Request, body: api.Cancel) -> api.Count:
        return api.Count(count=await queue.cancel(body.rollout_ids))

    async def retry(_: Request, body: api.Retry) -> api.Count:
        return api.Count(count=await queue.retry(body.rollout_ids, body.timeout_s))

    async def interrupt(_: Request, body: api.Interrupt) -> api.Count:
        return api.Count(count=await queue.interrupt(body.reason))

    return [
        route(api.CREATE, access, create),
        route(api.WAIT, access, wait),
        route(api.CANCEL, access, cancel),
        route(api.RETRY, access, retry),
        route(api.INTERRUPT, access, interrupt),
    ]


def _look_routes(look: Look, access: Access) -> list[BaseRoute]:
    async def rollouts(_: Request, where: RolloutFilter) -> Sequence[RolloutRecord]:
        return await look.list_rollouts(where)

    async def rollout(request: Request, _: None) -> RolloutRecord:
        return await look.rollout(request.path_params["rid"])

    async def trajectories(_: Request, body: api.RolloutIds) -> Response:
        trajectories = await look.trajectories(body.rollout_ids)
        return Response(await asyncio.to_thread(wire.encode_trajectories, trajectories), media_type="application/json")

    async def steps(_: Request, __: None) -> Sequence[StepRecord]:
        return await look.steps()

    return [
        route(api.LIST, access, rollouts),
        route(api.ROLLOUT, access, rollout),
        route(api.TRAJECTORIES, access, trajectories),
        route(api.STEPS, access, steps),
    ]


def _ledger_routes(ledger: Ledger, access: Access) -> list[BaseRoute]:
    async def scores(_: Request, body: api.Scores) -> None:
        await ledger.set_scores(body.scores)

    async def mark(_: Request, body: api.Step) -> None:
        metrics = {name: value for name, value in body.metrics.items() if value is not None}
        await ledger.mark_trained(body.step, body.rollout_ids, metrics)

    async def rollback(_: Request, body: api.Rollback) -> api.Count:
        return api.Count(count=await ledger.rollback_steps(body.after))

    async def forget(_: Request, body: api.Forget) -> api.Count:
        return api.Count(count=await ledger.forget_rollouts(body.through, body.slack))

    return [
        route(api.SCORES, access, scores),
        route(api.STEP, access, mark),
        route(api.ROLLBACK, access, rollback),
        route(api.FORGET, access, forget),
    ]


def _check(spec: RolloutSpec) -> None:
    if not _ID.fullmatch(spec.id):
        raise BodyError(f"rollout id {spec.id[:80]!r} must be 1 to 200 of A-Z a-z 0-9 . _ : -")
    if not 1 <= spec.max_attempts <= api.LARGEST or not 0 < spec.timeout_s < math.inf:
        raise BodyError(f"rollout {spec.id!r} needs max_attempts from 1 to {api.LARGEST} and timeout_s > 0")
    if abs(spec.step) > api.LARGEST:
        raise BodyError(f"rollout {spec.id!r} is of step {spec.step}; number steps up to {api.LARGEST}")
