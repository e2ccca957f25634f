"""Every endpoint of the control API, with the body it takes and the answer it gives. The frozen types are the wire.

endpoint = Endpoint(method, path, body, answer, who, summary)
    server    route(endpoint, handler)          checks the key, reads the body, writes the answer
    clients   client.ask(endpoint, body)        writes the body, reads the answer, patient while the server restarts
    OpenAPI   describe(ENDPOINTS)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from lightningrl.store.protocol import Lease, RolloutFilter, RolloutRecord, Score, StepRecord, StoreCounts
from lightningrl.types import Outcome, PolicyStatus, RolloutSpec, RolloutState, ToolStatus, Trajectory

__all__ = [
    "CANCEL",
    "CREATE",
    "ENDPOINTS",
    "HEARTBEAT",
    "INTERRUPT",
    "LARGEST",
    "LEASE",
    "LIST",
    "PREFIX",
    "REPORT_REWARDS",
    "REPORT_TOOL_CALLS",
    "RESULT",
    "RETRY",
    "REWARDS",
    "ROLLBACK",
    "ROLLOUT",
    "SCORES",
    "STATUS",
    "STEP",
    "STEPS",
    "TRACES",
    "TRAJECTORIES",
    "WAIT",
    "Cancel",
    "Count",
    "Create",
    "Created",
    "Endpoint",
    "Finished",
    "Heartbeat",
    "Interrupt",
    "LeaseRequest",
    "ReportedRewards",
    "ReportedToolCall",
    "ReportedToolCalls",
    "Result",
    "ResultKept",
    "Retry",
    "Rewards",
    "Rollback",
    "RolloutIds",
    "Scores",
    "Status",
    "Step",
    "StillOurs",
    "Wait",
]

PREFIX: Final = "/api/v1"
LARGEST: Final = 2**31 - 1
"""Of step and attempt numbers, offsets and counts."""
MOST_NAMES: Final = 1000
"""Rewards in one report."""

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Number = Annotated[Any, Meta(extra_json_schema={"type": ["number", "null"], "minimum": -1e9, "maximum": 1e9})]
"""A reward, null = nobody scored it; checked by `_check_rewards`, which can say which."""
NamedRewards = Annotated[dict[Name, Number], Meta(max_length=MOST_NAMES)]
AnswerId = Annotated[str, Meta(max_length=300)]
"""Of an answer that the attempt was given (`chatcmpl-…`, `resp_…`, `msg_…`)."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Create(_Body):
    rollouts: Annotated[Sequence[RolloutSpec], Meta(max_length=100_000)]


class Created(_Body):
    created: int
    """How many are new."""


class Count(_Body):
    count: int


class LeaseRequest(_Body):
    worker_id: Annotated[str, Meta(max_length=200)]
    wait_s: Seconds = 0.0
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    exclusive: bool = False
    """The worker runs one attempt at a time: an earlier one of the same `worker_id` is queued again, uncharged."""


class Heartbeat(_Body):
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


class StillOurs(_Body, rename={"is_ours": "continue"}):
    is_ours: bool
    """False = the attempt is over: stop working on it."""


class Result(_Body):
    outcome: Outcome
    output: Any = None
    error: str | None = None
    duration_s: Seconds = 0.0
    unseen_hosts: Annotated[Sequence[Annotated[str, Meta(max_length=300)]], Meta(max_length=100)] = ()
    """Where the agent called models past the gateway."""


class ResultKept(_Body):
    state: RolloutState


class Rewards(_Body):
    rewards: NamedRewards
    transition_id: str | None = None

    def __post_init__(self) -> None:
        _check_rewards(self.rewards)


class ReportedRewards(_Body):
    """Of the agent's own."""

    rewards: NamedRewards
    call: AnswerId | None = None
    """Of the answer that they are of; null = of the rollout."""

    def __post_init__(self) -> None:
        _check_rewards(self.rewards)


class ReportedToolCall(_Body):
    """One invocation of a tool, as the agent tells it."""

    name: Name
    status: Annotated[str, Meta(extra_json_schema={"enum": [status.value for status in ToolStatus]})]
    arguments: Any = None
    """A text, or any JSON."""
    result: Any = None
    """A text, or any JSON."""
    duration_s: Seconds = 0.0
    tool_call_id: Name | None = None
    """The model's, which says what call asked; or one of the agent's own. A repeat is kept once."""
    call: AnswerId | None = None
    """Of the answer that asked, where that was no tool call of the model's."""
    agent: Annotated[str, Meta(max_length=200)] | None = None
    error_type: Annotated[str, Meta(max_length=200)] | None = None

    def __post_init__(self) -> None:
        ToolStatus(self.status)  # says which there are


