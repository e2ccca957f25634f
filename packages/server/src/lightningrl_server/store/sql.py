"""The store on a SQL database: an async face over one writing thread (group commit) and a few reading ones.

store = await SqlStore.open("sqlite:///runs/1/store.db")
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import Connection

from lightningrl.errors import StoreError
from lightningrl.records import AttemptEnd, AttemptInfo, CallRecord, Lease, StoreCounts, ToolCallRecord
from lightningrl.types import Outcome, RolloutState
from lightningrl_server.store import writes
from lightningrl_server.store.database import open_database
from lightningrl_server.store.dialects import Database, Peers, explain, patiently
from lightningrl_server.store.errors import AttemptOver, StoreTrouble, UnknownRecord
from lightningrl_server.store.events import EndEvent, Event, LeaseEvent, QueueEvent, StartEvent
from lightningrl_server.store.reads import Reader, decode_task
from lightningrl_server.store.trajectories import read_trajectories
from lightningrl_server.store.transaction import Transaction, over
from lightningrl_server.store.writer import Writer

__all__ = ["LeaseClock", "SqlStore"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_LOOK_S = 1.0
"""The longest between two looks at the lease clock while this process runs."""
_STOOD_STILL_S = 5.0
_LOOK_AT_OTHERS_S = 5.0
"""Between two looks at leases that other servers of the store gave: one of them may be gone."""


class LeaseClock:
    """The clock of leases. It starts with the time of day and does not jump with it; where this process stood still, and so heard
    no heartbeat, it stood still too."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now = time.time()
        self._looked_at = monotonic()

    def now(self) -> float:
        looked_at = self._monotonic()
        self._now += min(looked_at - self._looked_at, _LOOK_S)
        self._looked_at = looked_at
        return self._now


class SharedClock:
    """The clock of leases of a store of several servers: one for all."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._looked_at = now()

    def stood_still(self) -> bool:
        """Whether this process did since the last time that it was asked."""
        looked_at, self._looked_at = self._looked_at, self.now()
        return self._looked_at - looked_at > _STOOD_STILL_S


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody in `wait_finished`."""

    wanted: frozenset[str]
    enough: int
    finished: set[str] = field(default_factory=set[str])
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, rollout_ids: set[str]) -> None:
        self.finished |= rollout_ids & self.wanted
        if len(self.finished) >= self.enough:
            self.ready.set()


