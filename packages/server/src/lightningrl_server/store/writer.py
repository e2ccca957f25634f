"""Group commit: one thread writes, and everything that arrived while the disk was busy shares the next commit.

    await submit(op) ─► queue ─► [BEGIN · op op op … · COMMIT] ─► events, then results, on the caller's loop

An operation that raises undoes the whole group; its members then run again one by one, each in a transaction of its own,
so that it fails alone. Operations are therefore functions of the database and their arguments only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightningrl.errors import StoreError
from lightningrl_server.store.dialects import Database, explain, patiently
from lightningrl_server.store.errors import StoreTrouble
from lightningrl_server.store.events import Event
from lightningrl_server.store.transaction import Transaction

__all__ = ["Writer"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_PER_GROUP = 512
_LINGER_S = 0.004
_LONG_S = 60.0
"""Without a single commit: no passing trouble."""


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    op: Callable[[Transaction], T]
    future: asyncio.Future[T]
    orphaned: Callable[[T], None] | None
    """Called on the loop with the result where the caller was cancelled after it had been kept."""


@dataclass(frozen=True, slots=True)
class _JobResult:
    job: _Job[Any]
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Runs operations in a thread; made and used on one event loop."""

    def __init__(self, database: Database, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[Event]], None]) -> None:
        self._database = database
        self._loop = loop
        self._on_events = on_events
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self.trouble: StoreTrouble | None = None
        """Of a database that has kept nothing for long, whoever asked."""
        self._failing_since: float | None = None
        self._taken: list[_Job[Any]] = []
        self._never = threading.Event()
        self._closed = False
        self._last_size = 0
        self._thread = threading.Thread(target=self._run, name="lightningrl-store-writer", daemon=True)
        self._thread.start()

    def submit(self, op: Callable[[Transaction], T], orphaned: Callable[[T], None] | None = None) -> asyncio.Future[T]:
        """The future resolves once the operation's commit is on disk, or raises what the operation raised."""
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
        """Tell all that wait, and all that come."""
        self._closed = True
        left = list(self._taken)
        while not self._jobs.empty():
            left += [job for job in [self._jobs.get_nowait()] if job is not None]
        for job in left:
            if not job.future.done():
                job.future.set_exception(StoreTrouble(f"the writer of the store {self._database.name!r} has ended ({why}); open it again"))

    def _write(self) -> None:
        transaction = Transaction(self._database)
        open_ = True
        while open_:
            group, open_ = self._next_group()
            if group:
                done, events = self._commit(transaction, group)
                try:
                    self._loop.call_soon_threadsafe(self._resolve, done, events)
                except RuntimeError:  # the loop closed before the store: nobody is left to tell
                    logger.warning("store %s: the event loop closed before %d results", self._database.name, len(done))
        transaction.close()

    def _next_group(self) -> tuple[list[_Job[Any]], bool]:
        """What is there, and, where the last group had several members, what comes within `_LINGER_S`: under load fewer, larger commits
        cost less; a caller on its own is not kept waiting."""
        job = self._jobs.get()
        self._taken = [] if job is None else [job]
        if job is not None and self._last_size > 1:
            # Not for the next job: to be woken by each costs as much as the job. And no sleep(), which minds a clock that jumps.
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

    def _commit(self, transaction: Transaction, group: list[_Job[Any]]) -> tuple[list[_JobResult], list[Event]]:
        has_begun = False

        def work() -> list[_JobResult]:
            nonlocal has_begun
            has_begun = False
            with transaction.begin():
                has_begun = True
                return [_JobResult(job, job.op(transaction)) for job in group]

        try:
            return patiently(self._database, work), transaction.take_events()
        except Exception as error:  # noqa: BLE001  (whatever an operation raises is its caller's, not the thread's)
            if len(group) == 1 or not has_begun:  # a database in use was waited for already, for all of them
                explained = self._explained(error)
                return [_JobResult(job, error=explained) for job in group], []
        done, events = [], []
        for job in group:
            some_done, some_events = self._commit(transaction, [job])
            done += some_done
            events += some_events
        return done, events

    def _explained(self, error: Exception) -> Exception:
        explained = explain(error, self._database)
        if not isinstance(explained, StoreError):
            logger.error("store %s: an operation failed", self._database.name, exc_info=error)
        return explained

    def _note_trouble(self, done: list[_JobResult]) -> None:
        """A commit ends all trouble."""
        troubles = [one.error for one in done if isinstance(one.error, StoreTrouble)]
        if len(troubles) < len(done):
            self.trouble = self._failing_since = None
            return
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= _LONG_S:
            self.trouble = troubles[-1]

    def _resolve(self, done: list[_JobResult], events: list[Event]) -> None:
        self._note_trouble(done)
        self._on_events(events)
        for one in done:
            if one.job.future.cancelled():
                if one.error is None and one.job.orphaned is not None:
                    one.job.orphaned(one.result)
            elif one.error is not None:
                one.job.future.set_exception(one.error)
            else:
                one.job.future.set_result(one.result)
