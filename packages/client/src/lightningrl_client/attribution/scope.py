"""The rollout that runs here, which each model call and each span asks for; and one id per logical model call of it.

*Exclusive* (one rollout at a time in the process): the process has a current rollout, whatever thread or runtime the
agent uses. *Concurrent*: each context has its own. In both, a context that outlived its rollout (a task that the agent
left behind) has none. Only a bare thread that outlives its rollout in an exclusive process cannot be told from one of
the next; see `ThreadWatch`. And a task that one rollout starts and others use works for the one that started it, as
long as that runs: where it goes on after its rollout, the calls in it are not known to be the rollout's; see `Work`.
A thread that gathers jobs of several rollouts and asks for all of them in the context of one cannot be told.

A call's id is the same on every retry of it, so that the gateway records the call once. A request that failed (an
exception, or a status of 400 and more) gives its id back, and the next request of the same rollout with the same body
takes it up again: that is the retry, whoever makes it (the SDK, the user's own loop), with or without
`x-stainless-retry-count`. A request whose answer came has used its id up: asking the same thing again is a new sample.
A forked process starts its own ledger: what it asks is never a retry of its parent's or siblings'.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["ActiveRollout", "CallLedger", "ClaimedCall", "Report", "RolloutScope", "ThreadWatch", "Work"]


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A request's place in the ledger."""

    id: str
    body: bytes
    """Digest of the request body."""


class CallLedger:
    """The call ids of one attempt. Safe to use from several threads."""

    def __init__(self) -> None:
        self._start_empty()
        _ledgers.add(self)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._name = token_hex(4)
        """Tells the ids of this ledger from those of its copies in other processes."""
        self._issued = 0
        self._returned: defaultdict[bytes, list[str]] = defaultdict(list)
        self._latest: dict[bytes, str] = {}

    def claim(self, body: bytes, *, is_retry: bool = False) -> ClaimedCall:
        """The id for a request with this body. `is_retry` = the SDK says that it re-sends."""
        digest = blake2b(body, digest_size=8).digest()
        with self._lock:
            if self._returned[digest]:
                return ClaimedCall(self._returned[digest].pop(), digest)
            if is_retry and digest in self._latest:
                return ClaimedCall(self._latest[digest], digest)
            self._issued += 1
            self._latest[digest] = f"{self._name}-{self._issued}-{digest.hex()}"
            return ClaimedCall(self._latest[digest], digest)

    def give_back(self, call: ClaimedCall) -> None:
        """The request failed: its retry is the same call."""
        with self._lock:
            self._returned[call.body].append(call.id)


_ledgers: WeakSet[CallLedger] = WeakSet()


os.register_at_fork(after_in_child=lambda: [*map(CallLedger._start_empty, _ledgers)])


@dataclass(frozen=True, slots=True)
class Report:
    """A report of an agent on its rollout: one `POST {base URL}/{path}`."""

    path: Literal["rewards", "tool_calls"]
    body: dict[str, Any]
    """JSON"""


class ThreadWatch:
    """Bare threads that a rollout starts and leaves running: their later calls are recorded under the next rollouts. An
    executor's threads are none of them: each of their jobs knows its rollout."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def has(self, thread: threading.Thread) -> bool:
        """True if it is bare and was started since."""
        return thread not in self._before and thread not in executors._threads_queues

    def left_behind(self) -> list[str]:
        """Names of those that were started since, and still run."""
        return sorted(thread.name for thread in threading.enumerate() if self.has(thread))


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class ActiveRollout:
    """An attempt while it runs in this process: where its calls go, and what was seen of it."""

    rollout_id: str
    attempt: int
    base_path: str
    """`/rollouts/{id}/attempts/{n}/v1`"""
    key: str
    """Scoped to this attempt."""
    calls: CallLedger = field(default_factory=CallLedger)
    spans: list[ReadableSpan] = field(default_factory=list)
    """Ended spans, in order of their end."""
    reports: list[Report] = field(default_factory=list[Report])
    """The agent's own reports, to be handed in before its result."""
    connection_errors: list[BaseException] = field(default_factory=list[BaseException])
    """Calls that the gateway did not answer."""
    unseen_hosts: set[str] = field(default_factory=set[str])
    """Whose models it called past the gateway."""
    threads: ThreadWatch = field(default_factory=ThreadWatch)
    asked: set[str] = field(default_factory=set[str])
    """Ids of its calls, where several rollouts run in the process."""
    works: WeakSet[Work] = field(default_factory=WeakSet["Work"])
    """Tasks, jobs, threads and processes that it started and that called models, or may have, where several do."""
    programs: dict[int, str] = field(default_factory=dict[int, str])
    """Names by pid of programs that it started with its key, where several rollouts run in the process."""
    is_over: bool = False

    def __repr__(self) -> str:
        return f"ActiveRollout({self.rollout_id!r}, attempt {self.attempt})"


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Work:
    """A task, an executor's job, a thread or a process that a rollout started. One that outlives it may have called
    models for other rollouts as well. It is kept by the contexts that it runs in, and over where none is left."""

    name: str
    """`task 'serve'`, `process 'ForkProcess-1'`"""
    rollout: ActiveRollout
    calls: set[str] = field(default_factory=set[str])
    """Ids of those that were made within it."""
    doer: Callable[[], Any] = lambda: None
    is_done: Callable[[], bool] = lambda: False

    def watch(self, doer: Any, is_done: Callable[[Any], bool] = lambda future: future.done()) -> None:
        """Take that task's, future's, thread's or process's end for its own."""
        self.doer = seen = weakref.ref(doer)
        self.is_done = lambda: (there := seen()) is None or is_done(there)


