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

from lightningrl import wire
from lightningrl.control import api
from lightningrl.records import RolloutFilter, RolloutRecord, StepRecord
from lightningrl.types import RolloutSpec
from lightningrl_server.access import Access
from lightningrl_server.forwarding import ExportForwarder
from lightningrl_server.metrics import Engines, Vitals, memory_bytes
from lightningrl_server.routes import BodyError, route, while_connected
from lightningrl_server.store.protocol import Ledger, Look, Queue

__all__ = ["run_routes"]

_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def run_routes(  # noqa: C901  (one short function per endpoint)
    queue: Queue,
    ledger: Ledger,
    look: Look,
    access: Access,
    engines: Engines,
    forwarder: ExportForwarder | None = None,
    vitals: Vitals | None = None,
    *,
    longest_wait_s: float,
) -> list[BaseRoute]:
    async def create(_: Request, body: api.Create) -> api.Created:
        for spec in body.rollouts:
            _check(spec)
        return api.Created(created=await queue.create_rollouts(body.rollouts))

    async def listed(_: Request, where: RolloutFilter) -> Sequence[RolloutRecord]:
        return await look.list_rollouts(where)

    async def one(request: Request, _: None) -> RolloutRecord:
        return await look.rollout(request.path_params["rid"])

    async def wait(request: Request, body: api.Wait) -> api.Finished:
        waiting = queue.wait_finished(body.rollout_ids, min(body.wait_s, longest_wait_s), body.min_finished)
        return api.Finished(finished=await while_connected(request, waiting) or ())

    async def trajectories(_: Request, body: api.RolloutIds) -> Response:
        found = await look.trajectories(body.rollout_ids)
        return Response(await asyncio.to_thread(wire.encode_trajectories, found), media_type="application/json")

    async def scores(_: Request, body: api.Scores) -> None:
        await ledger.set_scores(body.scores)

    async def mark(_: Request, body: api.Step) -> None:
        known = {name: value for name, value in body.metrics.items() if value is not None}
        await ledger.mark_trained(body.step, body.rollout_ids, known)

    async def steps(_: Request, __: None) -> Sequence[StepRecord]:
        return await look.steps()

    async def rollback(_: Request, body: api.Rollback) -> api.Count:
        return api.Count(count=await ledger.rollback_steps(body.after))

    async def forget(_: Request, body: api.Forget) -> api.Count:
        return api.Count(count=await ledger.forget_rollouts(body.through, body.slack))

    async def cancel(_: Request, body: api.Cancel) -> api.Count:
        return api.Count(count=await queue.cancel(body.rollout_ids))

    async def retry(_: Request, body: api.Retry) -> api.Count:
        return api.Count(count=await queue.retry(body.rollout_ids, body.timeout_s))

    async def interrupt(_: Request, body: api.Interrupt) -> api.Count:
        return api.Count(count=await queue.interrupt(body.reason))

    async def status(_: Request, __: None) -> api.Status:
        return api.Status(
            counts=await look.counts(),
            policies=engines.status(),
            spans_forwarded=None if forwarder is None else forwarder.forwarded,
            spans_not_forwarded=None if forwarder is None else forwarder.failed,
            longest_pause_s=None if vitals is None else round(vitals.longest_pause_s, 3),
            memory_bytes=memory_bytes(),
        )

    return [
        route(api.CREATE, access, create),
        route(api.LIST, access, listed),
        route(api.ROLLOUT, access, one),
        route(api.WAIT, access, wait),
        route(api.TRAJECTORIES, access, trajectories),
        route(api.SCORES, access, scores),
        route(api.STEP, access, mark),
        route(api.STEPS, access, steps),
        route(api.ROLLBACK, access, rollback),
        route(api.FORGET, access, forget),
        route(api.CANCEL, access, cancel),
        route(api.RETRY, access, retry),
        route(api.INTERRUPT, access, interrupt),
        route(api.STATUS, access, status),
    ]


def _check(spec: RolloutSpec) -> None:
    if not _ID.fullmatch(spec.id):
        raise BodyError(f"rollout id {spec.id[:80]!r} must be 1 to 200 of A-Z a-z 0-9 . _ : -")
    if not 1 <= spec.max_attempts <= api.LARGEST or not 0 < spec.timeout_s < math.inf:
        raise BodyError(f"rollout {spec.id!r} needs max_attempts from 1 to {api.LARGEST} and timeout_s > 0")
    if abs(spec.step) > api.LARGEST:
        raise BodyError(f"rollout {spec.id!r} is of step {spec.step}; number steps up to {api.LARGEST}")