class ReportedToolCalls(_Body):
    tool_calls: Annotated[Sequence[ReportedToolCall], Meta(max_length=10_000)]


class Wait(_Body):
    rollout_ids: Sequence[str]
    wait_s: Seconds = 0.0
    min_finished: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None


class Finished(_Body):
    finished: Sequence[str]


class RolloutIds(_Body):
    rollout_ids: Sequence[str]


class Cancel(RolloutIds):
    pass


class Retry(RolloutIds):
    timeout_s: Positive


class Interrupt(_Body):
    reason: Annotated[str, Meta(max_length=1000)]


class Scores(_Body):
    scores: Sequence[Score]


class Step(_Body):
    step: Annotated[int, Meta(ge=0, le=LARGEST)]
    rollout_ids: Sequence[str]
    metrics: Mapping[str, float | None] = {}


class Rollback(_Body):
    after: Annotated[int, Meta(ge=-1, le=LARGEST)]


class Status(_Body, omit_defaults=False):
    counts: StoreCounts
    policies: Sequence[PolicyStatus]
    spans_forwarded: int | None = None
    """That the user's collector took; null = none is configured."""
    spans_not_forwarded: int | None = None
    longest_pause_s: float | None = None
    """For which the server's event loop stood still, since its start."""
    memory_bytes: int | None = None
    """Resident, of the server's process."""


def _check_rewards(rewards: Mapping[str, Any]) -> None:
    """Raises ValueError naming the one that is no number of which gradients in float32 can be made."""
    for name, value in rewards.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and -1e9 <= value <= 1e9):
            raise ValueError(f"reward {name!r} is {str(value)[:80]!r}; send a number from -1e9 to 1e9, or null")


B = TypeVar("B")
A = TypeVar("A")
Who = Literal["run", "worker", "attempt", "ended_attempt"]
"""Whose key opens it: the run's; a worker's too; also that of the running attempt in the path; also of one that has ended."""


