"""The rollout that runs here, which each model call and each span asks for.

*Exclusive* (one rollout at a time in the process): the process has a current rollout, whatever thread or runtime the
agent uses. *Concurrent*: each context has its own. In both, a context that outlived its rollout (a task that the agent
left behind) has none. Only a bare thread that outlives its rollout in an exclusive process cannot be told from one of
the next; see `ThreadWatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import thread as executors
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightningrl_client.attribution.call_ids import CallLedger

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["ActiveRollout", "Report", "RolloutScope", "ThreadWatch"]


@dataclass(frozen=True, slots=True)
class Report:
    """A report of an agent on its rollout: one `POST {base URL}/{path}`."""

    path: Literal["rewards", "tool_calls"]
    body: dict[str, Any]
    """JSON"""


class ActiveRollout:
    """An attempt while it runs in this process: where its calls go, and what was seen of it."""

    def __init__(self, *, rollout_id: str, attempt: int, base_path: str, key: str) -> None:
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.base_path = base_path
        """`/rollouts/{id}/attempts/{n}/v1`"""
        self.key = key
        """Scoped to this attempt."""
        self.calls = CallLedger()
        self.spans: list[ReadableSpan] = []
        """Ended spans, in order of their end."""
        self.reports: list[Report] = []
        """The agent's own reports, to be handed in before its result."""
        self.connection_errors: list[BaseException] = []
        """Calls that the gateway did not answer."""
        self.unseen_hosts: set[str] = set()
        """Whose models it called past the gateway."""
        self.is_over = False

    def __repr__(self) -> str:
        return f"ActiveRollout({self.rollout_id!r}, attempt {self.attempt})"


class RolloutScope:
    """The current rollout of this process (exclusive) or of the current context (concurrent)."""

    def __init__(self, *, exclusive: bool = True) -> None:
        self.exclusive = exclusive
        self._process: ActiveRollout | None = None
        self._context: ContextVar[ActiveRollout | None] = ContextVar("lightningrl_rollout", default=None)

    def current(self) -> ActiveRollout | None:
        """The rollout that the caller works for; None = it works for no rollout, so its calls fail closed."""
        rollout = self._context.get()
        if self.exclusive and rollout is None:
            rollout = self._process
        return None if rollout is None or rollout.is_over else rollout

    def is_within(self) -> bool:
        """True if the caller's context was given a rollout, be it over or not."""
        return self._context.get() is not None

    def why_none(self) -> str:
        """Why the caller works for no rollout, and what to do: completes "this call belongs to no rollout: …"."""
        rollout = self._context.get()
        if rollout is not None:
            return (
                f"rollout {rollout.rollout_id!r}, which started the task or thread that makes it, is over; "
                "wait for what the agent starts before it returns, and start what serves several rollouts at import"
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


class ThreadWatch:
    """Bare threads that a rollout starts and leaves running: their later calls are recorded under the next rollouts.

    An executor's threads are none of them: each of their jobs knows its rollout.
    """

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def left_behind(self) -> list[str]:
        """Names of those that were started since, and still run."""
        of_executors: set[threading.Thread] = set(executors._threads_queues)
        bare = set(threading.enumerate()) - self._before - of_executors
        return sorted(thread.name for thread in bare)
