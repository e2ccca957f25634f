"""Collection as a stream: groups of rollouts are ordered, and come back rewarded once their last has ended.

order({position: specs}) ─► store ─► workers ─► one long poll for all that is out ─► rewards ─► branches ─► take() ─►
RewardedGroup

How many are out at a time is the caller's rule; nothing here knows of steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightningrl.errors import LightningError, RewardError, ServerError
from lightningrl.records import RolloutFilter, RolloutRecord, Score
from lightningrl.types import RolloutMode, RolloutSpec, RolloutState, Trajectory
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.pacing import Pacing

__all__ = ["Collector", "Phase", "RewardedGroup", "Rollouts", "fetch_ended", "measure_phases"]

POLL_S = 10.0
FETCH = 64
"""Trajectories per request."""
LIST = 1000
"""Rollouts per list."""


class Rollouts(Protocol):
    """The server as collection asks it; `lightningrl_client.control.client.ServerClient` is one."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int: ...
    async def wait(
        self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None
    ) -> Sequence[str]: ...
    async def trajectories(self, rollout_ids: Sequence[str]) -> Sequence[Trajectory]: ...
    async def set_scores(self, scores: Sequence[Score]) -> None: ...
    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int: ...
    async def list_rollouts(self, where: RolloutFilter) -> Sequence[RolloutRecord]: ...


async def fetch_ended(
    rollouts: Rollouts, ids: Sequence[str], show: Callable[[int], None] | None = None
) -> list[Trajectory]:
    """Trajectories in this order, once all have ended; `show` hears how many have, each time that one has."""
    ended: Sequence[str] = ()
    while len(ended) < len(ids):
        if show is not None:
            show(len(ended))
        ended = await rollouts.wait(ids, POLL_S, None if show is None else len(ended) + 1)
    if show is not None:
        show(len(ids))
    pages = [await rollouts.trajectories(ids[start : start + FETCH]) for start in range(0, len(ids), FETCH)]
    return [trajectory for page in pages for trajectory in page]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardedGroup:
    """Rollouts of one task that have ended and been rewarded. Times are of the monotonic clock."""

    position: int
    """The task's place in the stream of tasks."""
    trajectories: tuple[Trajectory, ...]
    branches: tuple[Trajectory, ...] = ()
    """Branches that credit wants of them, rewarded, too."""
    is_replay: bool
    """All had ended when they were ordered: an earlier process collected them."""
    ordered_at: float
    ended_at: float
    rewarded_at: float


@dataclass(kw_only=True, slots=True)
class _Order:
    ids: tuple[str, ...]
    at: float
    is_replay: bool = False
    ended: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    begun: Mapping[str, int] = field(default_factory=dict[str, int])
    """Versions before which no call was made of what has not ended, by policy; of a paced collector alone."""
    oldest: dict[str, int] = field(default_factory=dict[str, int])
    """Oldest versions of the trained calls of what has ended, by policy."""

    def end(self, trajectory: Trajectory) -> None:
        self.ended[trajectory.rollout_id] = trajectory
        for call in trajectory.transitions:
            if call.trainable:
                self.oldest[call.policy] = min(call.policy_version, self.oldest.get(call.policy, call.policy_version))

    def age(self, versions: Mapping[str, int]) -> int:
        """Versions since its first call: of a whole group exactly, else at most."""
        running = {} if len(self.ended) == len(self.ids) else self.begun
        since = (*self.oldest.items(), *running.items())
        return max((versions[policy] - version for policy, version in since), default=0)


