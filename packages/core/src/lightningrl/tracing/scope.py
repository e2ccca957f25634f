"""Which rollout is running here: the question that each model call and each span asks.

*Exclusive* (one rollout at a time in the process): the process has a current rollout, whatever thread, task or shared runtime the
agent uses. *Concurrent*: each context has its own; a context that outlived its rollout has none. Neither is ever guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lightningrl.tracing.calls import CallLedger
from lightningrl.tracing.report import Report

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["ActiveRollout", "RolloutScope"]


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
        """Of the agent's own, to be handed in before its result."""
        self.connection_errors: list[BaseException] = []
        """Calls that the gateway did not answer."""
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
        rollout = self._process if self.exclusive else self._context.get()
        return None if rollout is None or rollout.is_over else rollout

    @contextmanager
    def entered(self, rollout: ActiveRollout) -> Iterator[ActiveRollout]:
        """Make `rollout` the current one; afterwards it is over for good, in contexts that were copied from this one as well."""
        if self.exclusive and self._process is not None:
            raise RuntimeError(f"cannot enter {rollout!r}: {self._process!r} is running in this exclusive process; run one at a time")
        token = self._context.set(rollout)
        if self.exclusive:
            self._process = rollout
        try:
            yield rollout
        finally:
            rollout.is_over = True
            self._process = None if self.exclusive else self._process
            self._context.reset(token)
