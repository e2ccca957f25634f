"""The server process as the trainer holds it: started, awaited, restarted on its port, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from lightningrl.errors import ServerError
from lightningrl.server.settings import ServerSettings

__all__ = ["ServerProcess"]

_STOP_S = 10.0


class ServerProcess:
    """Owns one server process at a time. It ends with the process that started it, however that ends.

    async with ServerProcess(settings) as server:
        client = ServerClient(server.url, settings.run_key)
    """

    def __init__(self, settings: ServerSettings, *, log_path: Path | None = None, ready_s: float = 60.0) -> None:
        """What it says goes to `log_path`, or to our stderr."""
        self._settings = settings
        self._log_path = log_path
        self._ready_s = ready_s
        self._process: asyncio.subprocess.Process | None = None
        self._url: str | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
        """Start it; returns once it answers. Raises ServerError with the server's own sentence (port in use, no room, …)."""
        if self.is_running:
            raise ServerError(f"the server at {self._url!r} runs already; stop it first")
        log = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "lightningrl.server",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        finally:
            if log is not None:
                log.close()
        try:
            async with asyncio.timeout(self._ready_s):
                self._url = await self._ready(self._process)
        except TimeoutError:
            await self.stop()
            raise ServerError(f"the server was not ready after {self._ready_s:g} s; see {self._where}") from None
        except BaseException:
            await self.stop()
            raise

    async def restart(self) -> None:
        """Stop it where it runs, and start it on the same port."""
        await self.stop()
        if self._url is not None:
            port = int(self._url.rpartition(":")[2])
            self._settings = self._settings.model_copy(update={"port": port})
        await self.start()

    async def wait_ended(self) -> int:
        """Wait until the process ends, by `stop` or by itself; its exit status (negative: the signal)."""
        if self._process is None:
            raise ServerError("the server was not started; call start first")
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to finish (SIGTERM); kill it where it does not."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        await process.wait()

    async def _ready(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
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

    def _open_log(self) -> IO[bytes] | None:
        if self._log_path is None:
            return None
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return self._log_path.open("ab")
