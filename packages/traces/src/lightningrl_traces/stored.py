"""Imported calls, read from a trajectory of the run that an import made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightningrl.types import OtherCallKind, Trajectory
from lightningrl_traces.grades import Grade
from lightningrl_traces.records import Message

__all__ = ["StoredCall", "read_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCall:
    """An imported call, masked: a row of messages and tools for tuning, where its grade says so."""

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
        answer = other.answer
        if other.kind is not OtherCallKind.FORWARDED or not isinstance(answer, dict) or "grade" not in answer:
            continue
        choice = answer["choices"][0]
        yield StoredCall(
            id=answer["id"],
            grade=Grade(answer["grade"]),
            model=other.model,
            agent=other.agent,
            messages=other.request["messages"],
            tools=other.request["tools"],
            answer=choice["message"],
            finish_reason=choice["finish_reason"],
        )
