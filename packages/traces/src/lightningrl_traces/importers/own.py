"""Facts that `lightningrl export-rollouts` writes below `lightningrl` in formats that have no place for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightningrl_runs.foreign.bodies import sampling_of
from lightningrl_runs.foreign.messages import finish_of
from lightningrl_traces.documents import dict_of
from lightningrl_traces.records import Ending

__all__ = ["OWN", "own_call", "own_ending"]

OWN: Final = "lightningrl"


def own_call(own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields of a `Call` that a rollout of ours has; none of others."""
    if own is None:
        return {}
    fields = {
        "id": own.get("id"),
        "version": own.get("policy_version"),
        "finish_reason": finish_of(own.get("finish_reason")),
        "sampling": sampling_of(own.get("sampling")),
        "agent": own.get("agent"),
        "started_at": own.get("started_at"),
        "duration_s": own.get("duration_s"),
        "rewards": {name: value for name, value in (own.get("rewards") or {}).items() if value is not None},
    }
    if fields["finish_reason"] == "stop" and own.get("tool_call_ids"):
        fields["finish_reason"] = "tool_calls"
    return {name: value for name, value in fields.items() if value not in (None, {})}


def own_ending(trace_id: str, own: Mapping[str, Any]) -> Ending:
    task = dict_of(own.get("task"))
    rewards = {**(own.get("rewards") or {}), **(own.get("reported") or {})}
    return Ending(
        trace_id=trace_id,
        input=task.get("input"),
        output=own.get("output"),
        error=own.get("error"),
        reward=own.get("reward"),
        rewards={name: value for name, value in rewards.items() if value is not None},
    )
