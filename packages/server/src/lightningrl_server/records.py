"""The records that a store keeps of an attempt, between the gateway and the trainer.

AttemptInfo, CallRecord, ToolCallRecord, SpanRecord ─► AttemptEnd
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightningrl.types import BranchPoint, OtherCall, Outcome, RolloutMode, SamplingSettings, ToolCall, Transition

__all__ = ["DIALOGUE", "AttemptEnd", "AttemptInfo", "CallRecord", "SpanRecord", "ToolCallRecord"]

DIALOGUE = "dialogue:"
"""Prefix of a `ToolCallRecord.span_id` that only the dialogue shows; the tool call's id follows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptInfo:
    """A running attempt: what a scoped key stands for."""

    rollout_id: str
    attempt: int
    mode: RolloutMode
    step: int
    sampling: SamplingSettings | None
    """The rollout's overrides; None = the policy's defaults."""
    timeout_s: float
    branch: BranchPoint | None = None
    calls: int = 0
    """Least number of its recorded calls; the exact number where other servers record them too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallRecord:
    """One recorded model call: what training needs, and what the gateway needs to continue it or to answer a retry."""

    rollout_id: str
    attempt: int
    call_key: str
    """The same for every retry of one logical call; unique within the attempt. With `n>1`, one key per choice."""
    transition: Transition
    """Its `parent_id` is a call of the same attempt whose prompt and completion begin its prompt; the store keeps these
    tokens once. The store gives `index`; `rewards` come by `add_rewards`."""
    history_key: str | None = None
    """Digest of the messages up to and including the answer, for finding a later call's parent. Opaque."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallRecord:
    """A tool call with its place in the trace. Where `tool_call.transition_id` is None, reading resolves it by the
    model's tool-call id, else by the parent span."""

    tool_call: ToolCall
    span_id: str | None = None
    """Unique within the attempt; a repeated export is kept once."""
    parent_span_id: str | None = None
    started_at: float = 0.0

    @property
    def is_of_dialogue(self) -> bool:
        """True if only a call's answer and a later request show it; a report of the same tool call replaces it."""
        return self.span_id is not None and self.span_id.startswith(DIALOGUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """A span that names an agent or leads to one: fills `Transition.agent` where the call itself did not say. A call
    that came without a span is looked up by its own id."""

    span_id: str
    parent_span_id: str | None = None
    agent: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttemptEnd:
    """The result of an attempt, with the reports that arrive together with it."""

    outcome: Outcome
    output: Any = None
    error: str | None = None
    duration_s: float = 0.0
    tool_calls: Sequence[ToolCallRecord] = ()
    spans: Sequence[SpanRecord] = ()
    other_calls: Sequence[OtherCall] = ()
    may_go_again: bool = True
    """False where the agent alone says that the infrastructure failed: the rollout is not queued again for it."""
    left_threads: Sequence[str] = ()
    """Names of bare threads that still ran when it was over."""
    untrained: Sequence[str] = ()
    """Keys of calls that may be other attempts'."""
    rewards: Mapping[str | None, Mapping[str, float | None]] = field(
        default_factory=dict[str | None, Mapping[str, float | None]]
    )
    """Reported rewards by transition id; None = the attempt itself."""
