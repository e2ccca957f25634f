"""How a store stands: how far it has come, what waits and runs, who works, what failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lightningrl.types import Outcome, RolloutState

__all__ = [
    "Condition",
    "FailureCount",
    "LeftThreadCount",
    "Neighbours",
    "Position",
    "RefusalCount",
    "RunningLease",
    "ServedVersion",
    "Standing",
    "WorkerCount",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a store has come. Its numbers only grow, but for steps that a resumed run takes back."""

    step: int
    """The last that finished; 0 = none."""
    attempt: int
    """Number of the newest lease in this store."""
    call: int
    """Number of the newest call in this store."""
    running: int
    """Attempts that run now."""
    later_steps: tuple[int, ...]
    """Finished steps after the one that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """Rollouts around one, in the order in which they were asked for. None = there is none."""

    before: str | None
    after: str | None
    failed_before: str | None
    failed_after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """Calls of one version of a policy, among the newest."""

    policy: str
    version: int
    calls: int
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCount:
    """A worker's share of the newest attempts."""

    worker_id: str
    attempts: int
    running: int
    failed: int
    last_seen: float
    """Unix seconds: when an attempt of it began or ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningLease:
    """An attempt that has not ended: somebody's, or nobody's since a run was killed."""

    rollout_id: str
    attempt: int
    worker_id: str
    started_at: float
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCount:
    """Attempts of the newest that ended so."""

    outcome: Outcome
    count: int
    rollout_id: str
    """Of the newest of them."""
    error: str
    """What that one said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusalCount:
    """Calls that the gateway refused, of the newest."""

    code: str
    status: int | None
    count: int
    rollout_id: str
    """Of the newest of them."""
    message: str
    """What that one was told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftThreadCount:
    """Threads of one name that attempts of the newest left running."""

    name: str
    count: int
    rollout_id: str
    """Of the newest of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A store as a whole: all rollouts by state and outcome, and the newest attempts, calls and refusals."""

    states: Mapping[RolloutState, int]
    outcomes: Mapping[Outcome, int]
    """Of finished rollouts."""
    attempts_read: int
    """That workers, failures and left threads are counted over."""
    versions: tuple[ServedVersion, ...]
    workers: tuple[WorkerCount, ...]
    leases: tuple[RunningLease, ...]
    failures: tuple[FailureCount, ...]
    refusals: tuple[RefusalCount, ...]
    left_threads: tuple[LeftThreadCount, ...]


class Standing(Protocol):
    """How a store can be asked about itself."""

    async def position(self, after: int = 0) -> Position:
        """With the steps later than `after`. Cheap: whoever looks on asks it every second."""
        ...

    async def condition(self) -> Condition: ...

    async def neighbours(self, rollout_id: str) -> Neighbours: ...
