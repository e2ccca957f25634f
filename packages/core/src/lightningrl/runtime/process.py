"""A worker as a process of this machine: spawned, killed with everything that it started. The `local` launcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from lightningrl.runtime.environment import worker_environment
from lightningrl.runtime.launcher import WorkerExit
from lightningrl.runtime.settings import WorkerSettings, encode_line

__all__ = ["LocalLauncher", "WorkerProcess", "bound_log", "describe_exit", "open_log"]

LONGEST_LINE: Final = 2**20
"""Bytes of an event; what is longer is none of the worker's."""
LAST_WORDS_S: Final = 1.0
"""How long a worker's pipes are read after its end, where a process that left its group holds them open."""
MOST_LOG_BYTES: Final = 64 * 2**20
KEPT_LOG_BYTES: Final = 2**20
"""The end of a log that was cut."""
LOG_PAUSE_S: Final = 1.0
"""Between two looks at a log's size."""

logger = logging.getLogger(__name__)


class LocalLauncher:
    """Workers are processes of this machine. Nothing to open or to close."""

    async def open(self, server_url: str) -> None: ...

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> WorkerProcess:
        return await WorkerProcess.spawn(settings, environment=environment, log=None if log is None else open_log(log))

    async def close(self) -> None: ...


class WorkerProcess:
    """A worker process of this one; the line to it. When it ends, however it ends, its whole process group ends with it."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes] | None) -> None:
        self._process = process
        self._log = log
        self._pipes: list[_Pipe] = []
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lock = threading.Lock()
        self._is_reaped = False
        self._life: asyncio.Task[WorkerExit] = asyncio.create_task(self._live(), name=f"life of process {process.pid}")

    @classmethod
    async def spawn(cls, settings: WorkerSettings, *, environment: Mapping[str, str], log: IO[bytes] | int | None) -> WorkerProcess:
        """Start it in a session of its own, so that it and its children can be killed together; it dies with this process.

        `log` is a file, which is closed at the worker's end, None (our own stderr), or `subprocess.PIPE` (see `stderr`).
        """
        kept = None if log is None or isinstance(log, int) else log
        try:
            process = start_worker(settings, environment, log)
        except OSError:
            if kept is not None:
                kept.close()
            raise
        worker = cls(process, kept)
        threading.Thread(target=worker._reap, args=(asyncio.get_running_loop(),), name="worker-reaper", daemon=True).start()
        worker.write(encode_line(replace(settings, parent_pid=os.getpid())))
        try:
            worker._pipes = [await _Pipe.open(pipe) for pipe in (process.stdout, process.stderr) if pipe is not None]
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        return self._pipes[1].reader if len(self._pipes) > 1 else None

    async def read(self) -> bytes:
        while True:
            try:
                return await self._pipes[0].reader.readline()
            except ValueError:
                logger.warning("worker %d wrote a line of more than %d bytes, which is no event", self._process.pid, LONGEST_LINE)

    def write(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone; `read` says so
            stdin.write(line)

    async def kill(self) -> WorkerExit:
        with self._lock:
            if not self._is_reaped:
                kill_group(self._process.pid)
        return await self.wait()

    async def wait(self) -> WorkerExit:
        return await asyncio.shield(self._life)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: wait for the worker's end, and kill what it leaves behind.

        The group's id is the worker's pid. While the worker has not been reaped, no other process can have that id.
        """
        if sys.platform == "linux":
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored here, so that the kernel has reaped it
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            kill_group(self._process.pid)
            status = self._process.wait()
            self._is_reaped = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(self._status.set_result, status)

    async def _live(self) -> WorkerExit:
        """From the start to the end, with the log kept short and the pipes closed."""
        while not self._status.done():
            await asyncio.wait({self._status}, timeout=LOG_PAUSE_S)
            if self._log is not None:
                bound_log(self._log)
        if self._log is not None:
            self._log.close()
        for pipe in self._pipes:
            await asyncio.wait({pipe.ended}, timeout=LAST_WORDS_S)
            pipe.transport.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        status = self._status.result()
        return WorkerExit(how=describe_exit(status), is_foreign=status == -signal.SIGKILL)


def start_worker(settings: WorkerSettings, environment: Mapping[str, str], log: IO[bytes] | int | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (sys.executable, "-m", "lightningrl.runtime.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=worker_environment(settings.server_url, {**os.environ, **environment}),
        cwd=settings.base_dir,
        start_new_session=True,
        bufsize=0,
    )


class _Pipe(asyncio.StreamReaderProtocol):
    """What a worker writes into one of its pipes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=LONGEST_LINE, loop=loop)
        self.ended: asyncio.Future[None] = loop.create_future()
        super().__init__(self.reader, loop=loop)

    @classmethod
    async def open(cls, pipe: IO[bytes]) -> _Pipe:
        transport, protocol = await asyncio.get_running_loop().connect_read_pipe(cls, pipe)
        protocol.transport = transport
        return protocol

    transport: asyncio.ReadTransport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set_result(None)


def describe_exit(status: int) -> str:
    """`died with SIGSEGV`, `exited with status 1`."""
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


def open_log(path: Path) -> IO[bytes]:
    """The file that a worker's log is appended to, for nobody else to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0)
    os.fchmod(log.fileno(), 0o600)
    return log


def bound_log(log: IO[bytes], most_bytes: int = MOST_LOG_BYTES) -> None:
    """Cut a log of more than `most_bytes`: its end stays, below a line that says so."""
    size = os.fstat(log.fileno()).st_size
    if size <= most_bytes:
        return
    kept = min(KEPT_LOG_BYTES, most_bytes // 2)
    end = os.pread(log.fileno(), kept, size - kept)
    os.ftruncate(log.fileno(), 0)
    os.write(log.fileno(), b"... this log was cut at %d bytes; what follows is its end\n" % size + end)
