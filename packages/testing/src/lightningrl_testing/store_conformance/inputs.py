"""Rollouts and calls to test a store with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightningrl.records import Lease, RolloutFilter
from lightningrl.types import FinishReason, Outcome, RolloutSpec, Task, Trajectory, Transition
from lightningrl_server.records import CallRecord
from lightningrl_server.store.protocol import Store

__all__ = ["ended", "leased", "listed", "make_call", "make_spec", "started", "trajectory_of"]


def make_spec(rollout_id: str = "r1", question: Any = "6 * 7?", **fields: Any) -> RolloutSpec:
    """A rollout on one question, in group `g`."""
    return RolloutSpec(id=rollout_id, task=Task(id="t", input=question, answer=42), group_id="g", **fields)


def make_call(
    lease: Lease,
    call_id: str,
    new: Sequence[int],
    completion: Sequence[int],
    *,
    parent: CallRecord | None = None,
    call_key: str | None = None,
    history_key: str | None = None,
    **fields: Any,
) -> CallRecord:
    """A call of `lease`'s attempt whose prompt is the tokens of `parent` and `new`; logprobs are -1/token."""
    before = (
        () if parent is None else (*parent.transition.prompt_ids.tolist(), *parent.transition.completion_ids.tolist())
    )
    values: dict[str, Any] = {"policy": "main", "policy_version": 3, "finish_reason": FinishReason.STOP}
    values |= {"parent_id": None if parent is None else parent.transition.id, **fields}
    transition = Transition(
        id=call_id,
        prompt_ids=np.array([*before, *new], np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=np.array([-1.0 / max(token, 1) for token in completion], np.float32),
        **values,
    )
    return CallRecord(
        rollout_id=lease.rollout_id,
        attempt=lease.attempt,
        call_key=call_key or f"key-{call_id}",
        transition=transition,
        history_key=history_key,
    )


async def leased(store: Store, lease_s: float = 60.0) -> Lease:
    lease = await store.lease("w1", lease_s)
    assert lease is not None
    return lease


async def started(store: Store, *, lease_s: float = 60.0, **fields: Any) -> Lease:
    """Create the rollout `a` and lease it."""
    await store.create_rollouts([make_spec("a", **fields)])
    return await leased(store, lease_s)


async def ended(store: Store, outcome: Outcome = Outcome.SUCCEEDED, output: Any = None, **result: Any) -> Trajectory:
    """End the first attempt of `a` and read what is kept of it."""
    await store.finish_attempt("a", 1, outcome, output, **result)
    return await trajectory_of(store)


async def trajectory_of(store: Store, rollout_id: str = "a") -> Trajectory:
    (trajectory,) = await store.trajectories([rollout_id])
    return trajectory


async def listed(store: Store, **where: Any) -> list[str]:
    """Ids of the rollouts that a filter lets through, as they are listed."""
    return [record.spec.id for record in await store.list_rollouts(RolloutFilter(**where))]
