"""The protocols of a store, and the records that go in and come out.

    create_rollouts ─► lease ─► append_calls … append_tool_calls … add_rewards ─► finish_attempt ─► trajectories
                         ▲                                                             │  ─► set_scores ─► mark_trained
                         └──────── requeued while attempts are left (retryable) ◄──────┘

`Store` is all of it; whoever uses one asks for the part that they need: `Queue`, `CallLog`, `Ledger` or `Look`.
Every method that writes is *durable when it returns*: what it acknowledged survives `kill -9`. What it refuses (a
`StoreError`) leaves no trace. All methods may be called concurrently from one event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, runtime_checkable

from msgspec import Meta

from lightningrl.clean import as_text, one_line
from lightningrl.errors import StoreError
from lightningrl.store.condition import Standing
from lightningrl.store.overview import Overview
from lightningrl.types import (
    Array,
    BranchPoint,
    Evidence,
    OtherCall,
    Outcome,
    RolloutMode,
    RolloutSpec,
    RolloutState,
    SamplingSettings,
    Task,
    ToolCall,
    Trajectory,
    Transition,
)

__all__ = [
    "DIALOGUE",
    "DIVERGED_CODE",
    "RETRYABLE",
    "AttemptCalls",
    "AttemptEnd",
    "AttemptInfo",
    "AttemptRecord",
    "CallLog",
    "CallRecord",
    "Lease",
    "Ledger",
    "Look",
    "Queue",
    "RolloutFilter",
    "RolloutRecord",
    "RunningAttempt",
    "Score",
    "SpanRecord",
    "StepRecord",
    "Store",
    "StoreCounts",
    "ToolCallRecord",
]

RETRYABLE = frozenset({Outcome.INFRASTRUCTURE_ERROR})
"""Outcomes that say nothing about the policy: the rollout is queued again while attempts are left."""

LONGEST_SHOWN = 60
"""Characters of what came out of a rollout, in its line."""

DIVERGED_CODE = "diverged"
"""Of a refused call (`OtherCall.code`) of a branch: nobody recorded it."""

DIALOGUE = "dialogue:"
"""Before a tool call's id, the span of a record that the dialogue alone shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """An attempt handed to one worker until the lease expires or is renewed by a heartbeat."""

    rollout_id: str
    attempt: int
    """Number of the attempt within the rollout, from 1."""
    task: Task
    """Without its answer."""
    mode: RolloutMode
    timeout_s: float
    key: str = field(repr=False)
    """Scoped key: calls the model and reports on this attempt, nothing else."""
    expires_at: float
    """Unix seconds."""

    @property
    def base_path(self) -> str:
        """Where the agent's model calls go, below the server's URL."""
        return f"/rollouts/{self.rollout_id}/attempts/{self.attempt}/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningAttempt:
    """An attempt that a worker runs."""

    rollout_id: str
    attempt: int
    worker_id: str
    timeout_s: float


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
    """At least so many calls of it are recorded; exactly, where other servers record them too."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CallRecord:
    """One model call as it is kept: what training needs of it, and what the gateway needs to go on from it or to answer a retry."""

    rollout_id: str
    attempt: int
    call_key: str
    """The same for every retry of one logical call; unique within the attempt. With `n>1`, one key per choice."""
    transition: Transition
    """Its `parent_id` is a call of the same attempt whose prompt and completion begin its prompt; these tokens are kept once. Its
    `index` is the store's to give, its `rewards` come by `add_rewards`."""
    history_key: str | None = None
    """Digest of the messages up to and including the answer, by which the gateway finds the parent of a later call,
    also after a restart. Opaque to the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallRecord:
    """A tool call with its place in the trace. `tool_call.transition_id` may be None; it is then resolved when read, by the
    model's tool-call id, else by the parent span."""

    tool_call: ToolCall
    span_id: str | None = None
    """Unique within the attempt; an export that is repeated is kept once."""
    parent_span_id: str | None = None
    started_at: float = 0.0

    @property
    def is_of_dialogue(self) -> bool:
        """Whether only a call's answer and a later request tell of it: it stands until somebody tells of the same tool call."""
        return self.span_id is not None and self.span_id.startswith(DIALOGUE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """A span that names an agent or leads to one: fills `Transition.agent` where the call itself did not say. A call that came without
    a span is found by its own id."""

    span_id: str
    parent_span_id: str | None = None
    agent: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttemptEnd:
    """How an attempt ended, and what is told of it with that."""

    outcome: Outcome
    output: Any = None
    error: str | None = None
    duration_s: float = 0.0
    tool_calls: Sequence[ToolCallRecord] = ()
    spans: Sequence[SpanRecord] = ()
    other_calls: Sequence[OtherCall] = ()
    may_go_again: bool = True
    """Whether a failure of the infrastructure queues the rollout again; not where the agent alone says that it is one."""
    left_threads: Sequence[str] = ()
    """As in `Trajectory`."""
    rewards: Mapping[str | None, Mapping[str, float | None]] = field(default_factory=dict[str | None, Mapping[str, float | None]])
    """By transition id; None = of the attempt."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """What the trainer made of a finished attempt, or a part of it: what is not given stays as it is kept, but for `reward` and
    `unrewarded`."""

    rollout_id: str
    attempt: int
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    reward: float | None = None
    unrewarded: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the recipe's key, as in `Trajectory`."""
    evidence: Evidence | None = None
    asked: Sequence[OtherCall] = ()
    """Calls of judges, to be kept with the attempt's other calls; those that are there already, by when they began, are kept once."""
    transition_rewards: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict[str, Mapping[str, float | None]])
    """By transition id."""
    advantages: Mapping[str, Array | None] = field(default_factory=dict[str, "Array | None"])
    """By transition id, one per completion token; None = nobody scored it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One try at a rollout, as it stands."""

    attempt: int
    worker_id: str
    outcome: Outcome | None
    """None = still running."""
    started_at: float
    ended_at: float | None = None
    duration_s: float = 0.0
    output: Any = None
    error: str | None = None
    left_threads: tuple[str, ...] = ()
    """As in `Trajectory`."""
    results_refused: int = 0
    """As in `Trajectory`."""
    calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RolloutRecord:
    """A rollout as it stands. Printed, it is a line."""

    spec: RolloutSpec
    state: RolloutState
    outcome: Outcome | None
    """Of the deciding attempt; None while queued or running."""
    attempts: tuple[AttemptRecord, ...]
    reward: float | None = None
    trained_step: int | None = None
    created_at: float = 0.0

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def task(self) -> Task:
        return self.spec.task

    @property
    def deciding(self) -> AttemptRecord | None:
        """The attempt that the outcome is of: the last that ended so. None while queued or running."""
        return next((attempt for attempt in reversed(self.attempts) if self.outcome and attempt.outcome is self.outcome), None)

    @property
    def output(self) -> Any:
        """The answer that the agent returned in the deciding attempt."""
        return None if self.deciding is None else self.deciding.output

    @property
    def error(self) -> str | None:
        """Why the deciding attempt failed; None where it did not."""
        return None if self.deciding is None else self.deciding.error

    def __repr__(self) -> str:
        """`<rollout 'g000003-000': succeeded, reward 1.000, task 'train-8', 'March 3'>`."""
        ended = self.error or self.output
        words = [self.outcome or self.state, "no reward" if self.reward is None else f"reward {self.reward:.3f}", f"task {self.task.id!r}"]
        result = [] if ended is None else [repr(one_line(as_text(ended), LONGEST_SHOWN))]
        return f"<rollout {self.id!r}: {', '.join([*words, *result])}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFilter:
    """Which rollouts to list, newest first. None = any."""

    state: RolloutState | None = None
    outcome: Outcome | None = None
    mode: RolloutMode | None = None
    step: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """Counted from 1: the step that trained it, or, of a rollout that no step trained, the one it was ordered for (`spec.step` + 1). A
    validation has the number of the step after which it was."""
    group_id: str | None = None
    task_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Over HTTP at most 1,000."""
    offset: Annotated[int, Meta(ge=0, lt=2**31)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A finished training step."""

    step: int
    rollout_ids: tuple[str, ...]
    metrics: Mapping[str, float]
    at: float
    """Unix seconds."""
    is_forgotten: bool = False
    """Its rollouts were deleted (`Ledger.forget_rollouts`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCounts:
    """Totals."""

    states: Mapping[RolloutState, int]
    outcomes: Mapping[Outcome, int]
    """Of finished rollouts."""
    attempts: int
    calls: int
    breaks: int
    late: int
    """Calls and results that were refused because their attempt was over, since this process started."""


class Queue(Protocol):
    """Who works on what: for the trainer, who orders, and for workers."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        """Queue them in this order; returns how many are new. An id kept before with an equal spec is skipped; with another
        task or settings the whole request is refused (`Conflict`)."""
        ...

    async def lease(self, worker_id: str, lease_s: float, wait_s: float = 0.0, *, exclusive: bool = False) -> Lease | None:
        """Start the next attempt of the oldest queued rollout; waits up to `wait_s` for one, else None. `exclusive`: the worker runs
        one attempt at a time, so what it still holds (the answer to an earlier lease was lost) is queued again, uncharged."""
        ...

    async def release(self, rollout_id: str, attempt: int) -> None:
        """Undo a lease that nobody received: the attempt never was, the rollout is queued again. Nothing happens where it has calls
        or has ended."""
        ...

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float, worker_id: str | None = None) -> bool:
        """Renew the lease; False = the attempt is over (cancelled, expired, finished), or is not that worker's (None = anybody's): stop
        working on it. `id/slot` is the worker `id`'s."""
        ...

    async def running(self, workers: str) -> tuple[RunningAttempt, ...]:
        """The attempts of workers whose id begins with `workers`."""
        ...

    async def finish_attempt(
        self,
        rollout_id: str,
        attempt: int,
        outcome: Outcome,
        output: Any = None,
        error: str | None = None,
        duration_s: float = 0.0,
    ) -> RolloutState:
        """End it; the rollout is succeeded, failed, or queued again where the outcome is `RETRYABLE` and attempts are left.
        The first result wins: repeating its outcome is acknowledged again (also `agent_error`, where it was kept as
        `context_overflow`), another outcome raises `AttemptOver`. A branch that succeeds or errs before it has repeated all calls
        up to its branch point is kept as `diverged`, and any result of it is acknowledged."""
        ...

    async def finish_and_lease(
        self, rollout_id: str, attempt: int, end: AttemptEnd, worker_id: str | None, lease_s: float = 60.0
    ) -> tuple[RolloutState, Lease | None]:
        """As `finish_attempt`, with what is told of the attempt, and, where a `worker_id` is given, as its exclusive `lease` that does not
        wait: all of it in one commit. A repeated result adds nothing and leases nothing."""
        ...

    async def interrupt(self, reason: str, workers: str = "") -> int:
        """End every running attempt of workers whose id begins with `workers` as `infrastructure_error` and queue its rollout again without
        charging the attempt (they are gone, as after a restart of the whole run), the first ten times of a rollout. Returns how many."""
        ...

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        """Queue those that failed again, with `timeout_s` for each attempt and as many attempts as at first; what was tried
        stays on record. Returns how many."""
        ...

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """End those not finished yet as `cancelled`; returns how many. Their heartbeats answer False."""
        ...

    async def wait_finished(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> tuple[str, ...]:
        """Those that succeeded or failed, as soon as there are `min_finished` (None = all) or `wait_s` is over. Raises StoreTrouble where
        the store has kept nothing for a minute, whoever asked it: none of them will end."""
        ...


class AttemptCalls(Protocol):
    """An attempt's model calls, while it runs and later."""

    async def calls(self, rollout_id: str, attempt: int) -> tuple[CallRecord, ...]:
        """The attempt's calls in order, prompts whole. Empty where there are none."""
        ...

    async def other_calls(self, rollout_id: str, attempt: int) -> tuple[OtherCall, ...]:
        """The attempt's, in order."""
        ...


class CallLog(AttemptCalls, Protocol):
    """The calls and reports of running attempts: for the gateway and for agents."""

    async def authorise(self, rollout_id: str, attempt: int, key: str) -> AttemptInfo | None:
        """The running attempt the scoped key stands for; None = wrong key, unknown or ended attempt. In memory; call it per request."""
        ...

    async def refusal(self, rollout_id: str, attempt: int, key: str) -> StoreError:
        """Why `authorise` said None, for the answer: `UnknownRecord` (rollout or attempt), `AttemptOver` (counted as late), or a plain
        `StoreError` (wrong key)."""
        ...

    async def append_call(self, record: CallRecord) -> CallRecord | None:
        """Keep one call. None = kept now; where its `call_key` was kept before, nothing is added and that first call returns."""
        ...

    async def append_calls(self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()) -> tuple[CallRecord | None, ...]:
        """Keep all choices of one call (`n>1`), or none. All of one attempt; a parent may stand earlier in `records`. `tool_calls`: those
        whose results its request brought, kept with it as `append_tool_calls` does."""
        ...

    async def call_ids(self, rollout_id: str, attempt: int) -> frozenset[str]:
        """The ids of the attempt's transitions."""
        ...

    async def tool_call_ids(self, rollout_id: str, attempt: int) -> frozenset[str]:
        """The ids of the attempt's tool calls that somebody told of; of what the dialogue alone shows, none."""
        ...

    async def append_tool_calls(self, rollout_id: str, attempt: int, tool_calls: Sequence[ToolCallRecord]) -> int:
        """Returns how many are new. Export them before the result: an ended attempt refuses them. Of one tool call, what somebody tells
        stands in place of what the dialogue shows (`is_of_dialogue`), whichever comes first; arguments, result and status that nobody told
        are the dialogue's."""
        ...

    async def append_other_calls(self, rollout_id: str, attempt: int, calls: Sequence[OtherCall]) -> None:
        """Model calls that are no transitions."""
        ...

    async def append_spans(self, rollout_id: str, attempt: int, spans: Sequence[SpanRecord]) -> None: ...

    async def add_rewards(
        self, rollout_id: str, attempt: int, rewards: Mapping[str, float | None], transition_id: str | None = None
    ) -> None:
        """Keep rewards that were reported, by name, of the attempt or of one transition; the last one of a name stands. Also after the
        attempt's end."""
        ...


class Ledger(Protocol):
    """The trainer's scores of finished attempts, and which step trained them."""

    async def set_scores(self, scores: Sequence[Score]) -> None:
        """Keep what the trainer computed; repeats replace."""
        ...

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        """Record a training step. A rollout is trained at most once: `Conflict` otherwise. Repeating the same step with the same
        rollouts is acknowledged again."""
        ...

    async def rollback_steps(self, after: int) -> int:
        """Forget steps later than `after` (the trainer resumes from an older checkpoint); returns how many."""
        ...

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        """Delete rollouts that have ended, with all that is kept of them: those trained by steps up to `through`, and those planned for
        them that no step trained, the latter but for the last `slack` steps. The steps stay, without their `rollout_ids`. Returns how
        many."""
        ...


class Look(AttemptCalls, Overview, Standing, Protocol):
    """What is and was. Changes nothing."""

    async def rollout(self, rollout_id: str) -> RolloutRecord:
        """`UnknownRecord` where there is none."""
        ...

    async def list_rollouts(self, where: RolloutFilter = RolloutFilter()) -> tuple[RolloutRecord, ...]: ...

    async def trajectories(self, rollout_ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Of the deciding attempt (the one that succeeded, else the last that ended), in the order asked. `UnknownRecord` for an unknown
        id; a rollout without an ended attempt raises `Conflict`."""
        ...

    async def scores(self, rollout_ids: Sequence[str]) -> tuple[Score, ...]:
        """Of the deciding attempts, where there are any."""
        ...

    async def steps(self) -> tuple[StepRecord, ...]: ...

    async def counts(self) -> StoreCounts: ...


@runtime_checkable
class Store(Queue, CallLog, Ledger, Look, Protocol):
    """Durable before acknowledged. Errors: `UnknownRecord`, `Conflict`, `AttemptOver`, `StoreFull` (all `StoreError`)."""

    async def close(self) -> None:
        """Finish what was accepted and close. Waiters return as if their time were over."""
        ...
