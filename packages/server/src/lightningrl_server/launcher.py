"""The server process as the trainer holds it: started, awaited, restarted on its port, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import msgspec

from lightningrl.errors import ServerError
from lightningrl.machine import cpu_seconds
from lightningrl.processes import open_private
from lightningrl_server.settings import ServerSettings

__all__ = ["ServerProcess", "StartWatch", "StartWords"]

_STOP_S = 10.0
_LOOK_S = 1.0
_SAY_S = 30.0
"""Seconds between two lines about a server that is still starting."""
LEAST_CPU_S: Final = 0.2
"""CPU seconds that a process that works uses within `stall_s`, however busy the machine is."""

IDLE: Final = 0.5
"""Share of a core below which a process waits for something other than what it loads."""

logger = logging.getLogger(__name__)


class StartWatch:
    """Decides how long to wait for a process that is starting: while it works, and at most `most_s`."""

    def __init__(self, *, most_s: float, stall_s: float) -> None:
        self._most_s = most_s
        self._stall_s = stall_s
        self._worked_at_s = 0.0
        self._worked_cpu_s = 0.0

    def give_up(self, elapsed_s: float, cpu_s: float | None) -> str | None:
        """Return why to wait no longer; None = wait on. `cpu_s`: what the process used; None where nobody says."""
        if elapsed_s >= self._most_s:
            return f"was not ready after {elapsed_s:.0f} s"
        if cpu_s is None:
            return None
        if cpu_s - self._worked_cpu_s >= LEAST_CPU_S:
            self._worked_at_s, self._worked_cpu_s = elapsed_s, cpu_s
        idle_s = elapsed_s - self._worked_at_s
        if idle_s < self._stall_s:
            return None
        return f"was not ready after {elapsed_s:.0f} s and has done nothing for {idle_s:.0f} s"


class StartWords:
    """Says why a start takes long: what happened since it was last asked."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._cpu_s = 0.0

    def explain(self, elapsed_s: float, cpu_s: float | None, load: float | None) -> str:
        """Return the sentence. None = this system does not say. `cpu_s` is the CPU time that the process has used,
        `load` the number of processes that want to run, per core."""
        loads = "it loads the policies' tokenizers"
        if cpu_s is None:
            return loads
        since_s, used_s = elapsed_s - self._elapsed_s, cpu_s - self._cpu_s
        self._elapsed_s, self._cpu_s = elapsed_s, cpu_s
        got = f"{used_s:.0f} s of CPU in the last {since_s:.0f} s"
        if used_s >= IDLE * since_s:
            return f"{loads} ({got})"
        if load is not None and load > 1.0:
            return f"this machine is busy ({load:.0f} processes want each core) and gave it {got}"
        return f"{loads}, and waits for a disk or a network ({got})"


class ServerProcess:
    """Owns one server process at a time. It ends with the process that started it, however that ends.

    async with ServerProcess(settings) as server:
        client = ServerClient(server.url, settings.run_key)
    """

    def __init__(
        self, settings: ServerSettings, *, log_path: Path | None = None, most_s: float = 900.0, stall_s: float = 60.0
    ) -> None:
        """Log to `log_path`, or to our stderr. The start may take `most_s`, and `stall_s` of them without any work."""
        self._settings = settings
        self._log_path = log_path
        self._most_s = most_s
        self._stall_s = stall_s
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """`http://host:port`, the same across restarts."""
        if self._url is None:
            raise ServerError("the server was not started; call start first")
        return self._url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it and wait for its answer. Raises ServerError with the server's sentence (port in use, no room, …)."""
        if self.is_running:
            raise ServerError(f"the server at {self._url!r} runs already; stop it first")
        with open_private(self._log_path) if self._log_path else contextlib.nullcontext() as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "lightningrl_server",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        try:
            self._url = await self._wait_ready(self._process)
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    async def restart(self) -> None:
        """Stop it where it runs, and start it on the same port."""
        await self.stop()
        if self._url is not None:
            port = int(self._url.rpartition(":")[2])
            self._settings = self._settings.model_copy(update={"port": port})
        await self.start()

    async def wait_ended(self) -> int:
        """Wait until the process ends, by `stop` or by itself; return its exit status (negative: the signal)."""
        if self._process is None:
            raise ServerError("the server was not started; call start first")
        return await self._process.wait()

    async def stop(self, grace_s: float = _STOP_S) -> None:
        """Ask it to finish (SIGTERM); kill it where it does not within `grace_s`."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> str:
        """Return its URL once it answers; wait while it lives and works."""
        watch, words = StartWatch(most_s=self._most_s, stall_s=self._stall_s), StartWords()
        started, next_line_s = time.monotonic(), _SAY_S
        ready = asyncio.create_task(self._ready(process))
        try:
            while not ready.done():
                await asyncio.wait({ready}, timeout=_LOOK_S)
                elapsed_s, cpu_s = time.monotonic() - started, cpu_seconds(process.pid)
                why = watch.give_up(elapsed_s, cpu_s)
                if why is not None and not ready.done():
                    raise ServerError(f"the server {why}; see {self._where}")
                if elapsed_s >= next_line_s and not ready.done():
                    next_line_s += _SAY_S
                    why = words.explain(elapsed_s, cpu_s, _load())
                    logger.warning("waiting for the server since %.0f s: %s", elapsed_s, why)
            return ready.result()
        finally:
            ready.cancel()

    async def _ready(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdin is not None and process.stdout is not None
        try:
            settings = self._settings.model_copy(update={"parent_pid": os.getpid()})
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it ended at once; its output says why
        line = await process.stdout.readline()
        if not line:
            status = await process.wait()
            raise ServerError(f"the server ended with status {status} before it was ready; see {self._where}")
        message = msgspec.json.decode(line, type=dict[str, str | int])
        if "error" in message:
            await process.wait()
            raise ServerError(str(message["error"]))
        return str(message["url"])

    @property
    def _where(self) -> str:
        return repr(str(self._log_path)) if self._log_path else "its messages above"


def _load() -> float | None:
    """Processes that want to run, for each core, in the last minute; None where this system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None
