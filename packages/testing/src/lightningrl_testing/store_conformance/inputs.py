"""Rollouts and calls to test a store with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightningrl.records import Lease
from lightningrl.types import (
    FinishReason,
    RolloutSpec,
    Task,
    Transition,
)
from lightningrl_server.records import CallRecord
from lightningrl_server.store.protocol import Store

__all__ = ["leased", "make_call", "make_spec"]


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
