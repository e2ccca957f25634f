"""The queue: who works on what, waiting for work and for results, and the clock of leases."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, select

from lightningrl.errors import StoreError
from lightningrl.records import Lease, RunningAttempt
from lightningrl.types import Outcome, RolloutState
from lightningrl_server.records import AttemptEnd, AttemptInfo
from lightningrl_server.store import queue_writes
from lightningrl_server.store.call_log import key_digest
from lightningrl_server.store.databases import LOOK_S, Database, EndEvent, Event, LeaseEvent, QueueEvent
from lightningrl_server.store.errors import AttemptOver, UnknownRecord
from lightningrl_server.store.reader import Reader, chunks, decode_task, same_columns
from lightningrl_server.store.tables import attempts, rollouts
from lightningrl_server.store.transaction import Transaction
from lightningrl_server.store.writer import StorePart, reading, writing

__all__ = ["SqlQueue"]

logger = logging.getLogger(__name__)

_LOOK_AT_OTHERS_S = 5.0
"""Time between two looks at leases that other servers of the store gave: one of them may be gone."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A caller of `wait_finished`."""

    wanted: frozenset[str]
    enough: int
    finished: set[str] = field(default_factory=set[str])
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, rollout_ids: set[str]) -> None:
        self.finished |= rollout_ids & self.wanted
        if len(self.finished) >= self.enough:
            self.ready.set()


def _read_running(_: Reader, db: Connection, workers: str) -> tuple[RunningAttempt, ...]:
    columns = rollouts.c.id, rollouts.c.timeout_s, attempts.c.number, attempts.c.worker_id
    running = select(*columns).join(rollouts, rollouts.c.pk == attempts.c.rollout_pk)
    return tuple(
        RunningAttempt(rollout_id=row.id, attempt=row.number, worker_id=row.worker_id, timeout_s=row.timeout_s)
        for row in db.execute(running.where(attempts.c.outcome.is_(None)))
        if row.worker_id.startswith(workers)
    )


