"""A worker as a process of this machine: spawned, killed with everything that it started. The `local` launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from lightningrl.runtime.environment import worker_environment
from lightningrl.runtime.launcher import WorkerExit
from lightningrl.runtime.settings import WorkerSettings, encode_line

__all__ = ["LocalLauncher", "WorkerProcess", "describe_exit"]


class LocalLauncher:
    """Workers are processes of this machine. Nothing to open or to close."""

    async def open(self, server_url: str) -> None: ...

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> WorkerProcess:
        with open_log(log) as file:
            return await WorkerProcess.spawn(settings, environment=environment, log=file)

    async def close(self) -> None: ...


class WorkerProcess:
    """A worker process of this one; the line to it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, settings: WorkerSettings, *, environment: Mapping[str, str], log: IO[bytes] | int | None) -> WorkerProcess:
        """Start it in a session of its own, so that it and its children can be killed together; it dies with this process.

        `log` is a file, None (our own stderr), or `subprocess.PIPE` (see `stderr`).
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lightningrl.runtime.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=worker_environment(settings.server_url, {**os.environ, **environment}),
            cwd=settings.base_dir,
            start_new_session=True,
        )
        worker = cls(process)
        worker.write(encode_line(replace(settings, parent_pid=os.getpid())))
        return worker

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        return self._process.stderr

    async def read(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        return await stdout.readline()

    def write(self, line: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone; `read` says so
            stdin.write(line)

    async def kill(self) -> WorkerExit:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return await self.wait()

    async def wait(self) -> WorkerExit:
        status = await self._process.wait()
        return WorkerExit(how=describe_exit(status), is_foreign=status == -signal.SIGKILL)


def describe_exit(status: int) -> str:
    """`died with SIGSEGV`, `exited with status 1`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"died with {signal.Signals(-status).name}"
    except ValueError:
        return f"died with signal {-status}"


@contextlib.contextmanager
def open_log(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The file that a worker's log is appended to; None = our own stderr."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        yield log