@dataclass(frozen=True)
class Endpoint(Generic[B, A]):
    """One thing that the server can be asked. `body` is read from the query where the method is GET or DELETE."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: Any
    """Type B; None = nothing is sent."""
    answer: Any
    """Type A; None = nothing is answered (204)."""
    who: Who
    summary: str
    about: str = ""


_ATTEMPT: Final = f"{PREFIX}/rollouts/{{rid}}/attempts/{{n}}"
_AGENT: Final = "/rollouts/{rid}/attempts/{n}/v1"

CREATE: Final = Endpoint[Create, Created](
    "POST",
    f"{PREFIX}/rollouts",
    Create,
    Created,
    "run",
    "Order rollouts",
    "Queued in this order. Ids are the caller's: an id known with the same task is skipped, with another refused (409).",
)
LIST: Final = Endpoint[RolloutFilter, Sequence[RolloutRecord]](
    "GET", f"{PREFIX}/rollouts", RolloutFilter, list[RolloutRecord], "run", "List rollouts, newest first"
)
ROLLOUT: Final = Endpoint[None, RolloutRecord](
    "GET", f"{PREFIX}/rollouts/{{rid}}", None, RolloutRecord, "run", "One rollout with its attempts"
)
WAIT: Final = Endpoint[Wait, Finished](
    "POST",
    f"{PREFIX}/wait",
    Wait,
    Finished,
    "run",
    "Wait until rollouts have finished (long poll)",
    "All finished ones of `rollout_ids`, as soon as there are `min_finished` (null = all) or `wait_s` is over.",
)
TRAJECTORIES: Final = Endpoint[RolloutIds, Sequence[Trajectory]](
    "POST",
    f"{PREFIX}/trajectories",
    RolloutIds,
    list[Trajectory],
    "run",
    "Fetch trajectories of finished rollouts",
    "In the order asked. Token arrays are base64 of little-endian int32, logprobs float32; where a transition has a `parent_id`, its "
    "`prompt_ids` are what it adds to the prompt and completion of that one.",
)
SCORES: Final = Endpoint[Scores, None]("POST", f"{PREFIX}/scores", Scores, None, "run", "Keep rewards and advantages of finished attempts")
STEP: Final = Endpoint[Step, None](
    "POST",
    f"{PREFIX}/steps",
    Step,
    None,
    "run",
    "Record a training step; its rollouts count as trained",
    "A rollout is trained once: 409 otherwise. Repeating the same step is acknowledged.",
)
STEPS: Final = Endpoint[None, Sequence[StepRecord]]("GET", f"{PREFIX}/steps", None, list[StepRecord], "run", "List training steps")
ROLLBACK: Final = Endpoint[Rollback, Count](
    "DELETE",
    f"{PREFIX}/steps",
    Rollback,
    Count,
    "run",
    "Forget steps after a checkpoint",
    "Steps later than `after` never happened; their rollouts may be trained again.",
)
CANCEL: Final = Endpoint[Cancel, Count](
    "POST",
    f"{PREFIX}/cancel",
    Cancel,
    Count,
    "run",
    "Cancel rollouts",
    "Those not finished end as `cancelled`; their workers are told by the next heartbeat.",
)
RETRY: Final = Endpoint[Retry, Count](
    "POST",
    f"{PREFIX}/retry",
    Retry,
    Count,
    "run",
    "Run failed rollouts again",
    "Those that failed are queued again, with as many attempts as at first: their agent was mended. Others stay.",
)
INTERRUPT: Final = Endpoint[Interrupt, Count](
    "POST",
    f"{PREFIX}/interrupt",
    Interrupt,
    Count,
    "run",
    "Queue all running attempts again",
    "For a restarted run whose workers are gone: running attempts end uncharged.",
)
STATUS: Final = Endpoint[None, Status]("GET", f"{PREFIX}/status", None, Status, "run", "Totals, and how policies are served")
LEASE: Final = Endpoint[LeaseRequest, Lease | None](
    "POST",
    f"{PREFIX}/leases",
    LeaseRequest,
    Lease | None,
    "worker",
    "Lease the next attempt (worker key or run key; long poll)",
    "The oldest queued rollout's next attempt, with its scoped key; 204 where none comes within `wait_s`.",
)
HEARTBEAT: Final = Endpoint[Heartbeat, StillOurs](
    "POST", f"{_ATTEMPT}/heartbeat", Heartbeat, StillOurs, "ended_attempt", "Keep the lease (attempt, worker or run key)"
)
RESULT: Final = Endpoint[Result, ResultKept](
    "POST",
    f"{_ATTEMPT}/result",
    Result,
    ResultKept,
    "ended_attempt",
    "End the attempt (attempt, worker or run key)",
    "The first result counts; the same outcome again is acknowledged, another is refused (409).",
)
REWARDS: Final = Endpoint[Rewards, None](
    "POST",
    f"{_ATTEMPT}/rewards",
    Rewards,
    None,
    "attempt",
    "Add rewards by name (attempt, worker or run key)",
    "Of the attempt, or of one transition; null = nobody scored it.",
)
TRACES: Final = Endpoint[bytes, bytes](
    "POST",
    f"{_ATTEMPT}/v1/traces",
    bytes,
    bytes,
    "attempt",
    "Export spans: OTLP over HTTP, protobuf or JSON, plain or gzip (attempt, worker or run key)",
    "Spans of tools become tool calls. Repeating an export adds nothing; spans without an id are told of as a partial success.",
)
REPORT_REWARDS: Final = Endpoint[ReportedRewards, None](
    "POST",
    f"{_AGENT}/rewards",
    ReportedRewards,
    None,
    "attempt",
    "Report rewards by name (the attempt's key)",
    "Of the rollout, or of the model call whose answer has the id `call`. The last value of a name stands.",
)
REPORT_TOOL_CALLS: Final = Endpoint[ReportedToolCalls, None](
    "POST",
    f"{_AGENT}/tool_calls",
    ReportedToolCalls,
    None,
    "attempt",
    "Report tool calls and their outcomes (the attempt's key)",
    "A repeated `tool_call_id` is kept once.",
)

ENDPOINTS: Final[Sequence[Endpoint[Any, Any]]] = (
    REPORT_REWARDS,
    REPORT_TOOL_CALLS,
    LEASE,
    HEARTBEAT,
    RESULT,
    REWARDS,
    TRACES,
    CREATE,
    LIST,
    ROLLOUT,
    WAIT,
    TRAJECTORIES,
    SCORES,
    STEP,
    STEPS,
    ROLLBACK,
    CANCEL,
    RETRY,
    INTERRUPT,
    STATUS,
)
