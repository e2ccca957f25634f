"""The protocols of a store; `lightningrl.records` are what goes in and comes out.

    create_rollouts ─► lease ─► append_calls … append_tool_calls … add_rewards ─► finish_attempt ─► trajectories
                         ▲                                                             │  ─► set_scores ─► mark_trained
                         └──────── requeued while attempts are left (retryable) ◄──────┘

`Store` is all of it; whoever uses one asks for the part that they need: `Queue`, `CallLog`, `Ledger` or `Look`.
Every method that writes is *durable when it returns*: what it acknowledged survives `kill -9`. What it refuses (a
`StoreError`) leaves no trace. All methods may be called concurrently from one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from lightningrl.errors import StoreError
from lightningrl.records import Lease, RolloutFilter, RolloutRecord, RunningAttempt, Score, StepRecord, StoreCounts
from lightningrl.types import OtherCall, Outcome, RolloutSpec, RolloutState, Trajectory
from lightningrl_server.records import AttemptEnd, AttemptInfo, CallRecord, SpanRecord, ToolCallRecord

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["RETRYABLE", "AttemptCalls", "CallLog", "Ledger", "Look", "Queue", "Store"]

T = TypeVar("T")

RETRYABLE = frozenset({Outcome.INFRASTRUCTURE_ERROR})
"""Outcomes that say nothing about the policy: the rollout is queued again while attempts are left."""


class Queue(Protocol):
    """Rollouts to be worked on: for the trainer, who orders them, and for workers."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        """Queue them in this order; returns how many are new. A stored id with an equal spec is skipped; with another
        task or other settings the whole request is refused (`Conflict`)."""

    async def lease(
        self, worker_id: str, lease_s: float, wait_s: float = 0.0, *, exclusive: bool = False
    ) -> Lease | None:
        """Start the next attempt of the oldest queued rollout; waits up to `wait_s` for one, else None. `exclusive`:
        the worker runs one attempt at a time, so what it still holds (a lost answer) is queued again, uncharged."""

    async def release(self, rollout_id: str, attempt: int) -> None:
        """Undo a lease that nobody received and queue the rollout; nothing if the attempt has calls or has ended."""

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float, worker_id: str | None = None) -> bool:
        """Renew the lease. Returns False where the attempt is over (cancelled, expired, finished), or is not that
        worker's (None = anybody's): stop working on it. `id/slot` is the worker `id`'s."""

    async def running(self, workers: str) -> tuple[RunningAttempt, ...]:
        """Read the attempts of workers whose id begins with `workers`."""

    async def finish_attempt(
        self,
        rollout_id: str,
        attempt: int,
        outcome: Outcome,
        output: Any = None,
        error: str | None = None,
        duration_s: float = 0.0,
    ) -> RolloutState:
        """End it; the rollout is succeeded, failed, or queued again where the outcome is `RETRYABLE` and attempts are
        left. The first result wins: repeating its outcome is acknowledged again (also `agent_error`, where it was kept
        as `context_overflow`), another outcome raises `AttemptOver`. A branch that succeeds or errs before it has
        repeated all calls up to its branch point is kept as `diverged`, and any result of it is acknowledged."""

    async def finish_and_lease(
        self, rollout_id: str, attempt: int, end: AttemptEnd, worker_id: str | None, lease_s: float = 60.0
    ) -> tuple[RolloutState, Lease | None]:
        """End the attempt with all that is reported of it, and, where a `worker_id` is given, lease exclusively without
        waiting: all in one commit. A repeated result adds nothing and leases nothing."""

    async def interrupt(self, reason: str, workers: str = "") -> int:
        """End every running attempt of workers whose id begins with `workers` as `infrastructure_error` (they are gone,
        as after a restart of the run) and queue its rollout, the first ten times uncharged. Returns how many."""

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        """Queue those that failed again, with `timeout_s` for each attempt and as many attempts as at first; earlier
        attempts stay on record. Returns how many."""

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """End those not finished yet as `cancelled`; returns how many. Their heartbeats answer False."""

    async def wait_finished(
        self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None
    ) -> tuple[str, ...]:
        """Return those that succeeded or failed, as soon as there are `min_finished` (None = all) or `wait_s` is over.
        Raises StoreTrouble where the store has kept nothing for a minute, whoever asked it: none of them will end."""


