"""A server as a child: started when it is first needed, started again after it died, ended with us.

process (a worker, the trainer) ──stdin──► guard.py ──► the command, in a process group of its own
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import httpx

from lightningrl_tasks_openenv.wire import EnvironmentFailure

__all__ = ["ServerProcess"]

LOOK_S: Final = 0.05
LOG_TAIL: Final = 600
"""Characters of a server's log in a sentence."""
ENDING_S: Final = 10.0
LISTENING_S: Final = 5.0


class ServerProcess:
    """A server that `command` starts; `{port}` in it is a free port of this machine. One for each of our processes."""

    def __init__(self, command: Sequence[str], *, folder: Path, start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._port = 0
        self._pid = os.getpid()

    def url(self) -> str:
        """Address of the running server. Raises EnvironmentFailure where it does not start."""
        with self._lock:
            if self._pid != os.getpid():  # forked: the server is our parent's
                self._guard, self._log, self._pid = None, None, os.getpid()
            if self._guard is None or self._guard.poll() is not None or not self._is_listening():
                self._end()
                try:
                    self._start()
                except BaseException:
                    self._end()
                    self._close_log()
                    raise
            return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """End the server and all that it has started."""
        with self._lock:
            if self._pid == os.getpid():
                self._end()
            self._close_log()
            atexit.unregister(self.close)

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _end(self) -> None:
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        try:
            self._guard.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._guard = None

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=LISTENING_S).close()
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._port = find_port()
        command = [word.replace("{port}", str(self._port)) for word in self._command]
        self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115  closed with the server
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), *command]
        self._guard = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,
            env={**os.environ, "PORT": str(self._port)},
        )
        atexit.unregister(self.close)
        atexit.register(self.close)
        self._wait(self._guard, command)

    def _wait(self, guard: subprocess.Popen[bytes], command: Sequence[str]) -> None:
        patience = time.monotonic() + self._start_timeout_s
        while time.monotonic() < patience:
            if guard.poll() is not None:
                raise EnvironmentFailure(
                    f"the server {' '.join(command)!r} ended with {guard.returncode}{self._tail()}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(LOOK_S)
        raise EnvironmentFailure(
            f"the server {' '.join(command)!r} did not answer on port {self._port} within {self._start_timeout_s:g} s; "
            f"have it listen on {{port}}, or raise start_timeout_s{self._tail()}"
        )

    def _tail(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").strip()[-LOG_TAIL:]
        return f"; it wrote: {tail}" if tail else ""


def find_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