def _writing(op: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """The method that does `op` in a transaction."""

    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(lambda tx: op(tx, *args, **kwargs))

    return method


def _reading(query: Callable[Concatenate[Reader, Connection, P], T]) -> Callable[Concatenate[SqlStore, P], Coroutine[Any, Any, T]]:
    """The method that asks `query`."""

    async def method(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.read(lambda db: query(self._reader, db, *args, **kwargs))

    return method


class SqlStore:
    """A `lightningrl_server.store.protocol.Store`. Made by `open`; used on the event loop it was opened on."""

    def __init__(self, database: Database, *, read_only: bool = False) -> None:
        self._database = database
        self._reader = Reader()
        self._readers = ThreadPoolExecutor(2, "lightningrl-store-reader")
        self._loop = asyncio.get_running_loop()
        self._writer = None if read_only else Writer(database, self._loop, self._on_events)
        self._keys: dict[tuple[str, int], tuple[bytes, AttemptInfo]] = {}
        self._ended = 0
        """Grows whenever an attempt ends, so that a key read before is not remembered after."""
        self._queued = asyncio.Condition()
        self._queued_count = 0
        self._waiters: set[_Waiter] = set()
        self._clock = LeaseClock() if database.peers is None else SharedClock(database.peers.now)
        self._next_expiry: float | None = 0.0
        self._expiry_changed = asyncio.Event()
        self._late = 0
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listening: asyncio.Task[None] | None = None
        if not read_only:
            self._spawn(self._sweep())
        if database.peers is not None:
            self._listening = self._loop.create_task(self._listen(database.peers))

    @classmethod
    async def open(cls, url: str, *, read_only: bool = False, pragmas: Mapping[str, int] | None = None) -> Self:
        """Open the store at a URL of `lightningrl_server.store.dialects`, made where there is none. `read_only` beside a running server.

        Raises StoreError: in use by another process, corrupt, written by a newer version (or by an older one and `read_only`), no room.
        """
        return cls(await asyncio.to_thread(open_database, url, read_only=read_only, pragmas=pragmas), read_only=read_only)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._expiry_changed.set()
        for waiter in self._waiters:
            waiter.ready.set()
        async with self._queued:
            self._queued.notify_all()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            await self._writer.close()
            await asyncio.sleep(0)  # the last results
        self._readers.shutdown()
        self._database.close()

    # ------------------------------------------------------------------ plumbing

    async def _write(self, op: Callable[[Transaction], T], orphaned: Callable[[T], None] | None = None) -> T:
        if self._writer is None:
            raise StoreError(f"the store {self._database.name!r} is open for reading only; open it without read_only")
        try:
            return await self._writer.submit(op, orphaned)
        except AttemptOver:
            self._late += 1
            raise

    async def read(self, query: Callable[[Connection], T]) -> T:
        def ask() -> T:
            with self._database.reading.connect() as db, db.begin():
                return query(db)

        def run() -> T:
            try:
                return patiently(self._database, ask)
            except self._database.errors as error:
                raise explain(error, self._database) from error

        if self._closing:
            raise StoreTrouble(f"the store {self._database.name!r} is closed; open it again")
        return await self._loop.run_in_executor(self._readers, run)

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_events(self, events: Sequence[Event]) -> None:
        """Take note of a commit, before its results are handed out; or in another server's."""
        finished: set[str] = set()
        for event in events:
            match event:
                case EndEvent():
                    self._ended += 1
                    self._keys.pop((event.rollout_id, event.attempt), None)
                    if event.state in (RolloutState.SUCCEEDED, RolloutState.FAILED):
                        finished.add(event.rollout_id)
                case StartEvent():
                    if not self._database.is_shared:
                        self._keys[event.info.rollout_id, event.info.attempt] = event.key_digest, event.info
                case LeaseEvent():
                    if self._next_expiry is None or event.expires_at < self._next_expiry:
                        self._next_expiry = event.expires_at
                        self._expiry_changed.set()
                case QueueEvent():
                    self._queued_count += 1
        if finished:
            for waiter in self._waiters:
                waiter.add(finished)
        if any(isinstance(event, QueueEvent) for event in events):
            self._spawn(self._notify_queued())

    async def _notify_queued(self) -> None:
        async with self._queued:
            self._queued.notify_all()

    async def _listen(self, peers: Peers) -> None:
        """Take note of other servers' commits as if they were made here."""
        async for events in peers.listen():
            if events is not None:
                self._on_events(events)
                continue
            self._on_events([QueueEvent()])
            for waiter in tuple(self._waiters):
                try:
                    waiter.add(await self.read(lambda db: self._reader.finished(db, tuple(waiter.wanted))))  # noqa: B023  awaited
                except StoreError as error:
                    logger.warning("%s", error)

    async def _now(self) -> float:
        """By the clock of leases. Where this process stood still and others of the store did not, leases that nobody could renew go on."""
        peers = self._database.peers
        if peers is not None and isinstance(self._clock, SharedClock) and self._clock.stood_still():
            await self._write(lambda tx: peers.renew(tx.db))  # what is asked later is done later
        return self._clock.now()

    async def _sweep(self) -> None:
        """End attempts whose lease is over, as soon as it is."""
        while not self._closing:
            try:
                now = await self._now()
                if self._next_expiry is not None and self._next_expiry <= now:
                    self._next_expiry = now + _LOOK_AT_OTHERS_S if self._database.is_shared else None  # others' leases are not told
                    soonest = await self._write(lambda tx: writes.expire(tx, now))  # noqa: B023  awaited
                    # One that was given in the same commit, after `expire`, has been noted meanwhile.
                    self._next_expiry = min((instant for instant in (soonest, self._next_expiry) if instant is not None), default=None)
            except StoreError:
                now = self._clock.now()
                self._next_expiry = now + 1.0  # no room, perhaps: the next lease tries again too
            self._expiry_changed.clear()
            if self._closing:
                return
            left = _LOOK_S / 2 if self._next_expiry is None else max(0.005, min(self._next_expiry - now, _LOOK_S / 2))
            try:
                await asyncio.wait_for(self._expiry_changed.wait(), left)
            except TimeoutError:
                continue

    # ------------------------------------------------------------------ rollouts and attempts

    create_rollouts = _writing(writes.create_rollouts)

    async def lease(self, worker_id: str, lease_s: float, wait_s: float = 0.0, *, exclusive: bool = False) -> Lease | None:
        until = self._loop.time() + wait_s
        while not self._closing:
            seen = self._queued_count
            lease = await self._lease_now(worker_id, lease_s, exclusive=exclusive)
            left = until - self._loop.time()
            if lease is not None or left <= 0:
                return lease
            try:
                async with asyncio.timeout(left), self._queued:
                    await self._queued.wait_for(lambda seen=seen: self._closing or self._queued_count != seen)  # type: ignore[misc]
            except TimeoutError:
                return None
        return None

    async def _lease_now(self, worker_id: str, lease_s: float, *, exclusive: bool) -> Lease | None:
        return await self._write(self._leasing(worker_id, lease_s, await self._now(), exclusive=exclusive), self._take_back)

    async def finish_attempt(
        self, rollout_id: str, attempt: int, outcome: Outcome, output: Any = None, error: str | None = None, duration_s: float = 0.0
    ) -> RolloutState:
        end = AttemptEnd(outcome=outcome, output=output, error=error, duration_s=duration_s)
        return (await self.finish_and_lease(rollout_id, attempt, end, None))[0]

    async def finish_and_lease(
        self, rollout_id: str, attempt: int, end: AttemptEnd, worker_id: str | None, lease_s: float = 60.0
    ) -> tuple[RolloutState, Lease | None]:
        lease = None if worker_id is None else self._leasing(worker_id, lease_s, await self._now(), exclusive=True)

        def op(tx: Transaction) -> tuple[RolloutState, Lease | None, AttemptOver | None]:
            state, is_first, refusal = writes.finish(tx, rollout_id, attempt, end)
            return state, lease(tx) if is_first and lease is not None else None, refusal

        state, leased, refusal = await self._write(op, lambda kept: self._take_back(kept[1]))
        if refusal is not None:  # it is counted beside the attempt, so the transaction was kept
            self._late += 1
            raise refusal
        return state, leased

    def _leasing(self, worker_id: str, lease_s: float, now: float, *, exclusive: bool) -> Callable[[Transaction], Lease | None]:
        """An operation that leases."""
        key = secrets.token_urlsafe(24)
        digest = _digest(key)

        def op(tx: Transaction) -> Lease | None:
            row = writes.lease(tx, worker_id, digest, lease_s, now, exclusive=exclusive)
            if row is None:
                return None
            info = AttemptInfo(
                rollout_id=row.id,
                attempt=row.number,
                mode=row.mode,
                step=row.step,
                sampling=row.sampling,
                timeout_s=row.timeout_s,
                branch=row.branch,
            )
            tx.begun(digest, info)
            return Lease(
                rollout_id=row.id,
                attempt=row.number,
                task=replace(decode_task(row.body), answer=None),
                mode=row.mode,
                timeout_s=row.timeout_s,
                key=key,
                expires_at=now + lease_s,
            )

        return op

    def _take_back(self, lease: Lease | None) -> None:
        """Nobody waits for it any more."""
        if lease is not None and not self._closing:
            self._spawn(self.release(lease.rollout_id, lease.attempt))

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float, worker_id: str | None = None) -> bool:
        now = await self._now()
        return await self._write(lambda tx: writes.heartbeat(tx, rollout_id, attempt, lease_s, now, worker_id))

    release = _writing(writes.release)
    running = _reading(Reader.running)
    interrupt = _writing(writes.interrupt)
    cancel = _writing(writes.cancel)
    retry = _writing(writes.retry)

    async def wait_finished(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> tuple[str, ...]:
        wanted = frozenset(rollout_ids)
        waiter = _Waiter(wanted, len(wanted) if min_finished is None else min(min_finished, len(wanted)))
        self._waiters.add(waiter)
        try:
            waiter.add(await self.read(lambda db: self._reader.finished(db, tuple(wanted))))
            trouble = None if self._writer is None else self._writer.trouble
            if trouble is not None and not waiter.ready.is_set():  # no rollout ends where nothing is kept
                raise type(trouble)(str(trouble))
            if not self._closing:
                async with asyncio.timeout(wait_s):
                    await waiter.ready.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)
        return tuple(rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in waiter.finished)

    # ------------------------------------------------------------------ calls

    async def append_call(self, record: CallRecord) -> CallRecord | None:
        return (await self.append_calls((record,)))[0]

    async def append_calls(self, records: Sequence[CallRecord], tool_calls: Sequence[ToolCallRecord] = ()) -> tuple[CallRecord | None, ...]:
        if not records:
            return ()
        if len({(record.rollout_id, record.attempt) for record in records}) > 1:
            raise StoreError("append_calls got calls of several attempts; append them one attempt at a time")
        kept = await self._write(lambda tx: writes.append_calls(tx, records, tool_calls))
        place = records[0].rollout_id, records[0].attempt
        known = self._keys.get(place)
        if known is not None and not known[1].calls:
            self._keys[place] = known[0], replace(known[1], calls=1)
        return kept

    calls = _reading(Reader.attempt_calls)
    call_ids = _reading(Reader.call_ids)
    tool_call_ids = _reading(Reader.tool_call_ids)
    other_calls = _reading(Reader.attempt_other_calls)
    append_tool_calls = _writing(writes.append_tool_calls)
    append_other_calls = _writing(writes.append_other_calls)
    append_spans = _writing(writes.append_spans)

    # ------------------------------------------------------------------ rewards, scores, steps

    add_rewards = _writing(writes.add_rewards)
    set_scores = _writing(writes.set_scores)
    scores = _reading(Reader.scores)
    trajectories = _reading(read_trajectories)
    mark_trained = _writing(writes.mark_trained)
    rollback_steps = _writing(writes.rollback_steps)

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        count = 0
        while gone := await self._write(lambda tx: writes.forget_some(tx, through, slack)):  # others write between
            count += gone
        return count

    steps = _reading(Reader.steps)

    # ------------------------------------------------------------------ looking

    rollout = _reading(Reader.rollout)
    list_rollouts = _reading(Reader.list_rollouts)

    async def counts(self) -> StoreCounts:
        return await self.read(lambda db: self._reader.counts(db, self._late))

    async def authorise(self, rollout_id: str, attempt: int, key: str) -> AttemptInfo | None:
        known = None if self._database.is_shared else self._keys.get((rollout_id, attempt))
        if known is None:
            ended = self._ended
            found = await self.read(lambda db: self._reader.attempt_key(db, rollout_id, attempt))
            if found is None or found[1] is not None:
                return None
            known = found[0], found[2]
            if ended == self._ended and not self._database.is_shared:
                self._keys[rollout_id, attempt] = known
        return known[1] if hmac.compare_digest(known[0], _digest(key)) else None

    async def refusal(self, rollout_id: str, attempt: int, key: str) -> StoreError:
        found = await self.read(lambda db: self._reader.attempt_key(db, rollout_id, attempt))
        if found is None:
            return UnknownRecord(f"there is no attempt {attempt} of rollout {rollout_id!r}; lease one first")
        if not hmac.compare_digest(found[0], _digest(key)):
            return StoreError(f"wrong key for attempt {attempt} of rollout {rollout_id!r}; use the key of its lease")
        self._late += 1
        sentence = str(over(rollout_id, attempt, found[1] or "ended", "this request"))
        return AttemptOver(f"{sentence}; a process that is kept for later rollouts has the address of the one that started it")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
