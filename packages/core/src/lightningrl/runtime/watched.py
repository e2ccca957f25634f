"""One worker as the pool sees it, wherever it runs: its events, the attempts it holds, their deadlines."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from lightningrl.runtime.launcher import WorkerExit, WorkerLine
from lightningrl.runtime.settings import WorkerEvent, decode_event

__all__ = ["HeldAttempt", "WatchedWorker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldAttempt:
    """An attempt that a worker runs."""

    rollout_id: str
    attempt: int
    started_at: float
    """`time.monotonic()`"""
    limit_s: float

    @property
    def deadline(self) -> float:
        return self.started_at + self.limit_s


class WatchedWorker:
    """A running worker. Iterate over `events` until it ends or an attempt overruns its limit."""

    def __init__(self, line: WorkerLine, event_token: str) -> None:
        self._line = line
        self._event_token = event_token
        self.is_ready = False
        self.held: dict[tuple[str, int], HeldAttempt] = {}

    async def events(self) -> AsyncIterator[WorkerEvent]:
        """What the worker says. Ends when the worker ends, or when the time of an attempt is over (see `overdue`).

        Lines without its token are left out: half a line of a killed worker, and what the agent wrote into the pipe.
        """
        while True:
            deadline = min((held.deadline for held in self.held.values()), default=None)
            try:
                line = await asyncio.wait_for(self._line.read(), None if deadline is None else deadline - time.monotonic())
            except TimeoutError:
                return
            if not line:
                return
            try:
                event = decode_event(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if hmac.compare_digest(event.token.encode(), self._event_token.encode()):
                self._note(event)
                yield event

    def overdue(self) -> list[HeldAttempt]:
        """Attempts that run longer than they may."""
        now = time.monotonic()
        return [held for held in self.held.values() if held.deadline <= now]

    def stop(self) -> None:
        """Ask it to end after the attempt it runs."""
        self._line.write(b"stop\n")

    async def kill(self) -> WorkerExit:
        """End it and its children now."""
        return await self._line.kill()

    async def wait(self, timeout_s: float = 5.0) -> WorkerExit:
        """How it ended, once it has by itself; after `timeout_s` it is killed."""
        try:
            return await asyncio.wait_for(self._line.wait(), timeout_s)
        except TimeoutError:
            return await self._line.kill()

    def _note(self, event: WorkerEvent) -> None:
        key = (event.rollout_id, event.attempt)
        if event.kind == "ready":
            self.is_ready = True
        elif event.kind == "started":
            self.held[key] = HeldAttempt(
                rollout_id=event.rollout_id, attempt=event.attempt, started_at=time.monotonic(), limit_s=event.limit_s
            )
        elif event.kind == "finished":
            self.held.pop(key, None)
