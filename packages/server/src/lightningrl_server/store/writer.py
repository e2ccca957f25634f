"""Group commit: one thread writes, and everything that arrived while the disk was busy shares the next commit.

    await submit(op) ─► queue ─► [BEGIN · op op op … · COMMIT] ─► events, then results, on the caller's loop

An operation that raises undoes the whole group; its members then run again one by one, each in a transaction of its
own, so that it fails alone. Operations are therefore functions of the database and their arguments only.

`StorePart` is what queue, call log, ledger and look share: this writer, and threads that read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sqlalchemy import Connection

from lightningrl.errors import StoreError
from lightningrl_server.store.databases import READERS, Database, Event
from lightningrl_server.store.errors import AttemptOver, StoreTrouble
from lightningrl_server.store.reader import Reader
from lightningrl_server.store.transaction import Transaction

__all__ = ["StorePart", "Writer", "reading", "reading_attempt", "writing"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_MOST_PER_GROUP = 512
_LINGER_S = 0.004
_PATIENCE_S = 30.0
"""Seconds that a database that went away is waited for: as long as a restart of its server takes."""
_PAUSE_S = 0.2
_LONG_S = 60.0
"""Seconds without a single commit after which trouble is not passing."""


def patiently(database: Database, work: Callable[[], T]) -> T:
    """Return `work()`; where the database went away, do it again once that is back."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return work()
        except database.errors as error:
            if not database.is_lost(error) or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)
        with contextlib.suppress(*database.errors):
            database.regain()


@dataclass(slots=True)
class _Job(Generic[T]):
    op: Callable[[Transaction], T]
    future: asyncio.Future[T]
    orphaned: Callable[[T], None] | None
    """Called on the loop with the result where the caller was cancelled after it had been kept."""
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Runs operations in a thread; made and used on one event loop."""

    def __init__(
        self, database: Database, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[Event]], None]
    ) -> None:
        self._database = database
        self._loop = loop
        self._on_events = on_events
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self.trouble: StoreTrouble | None = None
        """Trouble of a database that has kept nothing for long, whoever asked."""
        self._failing_since: float | None = None
        self._taken: list[_Job[Any]] = []
        self._never = threading.Event()
        self._closed = False
        self._last_size = 0
        self._thread = threading.Thread(target=self._run, name="lightningrl-store-writer", daemon=True)
        self._thread.start()

    def submit(self, op: Callable[[Transaction], T], orphaned: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """Queue an operation; the future resolves once its commit is on disk, or raises what the operation raised."""
        if self._closed:
            raise StoreTrouble(f"the store {self._database.name!r} is closed; open it again")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(op, future, orphaned))
        return future

    async def close(self) -> None:
        """Finish what was submitted and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            logger.critical("store %s: its writer has ended", self._database.name, exc_info=error)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                self._loop.call_soon_threadsafe(self._give_up, f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        """Refuse all that wait, and all that come."""
        self._closed = True
        left = list(self._taken)
        while not self._jobs.empty():
            left += [job for job in [self._jobs.get_nowait()] if job is not None]
        for job in left:
            if not job.future.done():
                message = f"the writer of the store {self._database.name!r} has ended ({why}); open it again"
                job.future.set_exception(StoreTrouble(message))

    def _write(self) -> None:
        transaction = Transaction(self._database)
        open_ = True
        while open_:
            group, open_ = self._next_group()
            if group:
                events = self._commit(transaction, group)
                try:
                    self._loop.call_soon_threadsafe(self._resolve, group, events)
                except RuntimeError:  # the loop closed before the store: nobody is left to tell
                    logger.warning("store %s: the event loop closed before %d results", self._database.name, len(group))
        transaction.close()

    def _next_group(self) -> tuple[list[_Job[Any]], bool]:
        """Take what waits, and, where the last group had several members, what comes within `_LINGER_S`: under load
        fewer, larger commits cost less; a caller on its own does not wait."""
        job = self._jobs.get()
        self._taken = [] if job is None else [job]
        if job is not None and self._last_size > 1:
            # Not for the next job: to be woken by each costs as much as the job.
            # And no sleep(), which minds a clock that jumps.
            self._never.wait(_LINGER_S)
        self._taken = group = list[_Job[Any]]()
        while job is not None:
            if not job.future.cancelled():
                group.append(job)
            if len(group) >= _MOST_PER_GROUP:
                return group, True
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
        else:
            return group, False
        self._last_size = len(group)
        return group, True

    def _commit(self, transaction: Transaction, group: Sequence[_Job[Any]]) -> list[Event]:
        """Run a group in one commit, or each of it in one of its own where that fails; returns the events."""
        has_begun = False

        def work() -> None:
            nonlocal has_begun
            has_begun = False
            with transaction.begin():
                has_begun = True
                for job in group:
                    job.result = job.op(transaction)

        try:
            patiently(self._database, work)
            return transaction.take_events()
        except Exception as error:
            if len(group) == 1 or not has_begun:  # a database in use was waited for already, for all of them
                explained = self._database.explain(error)
                if not isinstance(explained, StoreError):
                    logger.error("store %s: an operation failed", self._database.name, exc_info=error)
                for job in group:
                    job.error = explained
                return []
        return [event for job in group for event in self._commit(transaction, [job])]

    def _note_trouble(self, group: Sequence[_Job[Any]]) -> None:
        """Note since when nothing is kept; a commit ends all trouble."""
        troubles = [job.error for job in group if isinstance(job.error, StoreTrouble)]
        if len(troubles) < len(group):
            self.trouble = self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= _LONG_S:
            self.trouble = troubles[-1]

    def _resolve(self, group: Sequence[_Job[Any]], events: list[Event]) -> None:
        self._note_trouble(group)
        if events:
            self._on_events(events)
        for job in group:
            if job.future.cancelled():
                if job.error is None and job.orphaned is not None:
                    job.orphaned(job.result)
            elif job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.result)


