"""Trajectories and scores as they travel: JSON, token arrays as base64 of little-endian int32 or float32.

A transition carries what its prompt adds to its parent's tokens, so a long history travels once; the client puts it together.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from lightningrl.store.tokens import assemble
from lightningrl.types import FinishReason, SamplingSettings, Task, ToolCall, Trajectory, Transition
from lightningrl.types import Outcome as _Outcome
from lightningrl.types import RolloutMode as _RolloutMode

__all__ = ["decode_trajectories", "encode_trajectories"]


class _Call(msgspec.Struct, omit_defaults=True):
    id: str
    policy: str
    policy_version: int
    suffix_ids: bytes
    completion_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    sampling: SamplingSettings
    agent: str | None = None
    span_id: str | None = None
    parent: int | None = None
    """Position of the parent transition."""
    is_break: bool = False
    tool_call_ids: tuple[str, ...] = ()
    rewards: dict[str, float | None] = {}
    trainable: bool = True
    started_at: float = 0.0
    duration_s: float = 0.0


class _Trajectory(msgspec.Struct, omit_defaults=True):
    rollout_id: str
    attempt: int
    task: Task
    group_id: str
    outcome: _Outcome
    transitions: list[_Call]
    tool_calls: list[ToolCall]
    output: Any = None
    error: str | None = None
    rewards: dict[str, float | None] = {}
    reward: float | None = None
    mode: _RolloutMode = _RolloutMode.TRAIN
    step: int = 0
    duration_s: float = 0.0


class _Answer(msgspec.Struct):
    trajectories: list[_Trajectory]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Answer)


def encode_trajectories(trajectories: tuple[Trajectory, ...]) -> bytes:
    """`{"trajectories": […]}`"""
    return _encoder.encode(_Answer([_pack(trajectory) for trajectory in trajectories]))


def decode_trajectories(data: bytes) -> tuple[Trajectory, ...]:
    """What `encode_trajectories` wrote. Raises msgspec.ValidationError."""
    return tuple(_unpack(trajectory) for trajectory in _decoder.decode(data).trajectories)


def _pack(trajectory: Trajectory) -> _Trajectory:
    ends = {one.id: (position, len(one.prompt_ids) + len(one.completion_ids)) for position, one in enumerate(trajectory.transitions)}
    calls = []
    for one in trajectory.transitions:
        parent, shared = (None, 0) if one.parent_id is None else ends[one.parent_id]
        calls.append(
            _Call(
                id=one.id,
                policy=one.policy,
                policy_version=one.policy_version,
                suffix_ids=one.prompt_ids[shared:].astype("<i4", copy=False).tobytes(),
                completion_ids=one.completion_ids.astype("<i4", copy=False).tobytes(),
                logprobs=one.logprobs.astype("<f4", copy=False).tobytes(),
                finish_reason=one.finish_reason,
                sampling=one.sampling,
                agent=one.agent,
                span_id=one.span_id,
                parent=parent,
                is_break=one.is_break,
                tool_call_ids=one.tool_call_ids,
                rewards=dict(one.rewards),
                trainable=one.trainable,
                started_at=one.started_at,
                duration_s=one.duration_s,
            )
        )
    return _Trajectory(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        task=trajectory.task,
        group_id=trajectory.group_id,
        outcome=trajectory.outcome,
        transitions=calls,
        tool_calls=list(trajectory.tool_calls),
        output=trajectory.output,
        error=trajectory.error,
        rewards=dict(trajectory.rewards),
        reward=trajectory.reward,
        mode=trajectory.mode,
        step=trajectory.step,
        duration_s=trajectory.duration_s,
    )


def _unpack(trajectory: _Trajectory) -> Trajectory:
    calls = trajectory.transitions
    tokens = assemble((one.parent, np.frombuffer(one.suffix_ids, "<i4"), np.frombuffer(one.completion_ids, "<i4")) for one in calls)
    transitions = tuple(
        Transition(
            id=one.id,
            index=index,
            policy=one.policy,
            policy_version=one.policy_version,
            prompt_ids=tokens[index][0],
            completion_ids=tokens[index][1],
            logprobs=np.frombuffer(one.logprobs, "<f4"),
            finish_reason=one.finish_reason,
            sampling=one.sampling,
            agent=one.agent,
            span_id=one.span_id,
            parent_id=None if one.parent is None else calls[one.parent].id,
            is_break=one.is_break,
            tool_call_ids=one.tool_call_ids,
            rewards=one.rewards,
            trainable=one.trainable,
            started_at=one.started_at,
            duration_s=one.duration_s,
        )
        for index, one in enumerate(calls)
    )
    return Trajectory(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        task=trajectory.task,
        group_id=trajectory.group_id,
        outcome=trajectory.outcome,
        transitions=transitions,
        tool_calls=tuple(trajectory.tool_calls),
        output=trajectory.output,
        error=trajectory.error,
        rewards=trajectory.rewards,
        reward=trajectory.reward,
        mode=trajectory.mode,
        step=trajectory.step,
        duration_s=trajectory.duration_s,
    )