class RolloutScope:
    """The current rollout of this process (exclusive) or of the current context (concurrent)."""

    def __init__(self, *, exclusive: bool = True) -> None:
        self.exclusive = exclusive
        self._process: ActiveRollout | None = None
        self._context: ContextVar[ActiveRollout | None] = ContextVar("lightningrl_rollout", default=None)
        self._works: ContextVar[tuple[Work, ...]] = ContextVar("lightningrl_works", default=())
        self.works_of_others: WeakKeyDictionary[Any, Work] = WeakKeyDictionary()
        """Work of processes, and of tasks whose context is not ours to make."""

    def current(self) -> ActiveRollout | None:
        """The rollout that the caller works for; None = it works for no rollout, so its calls fail closed."""
        rollout = self._context.get()
        if self.exclusive and rollout is None:
            rollout = self._process
        return None if rollout is None or rollout.is_over else rollout

    def begin_work(self, name: str) -> tuple[Context, Work | None]:
        """The context for a task or job that the caller starts; with it, where several rollouts run in this process and
        the caller works for one of them, its record: to be told what it watches."""
        context, rollout = copy_context(), None if self.exclusive else self.current()
        if rollout is None:
            return context, None
        work = Work(name=name, rollout=rollout)
        around = (outer for outer in self._works_here(rollout) if not outer.is_done())
        context.run(self._works.set, (*around, work))
        return context, work

    def note_call(self, rollout: ActiveRollout, call_id: str) -> None:
        """Note that the caller asks a model for the rollout, and within which work of it."""
        if self.exclusive:
            return
        rollout.asked.add(call_id)
        for work in self._works_here(rollout):
            if work.rollout is rollout:
                rollout.works.add(work)
                work.calls.add(call_id)

    def _works_here(self, rollout: ActiveRollout) -> tuple[Work, ...]:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        if task is not None:
            work = self.works_of_others.get(task)
            return self._works.get() if work is None else (*self._works.get(), work)
        # a bare thread that was given this context: its work as long as it stays in it
        thread, works = threading.current_thread(), self._works.get()
        if rollout.threads.has(thread) and not any(work.doer() is thread for work in works):
            work = Work(name=f"thread {thread.name!r}", rollout=rollout)
            work.watch(thread, lambda thread: not thread.is_alive())
            self._works.set((*works, work))
        return self._works.get()

    def is_within(self) -> bool:
        """True if the caller's context was given a rollout, be it over or not."""
        return self._context.get() is not None

    def why_none(self) -> str:
        """Why the caller works for no rollout, and what to do: completes "this call belongs to no rollout: …"."""
        rollout = self._context.get()
        if rollout is not None:
            return (
                f"rollout {rollout.rollout_id!r}, which started the task or thread that makes it, is over; "
                "wait for what the agent starts before it returns, and let each rollout start its own"
            )
        if self.exclusive:
            return "no rollout runs in this process now; call the model inside of the agent's function"
        return (
            "it comes from a bare thread or a task that no rollout started, and runtime.concurrency is more than 1; "
            "use ThreadPoolExecutor or asyncio.to_thread, which know the rollout, or set runtime.concurrency = 1"
        )

    @contextmanager
    def entered(self, rollout: ActiveRollout) -> Iterator[ActiveRollout]:
        """Make `rollout` the current one; afterwards it is over for good, in copies of this context too."""
        if self.exclusive and self._process is not None:
            raise RuntimeError(
                f"cannot enter {rollout!r}: {self._process!r} is running in this exclusive process; run one at a time"
            )
        token = self._context.set(rollout)
        if self.exclusive:
            self._process = rollout
        try:
            yield rollout
        finally:
            rollout.is_over = True
            self._process = None if self.exclusive else self._process
            self._context.reset(token)
