"""Rollouts of others, written to a store whole or not at all, and read from it again: calls with tokens as transitions
of the policy `foreign`, which is never trained, and every call as it was asked and answered.

a call     ─► OtherCall "forwarded": request {"messages", "tools", …}, answer {"id", "choices": […]}
  rl-safe  ─► and a Transition of the same id, off-policy: `trainable` is false
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from sqlalchemy import update

from lightningrl.records import Score
from lightningrl.sanitize import finite
from lightningrl.types import (
    FinishReason,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutSpec,
    SamplingSettings,
    Task,
    ToolCall,
    Trajectory,
    Transition,
)
from lightningrl_runs.foreign import dict_of
from lightningrl_runs.queries.rollout_rows import IMPORT
from lightningrl_server.records import DIALOGUE, AttemptEnd, CallRecord, ToolCallRecord
from lightningrl_server.store.call_log import append_calls
from lightningrl_server.store.queue_writes import create_rollouts, finish, lease
from lightningrl_server.store.sql import SqlStore
from lightningrl_server.store.tables import attempts, rollouts
from lightningrl_server.store.transaction import Transaction
from lightningrl_server.store.writer import writing
from lightningrl_traces.grades import Grade, GradedCall
from lightningrl_traces.joins import ForeignRollout
from lightningrl_traces.records import Message, ToolRun

__all__ = ["FOREIGN", "StoredCall", "TraceStore", "read_calls", "score_of"]

FOREIGN: Final = "foreign"
"""Policy of imported calls: nobody trains it."""
_FOREVER: Final = 1e12


def _add(tx: Transaction, batch: Sequence[tuple[ForeignRollout, Sequence[GradedCall]]]) -> None:
    for rollout, graded in batch:
        spec = RolloutSpec(id=rollout.id, task=_task(rollout), group_id=rollout.id)
        if not create_rollouts(tx, [spec]):
            continue  # kept before a kill
        lease(tx, IMPORT, b"", _FOREVER, tx.now, exclusive=False)
        # one call each time: a row of tokens is only as wide as its own
        for record in _call_records(rollout.id, graded):
            append_calls(tx, [record])
        finish(tx, rollout.id, 1, _end(rollout, graded))
        began, ended = _times(rollout)
        row = tx.attempt(rollout.id, 1)
        if began:
            of_attempt = update(attempts).where(attempts.c.pk == row.pk)
            tx.db.execute(of_attempt.values(started_at=began, ended_at=ended))
            tx.db.execute(update(rollouts).where(rollouts.c.pk == row.rollout_pk).values(created_at=began))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCall:
    """A call as it was asked and answered, an imported one masked."""

    id: str
    """Same as `call_id` in `grades.jsonl`."""
    grade: Grade
    model: str
    agent: str | None
    messages: list[Message]
    """Messages of the prompt."""
    tools: list[dict[str, Any]] | None
    """None = nobody said what was offered."""
    answer: Message | None
    finish_reason: str | None


def read_calls(trajectory: Trajectory) -> Iterator[StoredCall]:
    """Read the calls of an imported rollout, in order; none of a rollout that was not imported."""
    for other in trajectory.other_calls:
        answer, request = dict_of(other.answer), dict_of(other.request)
        if other.kind is not OtherCallKind.FORWARDED or "grade" not in answer:
            continue
        choice = dict_of(next(iter(answer.get("choices") or ()), None))
        yield StoredCall(
            id=str(answer.get("id")),
            grade=Grade(answer["grade"]),
            model=other.model,
            agent=other.agent,
            messages=request.get("messages") or [],
            tools=request.get("tools"),
            answer=choice.get("message"),
            finish_reason=choice.get("finish_reason"),
        )


class TraceStore(SqlStore):
    """A store that takes whole rollouts of others."""

    add_rollouts = writing(_add)


def score_of(rollout: ForeignRollout, name: str | None, *, is_asked: bool) -> Score | None:
    """A rollout's score of a name as its reward: of the whole, else of its last call that has one. A reward that the
    trace itself tells of counts unless a name `is_asked` for. None where there is neither reward nor score."""
    ending = rollout.ending
    rewards = {key: finite(value) for key, value in ending.rewards.items()}
    of_calls = {key: value for call in rollout.calls for key, value in call.rewards.items()}
    reward = None if is_asked else ending.reward
    if reward is None and name is not None:
        reward = ending.rewards.get(name, of_calls.get(name))
    if reward is None and not rewards:
        return None
    return Score(rollout_id=rollout.id, attempt=1, rewards=rewards, reward=None if reward is None else finite(reward))


def _task(rollout: ForeignRollout) -> Task:
    given = rollout.ending.input
    if given is None:
        messages = rollout.calls[0].messages or []
        given = next((message.get("content") for message in messages if message["role"] == "user"), None)
    return Task(id=rollout.id, input=given if given is not None else "", metadata={"source": "traces"})


def _call_records(rollout_id: str, graded: Sequence[GradedCall]) -> list[CallRecord]:
    records: list[CallRecord] = []
    ends: dict[int, dict[bytes, str]] = {}
    """The latest call whose tokens have a digest, by their count."""
    for item in graded:
        if item.grade is not Grade.RL:
            continue
        call = item.call
        assert call.prompt_ids is not None and call.completion_ids is not None and call.logprobs is not None
        prompt = np.asarray(call.prompt_ids, np.int32)
        transition = Transition(
            id=call.id,
            policy=FOREIGN,
            policy_version=call.version or 0,
            prompt_ids=prompt,
            completion_ids=np.asarray(call.completion_ids, np.int32),
            logprobs=np.asarray(call.logprobs, np.float32),
            finish_reason=FinishReason.LENGTH if call.finish_reason == "length" else FinishReason.STOP,
            sampling=_sampling(call.sampling),
            agent=call.agent,
            span_id=call.id,
            parent_id=_parent(ends, prompt),
            tool_call_ids=tuple(request["id"] for request in (call.answer or {}).get("tool_calls") or ()),
            trainable=False,
            started_at=call.started_at,
            duration_s=call.duration_s,
        )
        records.append(CallRecord(rollout_id=rollout_id, attempt=1, call_key=call.id, transition=transition))
        tokens = np.concatenate([prompt, transition.completion_ids])
        ends.setdefault(len(tokens), {})[blake2b(tokens.tobytes()).digest()] = call.id
    return records


def _parent(ends: Mapping[int, Mapping[bytes, str]], prompt: np.ndarray[Any, np.dtype[np.int32]]) -> str | None:
    """Return the call with the most tokens among those whose tokens begin a prompt."""
    digest, at, parent = blake2b(), 0, None
    for length in sorted(ends):
        if length > len(prompt):
            break
        digest.update(prompt[at:length].tobytes())
        at, parent = length, ends[length].get(digest.copy().digest(), parent)
    return parent


def _sampling(settings: Mapping[str, Any]) -> SamplingSettings:
    default = SamplingSettings()
    seed = settings.get("seed")
    return SamplingSettings(
        temperature=float(settings.get("temperature", default.temperature)),
        top_p=float(settings.get("top_p", default.top_p)),
        top_k=int(settings.get("top_k", default.top_k)),
        max_tokens=int(settings.get("max_tokens", default.max_tokens)),
        seed=None if seed is None else int(seed),
    )


def _end(rollout: ForeignRollout, graded: Sequence[GradedCall]) -> AttemptEnd:
    began, ended = _times(rollout)
    ending = rollout.ending
    rl_ids = {item.call.id for item in graded if item.grade is Grade.RL}
    rewards: dict[str | None, Mapping[str, float | None]] = {None: dict(ending.rewards)} if ending.rewards else {}
    rewards |= {call.id: dict(call.rewards) for call in rollout.calls if call.rewards and call.id in rl_ids}
    return AttemptEnd(
        outcome=Outcome.SUCCEEDED if ending.error is None else Outcome.AGENT_ERROR,
        output=ending.output,
        error=ending.error,
        duration_s=max(0.0, ended - began),
        tool_calls=[_tool(tool) for tool in rollout.tools],
        other_calls=[_other_call(item) for item in graded],
        rewards=rewards,
    )


def _tool(tool: ToolRun) -> ToolCallRecord:
    call = ToolCall(
        id=tool.id,
        name=tool.name,
        arguments=tool.arguments,
        result=tool.result,
        status=tool.status,
        duration_s=tool.duration_s,
        agent=tool.agent,
        error_type=tool.error_type,
    )
    span_id = tool.span_id or f"{DIALOGUE}{tool.id}"
    return ToolCallRecord(tool_call=call, span_id=span_id, parent_span_id=tool.parent_id, started_at=tool.started_at)


def _other_call(item: GradedCall) -> OtherCall:
    call = item.call
    request = {"messages": call.messages or [], "tools": call.tools, **call.sampling}
    choice = {"index": 0, "message": call.answer, "finish_reason": call.finish_reason}
    return OtherCall(
        kind=OtherCallKind.FORWARDED,
        path="chat/completions",
        model=call.model,
        agent=call.agent,
        status=200 if call.error is None else None,
        code=None if call.error is None else "error",
        message=call.error or "",
        request=request,
        answer={"id": call.id, "grade": item.grade.value, "choices": [choice]},
        started_at=call.started_at,
        duration_s=call.duration_s,
    )


def _times(rollout: ForeignRollout) -> tuple[float, float]:
    """When the first call began and the last ended; 0.0 where no call says."""
    timed = [call for call in rollout.calls if call.started_at]
    if not timed:
        return 0.0, 0.0
    return min(call.started_at for call in timed), max(call.started_at + call.duration_s for call in timed)
