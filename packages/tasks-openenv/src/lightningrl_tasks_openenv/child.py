"""A server as a child: started when it is first needed, started again after it died, ended with us."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx

from lightningrl.processes import Child
from lightningrl_tasks_openenv.wire import EnvironmentFailure

__all__ = ["ServerProcess"]

LOOK_S: Final = 0.05
GRACE_S: Final = 3.0
"""Between SIGTERM and SIGKILL."""
LISTENING_S: Final = 5.0


class ServerProcess:
    """A server that `command` starts; `{port}` in it is a free port of this machine. One for each of our processes."""

    def __init__(self, command: Sequence[str], *, folder: Path, start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._port = 0

    def url(self) -> str:
        """Address of the running server. Raises EnvironmentFailure where it does not start."""
        with self._lock:
            if self._child is None or not (self._child.is_running and self._is_listening()):
                self._end()
                try:
                    self._start()
                except BaseException:
                    self._end()
                    raise
            return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """End the server and all that it has started."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=LISTENING_S).close()
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._port = find_port()
        command = [word.replace("{port}", str(self._port)) for word in self._command]
        self._child = Child(command, folder=self._folder, environment={"PORT": str(self._port)}, grace_s=GRACE_S)
        patience = time.monotonic() + self._start_timeout_s
        while time.monotonic() < patience:
            if (status := self._child.status) is not None:
                raise EnvironmentFailure(f"the server {' '.join(command)!r} ended with {status}{self._child.wrote()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(LOOK_S)
        raise EnvironmentFailure(
            f"the server {' '.join(command)!r} did not answer on port {self._port} within {self._start_timeout_s:g} s; "
            f"have it listen on {{port}}, or raise start_timeout_s{self._child.wrote()}"
        )


def find_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