class AttemptCalls(Protocol):
    """An attempt's model calls, while it runs and later."""

    async def calls(self, rollout_id: str, attempt: int) -> tuple[CallRecord, ...]:
        """Read the attempt's calls in order, prompts whole. Empty where there are none."""

    async def other_calls(self, rollout_id: str, attempt: int) -> tuple[OtherCall, ...]:
        """Read the attempt's other calls, in order."""


class CallLog(AttemptCalls, Protocol):
    """The calls and reports of running attempts: for the gateway and for agents."""

    async def authorise(self, rollout_id: str, attempt: int, key: str) -> AttemptInfo | None:
        """Return the running attempt the scoped key stands for; None = wrong key, unknown or ended attempt. In memory;
        call it per request."""

    async def refusal(self, rollout_id: str, attempt: int, key: str) -> StoreError:
        """Return why `authorise` gave None: `UnknownRecord`, `AttemptOver` (counted as late), else `StoreError`."""

    async def append_call(self, record: CallRecord) -> CallRecord | None:
        """Record one call. None = recorded now; else the first call of its `call_key`, and nothing is added."""

    async def append_calls(
        self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()
    ) -> tuple[CallRecord | None, ...]:
        """Record all choices of one call (`n>1`), or none. All of one attempt; a parent may stand earlier in `records`.
        `tool_calls`: those whose results its request brought, recorded with it as `append_tool_calls` does."""

    async def call_ids(self, rollout_id: str, attempt: int) -> frozenset[str]:
        """Read the ids of the attempt's transitions."""

    async def tool_call_ids(self, rollout_id: str, attempt: int) -> frozenset[str]:
        """Read the ids of the attempt's tool calls that were reported, without those that the dialogue alone shows."""

    async def append_tool_calls(self, rollout_id: str, attempt: int, tool_calls: Sequence[ToolCallRecord]) -> int:
        """Record tool calls; returns how many are new. Export them before the result: an ended attempt refuses them. A
        report of a tool call takes the place of what the dialogue shows (`is_of_dialogue`), whichever comes first;
        arguments, result and status that no report has are the dialogue's."""

    async def append_other_calls(self, rollout_id: str, attempt: int, calls: Sequence[OtherCall]) -> None:
        """Record model calls that are no transitions."""

    async def append_spans(self, rollout_id: str, attempt: int, spans: Sequence[SpanRecord]) -> None: ...

    async def add_rewards(
        self, rollout_id: str, attempt: int, rewards: Mapping[str, float | None], transition_id: str | None = None
    ) -> None:
        """Record reported rewards by name, of attempt or transition, also after its end; the last of a name stands."""


class Ledger(Protocol):
    """The trainer's scores of finished attempts, and which step trained them."""

    async def set_scores(self, scores: Sequence[Score]) -> None:
        """Store what the trainer computed; repeats replace."""

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        """Record a training step. `Conflict` for a rollout trained before; the same step again is acknowledged."""

    async def rollback_steps(self, after: int) -> int:
        """Forget steps later than `after` (the trainer resumes from an older checkpoint); returns how many."""

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        """Delete ended rollouts with all that is stored of them: trained by steps up to `through`, or planned for them
        and never trained, but for the last `slack` steps. The steps stay, without `rollout_ids`. Returns how many."""


class Look(AttemptCalls, Protocol):
    """Rollouts, trajectories and steps, read. Changes nothing."""

    async def rollout(self, rollout_id: str) -> RolloutRecord:
        """Read a rollout. `UnknownRecord` where there is none."""

    async def list_rollouts(
        self,
        where: RolloutFilter = RolloutFilter(),  # noqa: B008
    ) -> tuple[RolloutRecord, ...]: ...

    async def trajectories(self, rollout_ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Read the deciding attempts (the one that succeeded, else the last that ended), in the order asked.
        `UnknownRecord` for an unknown id; a rollout without an ended attempt raises `Conflict`."""

    async def scores(self, rollout_ids: Sequence[str]) -> tuple[Score, ...]:
        """Read the scores of the deciding attempts, where there are any."""

    async def steps(self) -> tuple[StepRecord, ...]: ...

    async def counts(self) -> StoreCounts: ...

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Ask one's own query of `lightningrl_server.store.tables`, in a thread, a transaction, read-only."""


@runtime_checkable
class Store(Queue, CallLog, Ledger, Look, Protocol):
    """Durable before acknowledged. `StoreError`s: `UnknownRecord`, `Conflict`, `AttemptOver`, `StoreFull`."""

    async def close(self) -> None:
        """Finish what was accepted and close. Waiters return as if their time were over."""