class SqlQueue(StorePart):
    """`lightningrl_server.store.protocol.Queue`."""

    def __init__(self, database: Database, *, read_only: bool = False) -> None:
        super().__init__(database, read_only=read_only)
        self._queued = asyncio.Event()
        """Set once a rollout is queued; the next one has an event of its own."""
        self._waiters: set[_Waiter] = set()
        self._next_expiry: float | None = 0.0
        self._expiry_changed = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        if not read_only:
            self._spawn(self._sweep())
        if database.is_shared:
            self._listening = self._loop.create_task(self._listen())

    create_rollouts = writing(queue_writes.create_rollouts)
    release = writing(queue_writes.release)
    interrupt = writing(queue_writes.interrupt)
    cancel = writing(queue_writes.cancel)
    retry = writing(queue_writes.retry)
    running = reading(_read_running)

    async def lease(
        self, worker_id: str, lease_s: float, wait_s: float = 0.0, *, exclusive: bool = False
    ) -> Lease | None:
        until = self._loop.time() + wait_s
        while not self._closing:
            queued = self._queued
            leasing = _leasing(worker_id, lease_s, await self._now(), exclusive=exclusive)
            lease = await self._write(leasing, self._take_back)
            left = until - self._loop.time()
            if lease is not None or left <= 0:
                return lease
            try:
                async with asyncio.timeout(left):
                    await queued.wait()
            except TimeoutError:
                return None
        return None

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float, worker_id: str | None = None) -> bool:
        now = await self._now()
        return await self._write(lambda tx: queue_writes.heartbeat(tx, rollout_id, attempt, lease_s, now, worker_id))

    async def finish_attempt(
        self,
        rollout_id: str,
        attempt: int,
        outcome: Outcome,
        output: Any = None,
        error: str | None = None,
        duration_s: float = 0.0,
    ) -> RolloutState:
        end = AttemptEnd(outcome=outcome, output=output, error=error, duration_s=duration_s)
        return (await self.finish_and_lease(rollout_id, attempt, end, None))[0]

    async def finish_and_lease(
        self, rollout_id: str, attempt: int, end: AttemptEnd, worker_id: str | None, lease_s: float = 60.0
    ) -> tuple[RolloutState, Lease | None]:
        leasing = None if worker_id is None else _leasing(worker_id, lease_s, await self._now(), exclusive=True)

        def op(tx: Transaction) -> tuple[RolloutState, Lease | None, AttemptOver | None]:
            state, is_first, refusal = queue_writes.finish(tx, rollout_id, attempt, end)
            return state, leasing(tx) if is_first and leasing is not None else None, refusal

        state, lease, refusal = await self._write(op, lambda result: self._take_back(result[1]))
        if refusal is not None:  # it is counted beside the attempt, so the transaction was kept
            self._late += 1
            raise refusal
        return state, lease

    def _take_back(self, lease: Lease | None) -> None:
        """Release a lease for which nobody waits any more."""
        if lease is not None and not self._closing:
            self._spawn(self.release(lease.rollout_id, lease.attempt))

    async def wait_finished(
        self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None
    ) -> tuple[str, ...]:
        wanted = frozenset(rollout_ids)
        waiter = _Waiter(wanted, len(wanted) if min_finished is None else min(min_finished, len(wanted)))
        self._waiters.add(waiter)
        try:
            waiter.add(await self.read(lambda db: _read_finished(db, tuple(wanted))))
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

    async def close(self) -> None:
        """Wake everybody who waits, end the sweep, finish what was accepted."""
        if self._closing:
            return
        self._closing = True
        self._expiry_changed.set()
        for waiter in self._waiters:
            waiter.ready.set()
        self._queued.set()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
        await super().close()

    # ------------------------------------------------------------------ events and clocks

    def _on_events(self, events: Sequence[Event]) -> None:
        super()._on_events(events)
        finished: set[str] = set()
        for event in events:
            match event:
                case EndEvent(rollout_id=rollout_id, state=RolloutState.SUCCEEDED | RolloutState.FAILED):
                    finished.add(rollout_id)
                case LeaseEvent(expires_at=expires_at):
                    if self._next_expiry is None or expires_at < self._next_expiry:
                        self._next_expiry = expires_at
                        self._expiry_changed.set()
                case QueueEvent():
                    self._queued.set()
                    self._queued = asyncio.Event()
        if finished:
            for waiter in self._waiters:
                waiter.add(finished)

    async def _listen(self) -> None:
        """Take note of other servers' commits as if they were made here."""
        async for events in self._database.listen():
            if events is not None:
                self._on_events(events)
                continue
            self._on_events([QueueEvent()])
            for waiter in tuple(self._waiters):
                wanted = tuple(waiter.wanted)
                try:
                    waiter.add(await self.read(lambda db: _read_finished(db, wanted)))  # noqa: B023  awaited
                except StoreError as error:
                    logger.warning("%s", error)

    async def _now(self) -> float:
        """The time by the clock of leases. Where this process alone stood still, leases nobody could renew go on."""
        if self._database.has_stood_still():
            await self._write(lambda tx: self._database.renew(tx.db))  # what is asked later is done later
        return self._database.now()

    async def _sweep(self) -> None:
        """End attempts whose lease is over, as soon as it is."""
        while not self._closing:
            try:
                now = await self._now()
                if self._next_expiry is not None and self._next_expiry <= now:
                    # other servers' leases are not told
                    self._next_expiry = now + _LOOK_AT_OTHERS_S if self._database.is_shared else None
                    soonest = await self._write(lambda tx: queue_writes.expire(tx, now))  # noqa: B023  awaited
                    # A lease given in the same commit, after `expire`, has been noted meanwhile.
                    instants = (instant for instant in (soonest, self._next_expiry) if instant is not None)
                    self._next_expiry = min(instants, default=None)
            except StoreError:
                now = self._database.now()
                self._next_expiry = now + 1.0  # no room, perhaps: the next lease tries again too
            self._expiry_changed.clear()
            if self._closing:
                return
            left = LOOK_S / 2
            if self._next_expiry is not None:
                left = max(0.005, min(self._next_expiry - now, left))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._expiry_changed.wait(), left)


def _leasing(worker_id: str, lease_s: float, now: float, *, exclusive: bool) -> Callable[[Transaction], Lease | None]:
    """Make an operation that leases."""
    key = secrets.token_urlsafe(24)
    digest = key_digest(key)

    def op(tx: Transaction) -> Lease | None:
        row = queue_writes.lease(tx, worker_id, digest, lease_s, now, exclusive=exclusive)
        if row is None:
            return None
        of_rollout = same_columns(row, AttemptInfo, but=("rollout_id", "attempt", "calls"))
        tx.begun(digest, AttemptInfo(rollout_id=row.id, attempt=row.number, **of_rollout))
        return Lease(
            rollout_id=row.id,
            attempt=row.number,
            task=replace(decode_task(row.body), answer=None),
            mode=row.mode,
            key=key,
            expires_at=now + lease_s,
            timeout_s=row.timeout_s,
        )

    return op


def _read_finished(db: Connection, rollout_ids: Sequence[str]) -> set[str]:
    """Read which of them succeeded or failed. Raises UnknownRecord."""
    states: dict[str, RolloutState] = {}
    for ids in chunks(rollout_ids):
        rows = db.execute(select(rollouts.c.id, rollouts.c.state).where(rollouts.c.id.in_(ids)))
        states |= {row.id: row.state for row in rows}
    for rollout_id in rollout_ids:
        if rollout_id not in states:
            raise UnknownRecord(f"no rollout {rollout_id!r} to wait for; create it first")
    ended = RolloutState.SUCCEEDED, RolloutState.FAILED
    return {rollout_id for rollout_id, state in states.items() if state in ended}
