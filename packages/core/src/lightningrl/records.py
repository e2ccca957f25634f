"""The records that trainer, workers and viewer exchange with a server.

Lease ─► RunningAttempt        Score ─► StepRecord
RolloutFilter ─► RolloutRecord with its AttemptRecords        StoreCounts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from lightningrl.sanitize import as_text, one_line
from lightningrl.types import Array, Evidence, OtherCall, Outcome, RolloutMode, RolloutSpec, RolloutState, Task

__all__ = [
    "DIVERGED_CODE",
    "AttemptRecord",
    "Lease",
    "PolicyStatus",
    "RolloutFilter",
    "RolloutRecord",
    "RunningAttempt",
    "Score",
    "StepRecord",
    "StoreCounts",
    "WorkerRecord",
    "WorkerState",
]

DIVERGED_CODE = "diverged"
"""`OtherCall.code` of a call that a branch was refused: the recorded rollout did not make it."""

_LONGEST_SHOWN = 60
"""Characters of an output or error in a rollout's `repr`."""


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
        """Path of the agent's model calls, below the server's URL."""
        return f"/rollouts/{self.rollout_id}/attempts/{self.attempt}/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningAttempt:
    """An attempt that a worker runs."""

    rollout_id: str
    attempt: int
    worker_id: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """The trainer's findings on a finished attempt, or a part of them. Fields that are not given leave what is stored
    as it is, except `reward` and `unrewarded`, which always replace it."""

    rollout_id: str
    attempt: int
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    reward: float | None = None
    unrewarded: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values by the recipe's key, as in `Trajectory`."""
    evidence: Evidence | None = None
    asked: Sequence[OtherCall] = ()
    """Calls of judges, kept with the attempt's other calls; one that began when a stored one did is kept once."""
    transition_rewards: Mapping[str, Mapping[str, float | None]] = field(
        default_factory=dict[str, Mapping[str, float | None]]
    )
    """Values by transition id."""
    advantages: Mapping[str, Array | None] = field(default_factory=dict[str, "Array | None"])
    """Advantages by transition id, one per completion token; None = nobody scored it."""


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
    """Same as in `Trajectory`."""
    results_refused: int = 0
    """Same as in `Trajectory`."""
    calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RolloutRecord:
    """A rollout as it stands. Printed, it is a line."""

    spec: RolloutSpec
    state: RolloutState
    outcome: Outcome | None
    """Outcome of the deciding attempt; None while queued or running."""
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
        """The last attempt that ended with the rollout's outcome. None while queued or running."""
        attempts = reversed(self.attempts)
        return next((attempt for attempt in attempts if self.outcome and attempt.outcome is self.outcome), None)

    @property
    def output(self) -> Any:
        """The answer that the agent returned in the deciding attempt."""
        return None if self.deciding is None else self.deciding.output

    @property
    def error(self) -> str | None:
        """The failure of the deciding attempt; None where it did not fail."""
        return None if self.deciding is None else self.deciding.error

    def __repr__(self) -> str:
        """`<rollout 'g000003-000': succeeded, reward 1.000, task 'train-8', 'March 3'>`."""
        reward = "no reward" if self.reward is None else f"reward {self.reward:.3f}"
        words = [self.outcome or self.state, reward, f"task {self.task.id!r}"]
        ended = self.error or self.output
        if ended is not None:
            words.append(repr(one_line(as_text(ended), _LONGEST_SHOWN)))
        return f"<rollout {self.id!r}: {', '.join(words)}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFilter:
    """Which rollouts to list, newest first. None = any."""

    state: RolloutState | None = None
    outcome: Outcome | None = None
    mode: RolloutMode | None = None
    step: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    """Counted from 1: the step that trained it, or, where no step did, the one it was ordered for (`spec.step` + 1). A
    validation has the number of the step it followed."""
    group_id: str | None = None
    task_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    """At most 1,000 over HTTP."""
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
    """Totals of a store."""

    states: Mapping[RolloutState, int]
    outcomes: Mapping[Outcome, int]
    """Finished rollouts by outcome."""
    attempts: int
    calls: int
    breaks: int
    late: int
    """Calls and results refused because their attempt was over, since this process started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStatus:
    """State in which a policy is served now."""

    policy: str
    version: int | None
    """Model of the latest engine; None = none was ever connected."""
    connected: int
    held: bool
    in_flight: int
    """Calls being generated or waiting."""
    overridden: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sampling settings that agents asked for and the recipe's replaced (`temperature=0`), with how many calls did,
    since its start."""
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    """Fields of calls that nobody reads, with how many calls had them, since its start."""


class WorkerState(StrEnum):
    """State of a worker, in its own words."""

    STARTING = "starting"
    """The worker imports the agent."""
    READY = "ready"
    FAILED = "failed"
    """Said by the supervisor of a machine: the agent cannot be run there."""
    REVOKED = "revoked"
    """An attempt was taken away and its agent cannot be stopped: it ends with its process."""
    LOST = "lost"
    """Said by the supervisor of a machine: its workers cannot go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """A worker as it stands: until its leases would be over without another beat, and after a restart of the server
    from its next on."""

    id: str
    host: str
    pid: int
    state: WorkerState
    since: float
    """Time of the state, Unix seconds."""
    last_beat: float
    """Unix seconds."""
    error: str = ""
    grace_s: float = 0.0
    lease_s: float = 60.0
    leases: int = 0
    """Attempts that this process was given."""
    is_stopping: bool = False
