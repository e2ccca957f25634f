"""The trainer's side of the control API: order rollouts, wait, fetch trajectories, keep scores and steps, look on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import numpy as np
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from lightningrl.gateway.engines import PolicyStatus
from lightningrl.server.access import Access
from lightningrl.server.attempt_routes import while_connected
from lightningrl.server.forwarding import SpanForwarder
from lightningrl.server.guarded import guarded
from lightningrl.server.models import (
    LARGEST,
    AttemptView,
    CancelBody,
    CountAnswer,
    CreateAnswer,
    CreateBody,
    InterruptBody,
    PolicyView,
    RetryBody,
    RolloutIdsBody,
    RolloutView,
    ScoreBody,
    ScoresBody,
    StatusAnswer,
    StepBody,
    StepView,
    WaitAnswer,
    WaitBody,
)
from lightningrl.server.vitals import Vitals, memory_bytes
from lightningrl.server.wire import encode_trajectories
from lightningrl.store.errors import Conflict
from lightningrl.store.protocol import RolloutFilter, RolloutRecord, Score, Store
from lightningrl.types import Array, Outcome, RolloutMode, RolloutState

__all__ = ["Engines", "run_routes"]


class Engines(Protocol):
    """How policies are served now."""

    def status(self) -> Sequence[PolicyStatus]: ...


def run_routes(  # noqa: C901  (one short function per route)
    store: Store,
    access: Access,
    engines: Engines,
    forwarder: SpanForwarder | None = None,
    vitals: Vitals | None = None,
    *,
    longest_wait_s: float,
) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["run"], route_class=guarded(access.run))

    @router.post("/rollouts", response_model=CreateAnswer, summary="Order rollouts")
    async def create(body: CreateBody) -> CreateAnswer:
        """Queued in this order. Ids are the caller's: an id known with the same task is skipped, with another refused (409)."""
        return CreateAnswer(created=await store.create_rollouts(body.rollouts))

    @router.get("/rollouts", response_model=list[RolloutView], summary="List rollouts, newest first")
    async def listed(
        state: RolloutState | None = None,
        outcome: Outcome | None = None,
        mode: RolloutMode | None = None,
        step: Annotated[int | None, Query(ge=-LARGEST, le=LARGEST)] = None,
        group_id: str | None = None,
        task_id: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    ) -> list[RolloutView]:
        where = RolloutFilter(
            state=state, outcome=outcome, mode=mode, step=step, group_id=group_id, task_id=task_id, limit=limit, offset=offset
        )
        return [_view(record) for record in await store.list_rollouts(where)]

    @router.get("/rollouts/{rid}", response_model=RolloutView, summary="One rollout with its attempts")
    async def one(rid: str) -> RolloutView:
        return _view(await store.rollout(rid))

    @router.post("/wait", response_model=WaitAnswer, summary="Wait until rollouts have finished (long poll)")
    async def wait(body: WaitBody, request: Request) -> WaitAnswer:
        """All finished ones of `rollout_ids`, as soon as there are `min_finished` (null = all) or `wait_s` is over."""
        waiting = store.wait_finished(body.rollout_ids, min(body.wait_s, longest_wait_s), body.min_finished)
        return WaitAnswer(finished=list(await while_connected(request, waiting) or ()))

    @router.post("/trajectories", response_class=Response, summary="Fetch trajectories of finished rollouts")
    async def trajectories(body: RolloutIdsBody) -> Response:
        """`{"trajectories": […]}` in the order asked. Token arrays are base64 of little-endian int32, logprobs float32; `suffix_ids` is
        what a prompt adds to the prompt + completion of transition number `parent` (no parent: the whole prompt)."""
        found = await store.trajectories(body.rollout_ids)
        return Response(await asyncio.to_thread(encode_trajectories, found), media_type="application/json")

    @router.post("/scores", status_code=204, summary="Keep rewards and advantages of finished attempts")
    async def scores(body: ScoresBody) -> None:
        await store.set_scores([_score(score) for score in body.scores])

    @router.post("/steps", status_code=204, summary="Record a training step; its rollouts count as trained")
    async def mark(body: StepBody) -> None:
        """A rollout is trained once: 409 otherwise. Repeating the same step is acknowledged."""
        known = {name: value for name, value in body.metrics.items() if value is not None}
        await store.mark_trained(body.step, body.rollout_ids, known)

    @router.get("/steps", response_model=list[StepView], summary="List training steps")
    async def steps() -> list[StepView]:
        return [
            StepView(step=one.step, rollout_ids=list(one.rollout_ids), metrics=dict(one.metrics), at=one.at) for one in await store.steps()
        ]

    @router.delete("/steps", response_model=CountAnswer, summary="Forget steps after a checkpoint")
    async def rollback(after: Annotated[int, Query(ge=-1, le=LARGEST)]) -> CountAnswer:
        """Steps later than `after` never happened; their rollouts may be trained again."""
        return CountAnswer(count=await store.rollback_steps(after))

    @router.post("/cancel", response_model=CountAnswer, summary="Cancel rollouts")
    async def cancel(body: CancelBody) -> CountAnswer:
        """Those not finished end as `cancelled`; their workers are told by the next heartbeat."""
        return CountAnswer(count=await store.cancel(body.rollout_ids))

    @router.post("/retry", response_model=CountAnswer, summary="Run failed rollouts again")
    async def retry(body: RetryBody) -> CountAnswer:
        """Those that failed are queued again, with as many attempts as at first: their agent was mended. Others stay."""
        return CountAnswer(count=await store.retry(body.rollout_ids, body.timeout_s))

    @router.post("/interrupt", response_model=CountAnswer, summary="Queue all running attempts again")
    async def interrupt(body: InterruptBody) -> CountAnswer:
        """For a restarted run whose workers are gone: running attempts end uncharged."""
        return CountAnswer(count=await store.interrupt(body.reason))

    @router.get("/status", response_model=StatusAnswer, summary="Totals, and how policies are served")
    async def status() -> StatusAnswer:
        counts = await store.counts()
        return StatusAnswer(
            states=dict(counts.states),
            outcomes=dict(counts.outcomes),
            attempts=counts.attempts,
            calls=counts.calls,
            breaks=counts.breaks,
            late=counts.late,
            policies=[
                PolicyView(policy=one.policy, version=one.version, connected=one.connected, held=one.held, in_flight=one.in_flight)
                for one in engines.status()
            ],
            spans_forwarded=None if forwarder is None else forwarder.forwarded,
            spans_not_forwarded=None if forwarder is None else forwarder.failed,
            longest_pause_s=None if vitals is None else round(vitals.longest_pause_s, 3),
            memory_bytes=memory_bytes(),
        )

    return router


def _score(body: ScoreBody) -> Score:
    return Score(
        rollout_id=body.rollout_id,
        attempt=body.attempt,
        rewards=body.rewards,
        reward=body.reward,
        transition_rewards=body.transition_rewards,
        advantages={name: _floats(data, name) for name, data in body.advantages.items()},
    )


def _floats(data: Any, transition_id: str) -> Array | None:
    if data is None:
        return None
    if len(data) % 4:
        raise Conflict(f"advantages of transition {transition_id!r} are {len(data)} bytes, not a whole number of float32 values")
    return np.frombuffer(data, "<f4")


def _view(record: RolloutRecord) -> RolloutView:
    spec = record.spec
    return RolloutView(
        id=spec.id,
        group_id=spec.group_id,
        task_id=spec.task.id,
        mode=spec.mode,
        step=spec.step,
        sampling=spec.sampling,
        state=record.state,
        outcome=record.outcome,
        attempts=[AttemptView.model_validate(attempt) for attempt in record.attempts],
        reward=record.reward,
        trained_step=record.trained_step,
        created_at=record.created_at,
    )
