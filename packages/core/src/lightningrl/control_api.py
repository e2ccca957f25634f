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

from lightningrl.call_origin import LONGEST_ROLE
from lightningrl.records import (
    Lease,
    PolicyStatus,
    RolloutFilter,
    RolloutRecord,
    RunningAttempt,
    Score,
    StepRecord,
    StoreCounts,
    WorkerRecord,
    WorkerState,
)
from lightningrl.types import Outcome, RolloutSpec, RolloutState, ToolStatus, Trajectory

PREFIX: Final = "/api/v1"
LARGEST: Final = 2**31 - 1
"""Upper bound of step and attempt numbers, offsets and counts."""
MOST_NAMES: Final = 1000
"""Rewards in one report."""

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Number = Annotated[Any, Meta(extra_json_schema={"type": ["number", "null"], "minimum": -1e9, "maximum": 1e9})]
"""A reward, null = nobody scored it; checked by `_check_rewards`, which can say which."""
NamedRewards = Annotated[dict[Name, Number], Meta(max_length=MOST_NAMES)]
AnswerId = Annotated[str, Meta(max_length=300)]
"""Id of an answer that the attempt was given (`chatcmpl-…`, `resp_…`, `msg_…`)."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Create(_Body):
    """Order rollouts. They are queued in this order. Ids are the caller's: an id known with the same task is
    skipped, with another refused (409)."""

    rollouts: Annotated[Sequence[RolloutSpec], Meta(max_length=100_000)]


class Count(_Body):
    """Number of rollouts, workers or steps that a request changed; of new ones, where it creates some."""

    count: int


class _ForWorker(_Body):
    """The next attempt, of the oldest queued rollout."""

    worker_id: Annotated[str, Meta(max_length=200)]
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


class ThenLease(_ForWorker):
    """The next attempt, asked for with the result of the one before."""

    key: Annotated[str, Meta(max_length=1000)] = ""
    """Key that may lease for this worker, as the request shows the attempt's; empty = the request's may."""


class LeaseRequest(_ForWorker):
    """Lease the next attempt (the worker's own key, worker key or run key; long poll). The oldest queued rollout's,
    with its scoped key; 204 where none comes within `wait_s`."""

    wait_s: Seconds = 0.0
    exclusive: bool = False
    """The worker runs one attempt at a time: an earlier one of the same `worker_id` is queued again, uncharged."""


class WorkerBeat(_Body):
    """Say how a worker is and keep its leases (its own key, worker key or run key; `failed` and `lost` take one of
    the last two; long poll). Answered at once where it is to stop or an attempt is over, else after `wait_s`."""

    pid: Annotated[int, Meta(ge=0, le=LARGEST)]
    host: Annotated[str, Meta(max_length=300)]
    state: WorkerState
    error: Annotated[str, Meta(max_length=4_000)] = ""
    """With `failed` and `lost`: a sentence."""
    grace_s: Seconds = 0.0
    """Time that an attempt may go on beyond its limit before the worker is to be killed."""
    running: Annotated[Sequence[tuple[str, int]], Meta(max_length=10_000)] = ()
    """Rollout and number of the attempts that it runs."""
    lease_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0
    wait_s: Seconds = 0.0


class Orders(_Body, omit_defaults=False):
    """Orders to a worker."""

    stop: bool = False
    """Finish what runs, take no more."""
    over: Sequence[tuple[str, int]] = ()
    """Attempts that are over: stop working on them."""


class WorkerPrefix(_Body):
    """Have workers finish what runs and take no more (worker key or run key): those whose id begins with `prefix`."""

    prefix: Annotated[str, Meta(max_length=200)] = ""


class WorkerFilter(WorkerPrefix):
    """List workers and what they run (worker key or run key; long poll). Those whose id begins with `prefix`, as
    soon as the list has another version than `seen`, or `wait_s` is over."""

    seen: int = 0
    wait_s: Seconds = 0.0


class Workers(_Body, omit_defaults=False):
    version: int = 0
    """Another one when a worker's state has changed."""
    workers: Sequence[WorkerRecord] = ()
    running: Sequence[RunningAttempt] = ()


class Result(_Body):
    """End the attempt (attempt, worker or run key). The first result counts; the same outcome and output again are
    acknowledged, another result is refused (409) and counted. What comes with it is kept with it or not at all."""

    outcome: Outcome
    output: Any = None
    error: str | None = None
    duration_s: Seconds = 0.0
    unseen_hosts: Annotated[Sequence[Annotated[str, Meta(max_length=300)]], Meta(max_length=100)] = ()
    """Where the agent called models past the gateway."""
    left_threads: Annotated[Sequence[Annotated[str, Meta(max_length=300)]], Meta(max_length=100)] = ()
    """Bare threads that still ran when the agent had returned, by name."""
    left_work: Annotated[Sequence[Annotated[str, Meta(max_length=300)]], Meta(max_length=100)] = ()
    """Tasks, jobs, threads, processes and programs that did, where other attempts run beside it. If one of them called
    a model, for whichever attempt, a success is an `infrastructure_error`, which is not tried again, and a failure is
    trained without these calls."""
    own_calls: Sequence[str] = ()
    """`x-lightningrl-call-id` of the calls that were made in none of them."""
    spans: bytes | None = None
    """OTLP in protobuf, as it could be exported before. Where it cannot be read, the result is not taken either."""
    then: ThenLease | None = None
    """Also lease the next attempt, with a `key` that may; with the first result only."""
    worker_key: str = ""
    """Key of the worker that ran the attempt. An `infrastructure_error` that is told with the attempt's key alone,
    which the agent has, is not tried again."""


class ResultKept(_Body):
    state: RolloutState
    lease: Lease | None = None
    """The lease that `then` asked for; null = nothing is queued, or the result is repeated."""


class Rewards(_Body):
    """Add rewards by name, of the attempt or of one transition (attempt, worker or run key); null = unscored."""

    rewards: NamedRewards
    transition_id: str | None = None

    def __post_init__(self) -> None:
        _check_rewards(self.rewards)


class ReportedRewards(_Body):
    """Report rewards by name (the attempt's key). Of the rollout, or of the model call whose answer has the id
    `call`. The last value of a name stands."""

    rewards: NamedRewards
    call: AnswerId | None = None
    """Id of the answer that they judge; null = they judge the rollout."""

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
    """Id of the answer that asked, where that was no tool call of the model's."""
    agent: Annotated[str, Meta(max_length=LONGEST_ROLE)] | None = None
    error_type: Annotated[str, Meta(max_length=200)] | None = None

    def __post_init__(self) -> None:
        ToolStatus(self.status)  # says which there are


class ReportedToolCalls(_Body):
    """Report tool calls and their outcomes (the attempt's key). A repeated `tool_call_id` is kept once, and where
    its status is another the worst stands and the contradiction is counted."""

    tool_calls: Annotated[Sequence[ReportedToolCall], Meta(max_length=10_000)]


class Wait(_Body):
    """Wait until rollouts have finished (long poll). All finished ones of `rollout_ids`, as soon as there are
    `min_finished` (null = all) or `wait_s` is over."""

    rollout_ids: Sequence[str]
    wait_s: Seconds = 0.0
    min_finished: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None


class FinishedIds(_Body):
    finished: Sequence[str]


class RolloutIds(_Body):
    """Fetch trajectories of finished rollouts, in the order asked. Token arrays are base64 of little-endian int32,
    logprobs float32; where a transition has a `parent_id`, its `prompt_ids` are what it adds to the prompt and
    completion of that one; where `offered` is `=`, it is that of the transition before."""

    rollout_ids: Sequence[str]


class Cancel(RolloutIds):
    """Cancel rollouts. Those not finished end as `cancelled`; their workers hear it with their next beat."""


class Retry(RolloutIds):
    """Run failed rollouts again. Those that failed are queued again, with as many attempts as at first: their agent
    was mended."""

    timeout_s: Positive


class Interrupt(_Body):
    """Queue all running attempts again. For a restarted run whose workers are gone: running attempts end uncharged."""

    reason: Annotated[str, Meta(max_length=1000)]


class InterruptWorkers(Interrupt):
    """Queue again what workers run (worker key or run key): those whose id begins with `prefix`, which are gone.
    Their attempts end uncharged."""

    prefix: Annotated[str, Meta(max_length=200)] = ""


class Scores(_Body):
    """Keep rewards and advantages of finished attempts."""

    scores: Sequence[Score]


class Step(_Body):
    """Record a training step; its rollouts count as trained. A rollout is trained once: 409 otherwise. Repeating the
    same step is acknowledged."""

    step: Annotated[int, Meta(ge=0, le=LARGEST)]
    rollout_ids: Sequence[str]
    metrics: Mapping[str, float | None] = {}


class Rollback(_Body):
    """Forget steps after a checkpoint. Steps later than `after` never happened; their rollouts may be trained again."""

    after: Annotated[int, Meta(ge=-1, le=LARGEST)]


class Forget(_Body):
    """Forget rollouts that have ended: those that steps up to `through` trained, and those planned for such steps
    that none did, the latter but for the last `slack` steps, which may still train them. Their steps and metrics
    stay."""

    through: Annotated[int, Meta(ge=-1, le=LARGEST)]
    slack: Annotated[int, Meta(ge=0, le=LARGEST)] = 0


class Status(_Body, omit_defaults=False):
    counts: StoreCounts
    policies: Sequence[PolicyStatus]
    spans_forwarded: int | None = None
    """Spans that the user's collector took; null = none is configured."""
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
Who = Literal["run", "supervisor", "worker", "attempt", "ended_attempt"]
"""Whose key opens it: the run's; the worker key too; also that of one worker process, for itself; the run's, the
worker key and that of the running attempt in the path; also that of one that has ended."""


@dataclass(frozen=True)
class Endpoint(Generic[B, A]):
    """One thing that the server can be asked. `body` is read from the query where the method is GET or DELETE."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: Any
    """Type B, whose docstring says what it is for; None = nothing is sent."""
    answer: Any
    """Type A; None = nothing is answered (204)."""
    who: Who = "run"
    about: str = ""
    """Where the body does not say it."""


_ATTEMPT: Final = f"{PREFIX}/rollouts/{{rid}}/attempts/{{n}}"
_AGENT: Final = "/rollouts/{rid}/attempts/{n}/v1"
_SPANS: Final = (
    "Export spans: OTLP over HTTP, protobuf or JSON, plain or gzip (attempt, worker or run key). "
    "Spans of tools become tool calls. Repeating an export adds nothing; "
    "spans without an id are told of as a partial success."
)
_LOGS: Final = (
    "Export log records: as spans are (attempt, worker or run key). "
    "Evaluations (`gen_ai.evaluation.result`) become reported rewards, the last of a name stands; "
    "other records are not kept."
)

CREATE = Endpoint[Create, Count]("POST", f"{PREFIX}/rollouts", Create, Count)
LIST = Endpoint[RolloutFilter, Sequence[RolloutRecord]](
    "GET", f"{PREFIX}/rollouts", RolloutFilter, list[RolloutRecord], about="List rollouts, newest first."
)
ROLLOUT = Endpoint[None, RolloutRecord](
    "GET", f"{PREFIX}/rollouts/{{rid}}", None, RolloutRecord, about="One rollout with its attempts."
)
WAIT = Endpoint[Wait, FinishedIds]("POST", f"{PREFIX}/wait", Wait, FinishedIds)
TRAJECTORIES = Endpoint[RolloutIds, Sequence[Trajectory]](
    "POST", f"{PREFIX}/trajectories", RolloutIds, list[Trajectory]
)
SCORES = Endpoint[Scores, None]("POST", f"{PREFIX}/scores", Scores, None)
STEP = Endpoint[Step, None]("POST", f"{PREFIX}/steps", Step, None)
STEPS = Endpoint[None, Sequence[StepRecord]](
    "GET", f"{PREFIX}/steps", None, list[StepRecord], about="List training steps."
)
ROLLBACK = Endpoint[Rollback, Count]("DELETE", f"{PREFIX}/steps", Rollback, Count)
FORGET = Endpoint[Forget, Count]("POST", f"{PREFIX}/forget", Forget, Count)
CANCEL = Endpoint[Cancel, Count]("POST", f"{PREFIX}/cancel", Cancel, Count)
RETRY = Endpoint[Retry, Count]("POST", f"{PREFIX}/retry", Retry, Count)
INTERRUPT = Endpoint[Interrupt, Count]("POST", f"{PREFIX}/interrupt", Interrupt, Count)
STATUS = Endpoint[None, Status]("GET", f"{PREFIX}/status", None, Status, about="Totals, and how policies are served.")
LEASE = Endpoint[LeaseRequest, Lease | None]("POST", f"{PREFIX}/leases", LeaseRequest, Lease | None, "worker")
BEAT = Endpoint[WorkerBeat, Orders]("POST", f"{PREFIX}/workers/{{wid}}/beat", WorkerBeat, Orders, "worker")
WORKERS = Endpoint[WorkerFilter, Workers]("GET", f"{PREFIX}/workers", WorkerFilter, Workers, "supervisor")
STOP_WORKERS = Endpoint[WorkerPrefix, Count]("POST", f"{PREFIX}/workers/stop", WorkerPrefix, Count, "supervisor")
INTERRUPT_WORKERS = Endpoint[InterruptWorkers, Count](
    "POST", f"{PREFIX}/workers/interrupt", InterruptWorkers, Count, "supervisor"
)
RESULT = Endpoint[Result, ResultKept]("POST", f"{_ATTEMPT}/result", Result, ResultKept, "ended_attempt")
REWARDS = Endpoint[Rewards, None]("POST", f"{_ATTEMPT}/rewards", Rewards, None, "attempt")
TRACES = Endpoint[bytes, bytes]("POST", f"{_ATTEMPT}/v1/traces", bytes, bytes, "attempt", about=_SPANS)
LOGS = Endpoint[bytes, bytes]("POST", f"{_ATTEMPT}/v1/logs", bytes, bytes, "attempt", about=_LOGS)
REPORT_REWARDS = Endpoint[ReportedRewards, None]("POST", f"{_AGENT}/rewards", ReportedRewards, None, "attempt")
REPORT_TOOL_CALLS = Endpoint[ReportedToolCalls, None](
    "POST", f"{_AGENT}/tool_calls", ReportedToolCalls, None, "attempt"
)

ENDPOINTS: Final[Sequence[Endpoint[Any, Any]]] = tuple(
    value for value in vars().values() if isinstance(value, Endpoint)
)