@dataclass(kw_only=True, eq=False)
class Collector:
    """The groups that are out: ordered, and not taken yet. Make it on the loop that uses it, and close it there."""

    rollouts: Rollouts
    evaluator: Evaluator
    start_workers: Callable[[], Awaitable[None]]
    """Awaited where the store does not have what is ordered yet."""
    pacing: Pacing | None = None
    """Which groups may be taken next, of those that are finished; None = they are taken in the order of their
    positions."""
    plan_branches: Callable[[Sequence[Trajectory]], Sequence[RolloutSpec]] = lambda rewarded: ()
    """Rollouts that are to run before a rewarded group is whole."""
    _out: dict[int, _Order] = field(init=False, default_factory=dict[int, _Order])
    """In the order of their positions."""
    _ready: dict[int, RewardedGroup] = field(init=False, default_factory=dict[int, RewardedGroup])
    """In the order in which they were finished."""
    _last: int | None = field(init=False, default=None)
    """The last position that somebody waits for, where more is out; None = all are as good."""
    _changed: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _arrived: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _failure: BaseException | None = field(init=False, default=None)
    _scores: _Batches = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set[asyncio.Task[None]])

    def __post_init__(self) -> None:
        self._scores = _Batches(self.rollouts.set_scores)
        self._do(self._watch())

    @property
    def out(self) -> int:
        """Groups ordered and not taken."""
        return len(self._out)

    def ended(self, groups: int) -> int:
        """Rollouts that have ended, of the next so many groups to be taken."""
        counts = [len(order.ended) for order in self._out.values()]
        return sum((counts if self.pacing is None else sorted(counts, reverse=True))[:groups])

    async def order(self, groups: Mapping[int, Sequence[RolloutSpec]]) -> None:
        """Have these groups collected, by their positions. What the store has already is not collected again."""
        specs = [spec for group in groups.values() for spec in group]
        if not specs:
            return
        ids, now = [spec.id for spec in specs], time.monotonic()
        is_new = await self.rollouts.create_rollouts(specs) == len(specs)
        ended = set() if is_new else set(await self.rollouts.wait(ids, 0.0))
        for position, group in groups.items():
            names = tuple(spec.id for spec in group)
            self._out[position] = _Order(ids=names, at=now, is_replay=ended.issuperset(names), begun=self._versions())
        self._changed.set()
        if len(ended) < len(ids):
            await self.start_workers()
        await self._note_queued()

    async def run_again(self, groups: Sequence[RewardedGroup], timeout_s: float) -> None:
        """Order groups that were taken anew; those of their rollouts that failed are run again."""
        now = time.monotonic()
        again = {
            group.position: _Order(
                ids=tuple(rollout.rollout_id for rollout in group.trajectories), at=now, begun=self._versions()
            )
            for group in groups
        }
        await self.rollouts.retry([name for order in again.values() for name in order.ids], timeout_s)
        self._out = dict(sorted({**self._out, **again}.items()))
        self._changed.set()
        await self.start_workers()

    async def take(self, wanted: int = 1, show: Callable[[], None] = lambda: None) -> RewardedGroup:
        """The next of so many `wanted` groups; `show` is called whenever rollouts have ended meanwhile. Raises what a
        reward or the server raised for good."""
        is_ahead = self.pacing is None and wanted < len(self._out)
        self._wait_for(tuple(self._out)[wanted - 1] if is_ahead else None)
        while True:
            if self._failure is not None:
                if not isinstance(self._failure, ServerError):
                    await self._scores.send()
                raise self._failure
            if (position := self._next(wanted)) is not None:
                del self._out[position]
                if wanted == 1:
                    self._wait_for(None)
                return self._ready.pop(position)
            self._arrived.clear()
            await self._arrived.wait()
            show()

    async def aclose(self) -> None:
        """Stop watching. The rollouts that are out stay in the store."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ which is next

    def _next(self, wanted: int) -> int | None:
        """The position to be taken now; None = it has not been rewarded yet."""
        if self.pacing is None:
            return next((position for position in (*self._out,)[:1] if position in self._ready), None)
        versions = self._versions()
        ages = {position: order.age(versions) for position, order in self._out.items()}
        return next((position for position in self.pacing.takeable(ages, wanted) if position in self._ready), None)

    def _versions(self) -> Mapping[str, int]:
        return {} if self.pacing is None else self.pacing.versions()

    async def _note_queued(self) -> None:
        """Groups that no worker has begun are of now: their calls are yet to come."""
        if self.pacing is None:
            return
        queued: set[str] = set()
        where, page = RolloutFilter(state=RolloutState.QUEUED, mode=RolloutMode.TRAIN, limit=LIST), LIST
        while page == LIST:
            records = await self.rollouts.list_rollouts(replace(where, offset=len(queued)))
            queued, page = queued | {record.id for record in records}, len(records)
        for order in self._out.values():
            if queued.issuperset(order.ids):
                order.begun = self._versions()

    # ------------------------------------------------------------------ what goes on

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Future[None]) -> None:
        if task not in self._tasks:  # closing
            return
        self._tasks.discard(task)
        failure = (
            LightningError("what rewards a group was cancelled from within") if task.cancelled() else task.exception()
        )
        if failure is not None:
            self._failure = self._failure or failure
            self._arrived.set()

    def _wait_for(self, last: int | None) -> None:
        """Watch the groups up to `last` alone while they are wanted: one long poll ends when they have."""
        if last != self._last:
            self._last = last
            self._changed.set()

    async def _watch(self) -> None:
        while True:
            self._changed.clear()
            orders = {n: order for n, order in self._out.items() if self._last is None or n <= self._last}
            place = {name: n for n, order in orders.items() for name in order.ids if name not in order.ended}
            finished = await self._poll(tuple(place), [len(order.ids) - len(order.ended) for order in orders.values()])
            for start in range(0, len(finished), FETCH):
                for trajectory in await self.rollouts.trajectories(finished[start : start + FETCH]):
                    name = trajectory.rollout_id
                    order = self._out[place[name]]
                    order.end(trajectory)
                    if len(order.ended) == len(order.ids):
                        self._do(self._reward(place[name], order))
            if finished:
                self._arrived.set()

    async def _poll(self, waiting: Sequence[str], missing: Sequence[int]) -> Sequence[str]:
        """Wait for rollouts to end; `()` where others are wanted meanwhile. `missing`: how many a group wants."""
        changed = asyncio.create_task(self._changed.wait())
        if not waiting:
            await changed
            return ()
        # in order, all are wanted: some at a time, so that rewards begin early; else the first that completes a group
        some = max(len(waiting) // 2, max(missing)) if self.pacing is None else min(count for count in missing if count)
        poll = asyncio.create_task(self.rollouts.wait(waiting, POLL_S, min(some, FETCH)))
        try:
            await asyncio.wait({changed, poll}, return_when=asyncio.FIRST_COMPLETED)
            return tuple(poll.result()) if poll.done() else ()
        finally:
            changed.cancel()
            poll.cancel()

    async def _reward(self, position: int, order: _Order) -> None:
        ended_at = time.monotonic()
        rewarded = await self.evaluator.reward([order.ended[name] for name in order.ids], self._scores)
        branches = await self._branch(self.plan_branches(rewarded))
        self._ready[position] = RewardedGroup(
            position=position,
            trajectories=tuple(rewarded),
            branches=tuple(branches),
            is_replay=order.is_replay,
            ordered_at=order.at,
            ended_at=ended_at,
            rewarded_at=time.monotonic(),
        )
        self._arrived.set()

    async def _branch(self, specs: Sequence[RolloutSpec]) -> Sequence[Trajectory]:
        """Run them to their end, rewarded."""
        if not specs:
            return ()
        ids = [spec.id for spec in specs]
        await self.rollouts.create_rollouts(specs)
        await self.start_workers()
        return await self.evaluator.reward(await fetch_ended(self.rollouts, ids), self._scores)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Takes the groups of a step or a validation: shows how many have ended, and stops once too many rewards failed."""

    name: str
    where: str
    """`step 3`, in sentences."""
    group_size: int
    collector: Collector
    show: Callable[[str, int, int], None]
    """Told name, rollouts that have ended, and all of them."""
    remedy: str
    """Advice for a person who mended the rewards."""

    async def take(self, taken: Sequence[RewardedGroup], missing: int) -> RewardedGroup:
        """The next of `missing` groups, besides those taken. Raises RewardError once more rewards failed than may."""
        had, to_come = self.group_size * len(taken), self.group_size * missing

        def show() -> None:
            self.show(self.name, had + self.collector.ended(missing), had + to_come)

        show()
        try:
            group = await self.collector.take(missing, show)
            if any(trajectory.unrewarded is not None for trajectory in group.trajectories):
                rewarded = [trajectory for each in (*taken, group) for trajectory in each.trajectories]
                self.collector.evaluator.check_failures(rewarded, to_come=to_come - self.group_size)
        except RewardError as error:
            raise RewardError(f"{self.where}: {error}; {self.remedy}") from None
        return group

    async def take_all(self, count: int) -> list[RewardedGroup]:
        groups: list[RewardedGroup] = []
        while len(groups) < count:
            groups.append(await self.take(groups, count - len(groups)))
        return groups


def measure_phases(groups: Sequence[RewardedGroup], began: float, ready: float) -> tuple[float, dict[str, float]]:
    """Seconds that the step's groups were sampled in, and its metrics of time; `ready`: when all was credited."""
    ended, rewarded = max(group.ended_at for group in groups), max(group.rewarded_at for group in groups)
    return ended - min(group.ordered_at for group in groups), {
        "seconds": time.monotonic() - began,
        "seconds_collect": max(0.0, ended - began),
        "seconds_reward": max(0.0, rewarded - max(began, ended)),
        "seconds_credit": ready - max(began, rewarded),
    }


class _Batches:
    """Scores on their way into the store: while a request is under way, those made meanwhile wait for the next."""

    def __init__(self, send: Callable[[Sequence[Score]], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[Score] = []
        self._sending = asyncio.Lock()

    async def __call__(self, scores: Sequence[Score]) -> None:
        """Returns when they are durable."""
        self._waiting += scores
        await self.send()

    async def send(self) -> None:
        async with self._sending:
            if batch := list(self._waiting):  # stays there where the request is cancelled
                await self._send(batch)
                del self._waiting[: len(batch)]
