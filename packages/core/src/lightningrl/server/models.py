"""Bodies of the control API: what is checked where bytes come in, and what OpenAPI shows."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Base64Bytes, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from lightningrl.types import Outcome, RolloutMode, RolloutSpec, RolloutState, SamplingSettings, ToolStatus

__all__ = [
    "LARGEST",
    "AttemptView",
    "CancelBody",
    "CountAnswer",
    "CreateAnswer",
    "CreateBody",
    "HeartbeatAnswer",
    "HeartbeatBody",
    "InterruptBody",
    "LeaseAnswer",
    "LeaseBody",
    "LeasedTask",
    "PolicyView",
    "ReportedRewardsBody",
    "ReportedToolCall",
    "ReportedToolCallsBody",
    "ResultAnswer",
    "ResultBody",
    "RetryBody",
    "RewardsBody",
    "RolloutIdsBody",
    "RolloutView",
    "ScoreBody",
    "ScoresBody",
    "StatusAnswer",
    "StepBody",
    "StepView",
    "WaitAnswer",
    "WaitBody",
]

LARGEST: Final = 2**31 - 1
"""Of step and attempt numbers, offsets and counts."""
MOST_FIELDS: Final = 100
MOST_NAMES: Final = 1000
"""Rewards in one report."""

_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def _rollout_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise ValueError(f"rollout id {value[:80]!r} must be 1 to 200 of A-Z a-z 0-9 . _ : -")
    return value


def _spec(spec: RolloutSpec) -> RolloutSpec:
    _rollout_id(spec.id)
    if not 1 <= spec.max_attempts <= LARGEST or not 0 < spec.timeout_s < math.inf:
        raise ValueError(f"rollout {spec.id!r} needs max_attempts ≥ 1 and timeout_s > 0")
    if abs(spec.step) > LARGEST:
        raise ValueError(f"rollout {spec.id!r} is of step {spec.step}; number steps up to {LARGEST}")
    return spec


Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
"""A reward: gradients are in float32."""
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e9)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


def _check_fields(value: Any) -> Any:
    """Of one object, or of a list of them: each unknown field would be an error of its own, and a body may have very many."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and len(item) > MOST_FIELDS:
            raise ValueError(f"an object has {len(item)} fields, more than there are")
    return value


Items = (FailFast(), BeforeValidator(_check_fields))
"""Of a list of objects: the first that is wrong says so for all."""


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Body(_Item):
    _check_fields = model_validator(mode="before")(_check_fields)


class CreateBody(_Body):
    rollouts: Annotated[list[Annotated[RolloutSpec, AfterValidator(_spec)]], *Items] = Field(max_length=100_000)


class CreateAnswer(BaseModel):
    created: int
    """How many are new."""


class CountAnswer(BaseModel):
    count: int


class LeaseBody(_Body):
    worker_id: str = Field(max_length=200)
    wait_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    lease_s: float = Field(default=60.0, gt=0, le=86_400)
    exclusive: bool = False
    """The worker runs one attempt at a time: an earlier one of the same `worker_id` is queued again, uncharged."""


class LeasedTask(BaseModel):
    """The task as the agent may see it: without its answer."""

    id: str
    input: Any
    metadata: dict[str, Any]


class LeaseAnswer(BaseModel):
    rollout_id: str
    attempt: int
    task: LeasedTask
    mode: RolloutMode
    timeout_s: float
    key: str
    base_path: str
    expires_at: float


class HeartbeatBody(_Body):
    lease_s: float = Field(default=60.0, gt=0, le=86_400)


class HeartbeatAnswer(BaseModel):
    continue_: bool = Field(serialization_alias="continue")


class ResultBody(_Body):
    outcome: Outcome
    output: Any = None
    error: str | None = None
    duration_s: Seconds = 0.0


class ResultAnswer(BaseModel):
    state: RolloutState


class RewardsBody(_Body):
    rewards: dict[Name, Number | None] = Field(max_length=MOST_NAMES)
    transition_id: str | None = None


class ReportedRewardsBody(_Body):
    """Of the agent's own."""

    rewards: dict[Name, Number | None] = Field(max_length=MOST_NAMES)
    """By name; null = nobody scored it."""
    call: str | None = Field(default=None, max_length=300)
    """Id of the answer that they are of (`chatcmpl-…`, `resp_…`, `msg_…`); null = of the rollout."""


class ReportedToolCall(_Item):
    """One invocation of a tool, as the agent tells it."""

    name: Name
    status: ToolStatus
    arguments: Any = None
    """A text, or any JSON."""
    result: Any = None
    """A text, or any JSON."""
    duration_s: Seconds = 0.0
    tool_call_id: str | None = Field(default=None, min_length=1, max_length=200)
    """The model's, which says what call asked; or one of the agent's own. A repeat is kept once."""
    call: str | None = Field(default=None, max_length=300)
    """Id of the answer that asked, where that was no tool call of the model's."""
    agent: str | None = Field(default=None, max_length=200)
    error_type: str | None = Field(default=None, max_length=200)


class ReportedToolCallsBody(_Body):
    tool_calls: Annotated[list[ReportedToolCall], *Items] = Field(max_length=10_000)


class WaitBody(_Body):
    rollout_ids: Annotated[list[str], FailFast()]
    wait_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    min_finished: int | None = Field(default=None, ge=0, le=LARGEST)


class WaitAnswer(BaseModel):
    finished: list[str]


class RolloutIdsBody(_Body):
    rollout_ids: Annotated[list[str], FailFast()]


class CancelBody(RolloutIdsBody):
    pass


class RetryBody(RolloutIdsBody):
    timeout_s: float = Field(gt=0)


class InterruptBody(_Body):
    reason: str = Field(max_length=1000)


class ScoreBody(_Item):
    rollout_id: str
    attempt: int = Field(ge=1, le=LARGEST)
    rewards: dict[str, float | None] = {}
    reward: float | None = None
    transition_rewards: dict[str, dict[str, float | None]] = {}
    advantages: dict[str, Base64Bytes | None] = {}
    """By transition id; little-endian float32 per completion token."""


class ScoresBody(_Body):
    scores: Annotated[list[ScoreBody], *Items]


class StepBody(_Body):
    step: int = Field(ge=0, le=LARGEST)
    rollout_ids: Annotated[list[str], FailFast()]
    metrics: dict[str, float | None] = {}


class StepView(BaseModel):
    step: int
    rollout_ids: Annotated[list[str], FailFast()]
    metrics: dict[str, float | None]
    at: float


class AttemptView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    attempt: int
    worker_id: str
    outcome: Outcome | None
    started_at: float
    ended_at: float | None
    duration_s: float
    output: Any
    error: str | None
    calls: int


class RolloutView(BaseModel):
    id: str
    group_id: str
    task_id: str
    mode: RolloutMode
    step: int
    sampling: SamplingSettings | None
    state: RolloutState
    outcome: Outcome | None
    attempts: list[AttemptView]
    reward: float | None
    trained_step: int | None
    created_at: float


class PolicyView(BaseModel):
    policy: str
    version: int | None
    connected: int
    held: bool
    in_flight: int


class StatusAnswer(BaseModel):
    states: dict[RolloutState, int]
    outcomes: dict[Outcome, int]
    attempts: int
    calls: int
    breaks: int
    late: int
    policies: list[PolicyView]
    spans_forwarded: int | None = None
    """That the user's collector took; null = none is configured."""
    spans_not_forwarded: int | None = None
    longest_pause_s: float | None = None
    """For which the server's event loop stood still, since its start."""
    memory_bytes: int | None = None
    """Resident, of the server's process."""
