"""A worker's process: spawned, waited for, killed with everything that it started; its log; and its ties to its
supervisor: a pipe that ends with it, and a line for its first words.

The first words are the worker's: they are said before the agent runs, and nothing that is said later is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, BinaryIO, Final, Self

import msgspec

from lightningrl.processes import MARK, kill_descendants, make_mark, open_private
from lightningrl_client.runtime.environment import worker_environment
from lightningrl_client.runtime.settings import WorkerSettings

__all__ = [
    "LOST_STATUS",
    "WorkerProcess",
    "bound_log",
    "describe_exit",
    "die_with_pipe",
    "kill_own_group",
    "say_first",
    "take_stdin",
]

MOST_LOG_BYTES: Final = 64 * 2**20
KEPT_LOG_BYTES: Final = 2**20
"""The end of a log that was cut."""
LOG_PAUSE_S: Final = 1.0
"""Between two looks at a log's size."""
STDERR: Final = 2


class WorkerProcess:
    """A worker process of this one. When it ends, however it ends, all that it started ends with it."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes] | None, first_words: int, mark: str) -> None:
        self.pid = process.pid
        self.failure = ""
        """Once it has ended: why it could not begin."""
        self._first_words = first_words
        self._mark = mark
        self._process = process
        self._log = log
        loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = loop.create_future()
        self._lock = threading.Lock()
        self._is_reaped = False
        self._life = asyncio.create_task(self._live(), name=f"life of process {process.pid}")
        threading.Thread(target=self._reap, args=(loop,), name="worker-reaper", daemon=True).start()

    @classmethod
    def spawn(cls, settings: WorkerSettings, environment: Mapping[str, str], log: Path | None) -> Self:
        """Start it in a session of its own, so that it and its children can be killed together; it dies with us. Its
        output is appended to `log`; None = goes to our own stderr. Raises OSError."""
        output = None if log is None else open_private(log)
        reads, writes = os.pipe()
        mark = make_mark()
        ours = {name: value for name, value in os.environ.items() if name not in settings.withheld}
        try:
            process = subprocess.Popen(
                (sys.executable, "-m", "lightningrl_client.runtime.worker"),
                stdin=subprocess.PIPE,
                stdout=output or STDERR,
                stderr=output or STDERR,
                env=worker_environment(settings.server_url, {**ours, **environment, MARK: mark}, settings.dialects),
                cwd=settings.base_dir,
                start_new_session=True,
                pass_fds=(writes,),
                bufsize=0,
            )
        except OSError:
            os.close(reads)
            if output is not None:
                output.close()
            raise
        finally:
            os.close(writes)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already; `wait` says so
            line = msgspec.json.encode(replace(settings, parent_pid=os.getpid(), first_words=writes))
            process.stdin.write(line + b"\n")
        return cls(process, output, reads, mark)

    async def kill(self) -> int:
        """End it and what it started, now. May be called again."""
        with self._lock:
            if not self._is_reaped:
                kill_group(self.pid)
        return await self.wait()

    async def wait(self) -> int:
        """Its exit status, once it has ended; negative = the signal that ended it."""
        return await asyncio.shield(self._life)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: wait for the worker's end, and kill what it leaves behind. Group and session have the worker's
        pid. Until the worker has been reaped, no other process can have it."""
        if sys.platform == "linux":
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here, so that the kernel has reaped it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        kill_group(self.pid)
        kill_descendants(self.pid, self._mark)
        with self._lock:
            status = self._process.wait()
            self._is_reaped = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(self._status.set_result, status)

    async def _live(self) -> int:
        """From the start to the end, with the log kept short."""
        while not self._status.done():
            await asyncio.wait({self._status}, timeout=LOG_PAUSE_S)
            if self._log is not None:
                bound_log(self._log)
        if self._log is not None:
            self._log.close()
        self.failure = _read_failure(self._first_words)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        return self._status.result()


def describe_exit(status: int) -> str:
    """`died with SIGSEGV`, `exited with status 1`, `lost the server`."""
    if status == LOST_STATUS:
        return "lost the server"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"died with {signal.Signals(-status).name}"
    except ValueError:
        return f"died with signal {-status}"


def kill_group(group: int) -> None:
    """Kill every process of it, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(group, signal.SIGKILL)


def bound_log(log: IO[bytes], most_bytes: int = MOST_LOG_BYTES) -> None:
    """Cut a log of more than `most_bytes`: its end stays, below a line that says so."""
    size = os.fstat(log.fileno()).st_size
    if size <= most_bytes:
        return
    length = min(KEPT_LOG_BYTES, most_bytes // 2)
    end = os.pread(log.fileno(), length, size - length)
    os.ftruncate(log.fileno(), 0)
    os.write(log.fileno(), b"... this log was cut at %d bytes; what follows is its end\n" % size + end)


LOST_STATUS: Final = 4
"""The exit status of a worker that gave up on the server."""
READY: Final = b"\0ready\n"
LONGEST_FAILURE: Final = 16_384
"""Bytes of the sentence that says why a worker could not begin."""


def take_stdin() -> BinaryIO:
    """Standard input, kept from the agent and from what it starts: they read nothing from theirs."""
    lifeline = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def die_with_pipe(lifeline: BinaryIO) -> None:
    """Returns never: at the pipe's end, its writer is gone; this process ends with what it started. Text is ignored."""
    while os.read(lifeline.fileno(), 65_536):
        pass
    kill_descendants(os.getpid(), os.environ.get(MARK, ""))
    kill_own_group()


def kill_own_group() -> None:
    """This process and what it started, where it leads a group; else this process."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def say_first(line: int, failure: str = "") -> None:
    """Why this worker cannot begin, or that it does; then the line is closed. `line` 0 = nobody listens."""
    if not line:
        return
    os.set_blocking(line, False)
    with contextlib.suppress(OSError):  # the supervisor is gone, or the agent's module has filled the line
        os.write(line, failure.encode(errors="replace")[:LONGEST_FAILURE] if failure else READY)
    with contextlib.suppress(OSError):
        os.close(line)


def _read_failure(line: int) -> str:
    """Why a worker that has ended could not begin; "" = it did, or said nothing. Closes the line."""
    os.set_blocking(line, False)
    try:
        words = os.read(line, LONGEST_FAILURE)
    except OSError:  # what it left behind holds the other end
        words = b""
    os.close(line)
    return "" if READY in words else words.decode(errors="replace")
