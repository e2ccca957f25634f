"""One worker process as the pool sees it: spawned, listened to, killed with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from lightningrl.runtime.settings import WorkerEvent, WorkerSettings, decode_event, encode_line

__all__ = ["HeldAttempt", "WorkerProcess", "open_log"]


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


class WorkerProcess:
    """A running worker. `spawn` it; iterate over `events` until it ends or an attempt overruns its limit."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_ready = False
        self.held: dict[tuple[str, int], HeldAttempt] = {}

    @classmethod
    async def spawn(cls, settings: WorkerSettings, *, environment: Mapping[str, str], log: IO[bytes] | None) -> WorkerProcess:
        """Start `python -m lightningrl.runtime.worker` in a session of its own, so that it and its children can be killed together."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lightningrl.runtime.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=dict(environment),
            cwd=settings.base_dir,
            start_new_session=True,
        )
        worker = cls(process)
        worker._command(encode_line(settings))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def events(self) -> AsyncIterator[WorkerEvent]:
        """What the worker says. Ends when the process ends, or when the time of an attempt is over (see `overdue`)."""
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            deadline = min((held.deadline for held in self.held.values()), default=None)
            try:
                line = await asyncio.wait_for(stdout.readline(), None if deadline is None else deadline - time.monotonic())
            except TimeoutError:
                return
            if not line:
                return
            with contextlib.suppress(msgspec.MsgspecError):  # half a line of a killed worker
                event = decode_event(line)
                self._note(event)
                yield event

    def overdue(self) -> list[HeldAttempt]:
        """Attempts that run longer than they may."""
        now = time.monotonic()
        return [held for held in self.held.values() if held.deadline <= now]

    def stop(self) -> None:
        """Ask it to end after the attempt it runs."""
        self._command(b"stop\n")

    async def kill(self) -> int:
        """End it and its children now. Returns its exit status; negative = the signal that ended it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return await self._process.wait()

    async def wait(self, timeout_s: float = 5.0) -> int:
        """Its exit status, once it has ended by itself; after `timeout_s` it is killed."""
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            return await self.kill()

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

    def _command(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone; `events` says so
            stdin.write(line)


@contextlib.contextmanager
def open_log(folder: Path | None, index: int) -> Iterator[IO[bytes] | None]:
    """Where worker `index` writes its log; None = to our own stderr."""
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"worker-{index}.log").open("ab") as log:
        yield log