class StorePart:
    """One store's database, writer and reading threads, for the parts that a store is made of."""

    def __init__(self, database: Database, *, read_only: bool = False) -> None:
        self._database = database
        self._reader = Reader()
        self._readers = ThreadPoolExecutor(READERS, "lightningrl-store-reader")
        self._loop = asyncio.get_running_loop()
        self._writer = None if read_only else Writer(database, self._loop, self._on_events)
        self._late = 0
        """Calls and results refused because their attempt was over."""
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _write(self, op: Callable[[Transaction], T], orphaned: Callable[[T], None] | None = None) -> T:
        if self._writer is None:
            raise StoreError(f"the store {self._database.name!r} is open for reading only; open it without read_only")
        try:
            return await self._writer.submit(op, orphaned)
        except AttemptOver:
            self._late += 1
            raise

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query in a reading thread, in a read-only transaction."""

        def ask() -> T:
            with self._database.reading.connect() as db, db.begin():
                return query(db)

        def run() -> T:
            try:
                return patiently(self._database, ask)
            except self._database.errors as error:
                raise self._database.explain(error) from error

        if self._closing:
            raise StoreTrouble(f"the store {self._database.name!r} is closed; open it again")
        return await self._loop.run_in_executor(self._readers, run)

    async def close(self) -> None:
        self._closing = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            await self._writer.close()
            await asyncio.sleep(0)  # the last results
        self._readers.shutdown()
        self._database.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_events(self, events: Sequence[Event]) -> None:
        """Take note of a commit, here before its results are handed out, or in another server. Parts add to it."""


def writing(
    op: Callable[Concatenate[Transaction, P], T],
) -> Callable[Concatenate[StorePart, P], Coroutine[Any, Any, T]]:
    """Make the method of a part that does `op` in a transaction."""

    async def method(self: StorePart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._write(lambda tx: op(tx, *args, **kwargs))

    return method


def reading_attempt(
    query: Callable[[Reader, Connection, int], T],
) -> Callable[[StorePart, str, int], Coroutine[Any, Any, T]]:
    """Make the method of a part that asks `query` of an attempt, by rollout and number. Raises UnknownRecord."""

    async def method(self: StorePart, rollout_id: str, attempt: int) -> T:
        reader = self._reader
        return await self.read(lambda db: query(reader, db, reader.attempt_pk(db, rollout_id, attempt)))

    return method


def reading(
    query: Callable[Concatenate[Reader, Connection, P], T],
) -> Callable[Concatenate[StorePart, P], Coroutine[Any, Any, T]]:
    """Make the method of a part that asks `query`."""

    async def method(self: StorePart, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.read(lambda db: query(self._reader, db, *args, **kwargs))

    return method
