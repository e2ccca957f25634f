"""A warm `lightningrl`: one process that has imported torch and all else that a run needs, and forks a child for each command.

A fresh interpreter spends some ten CPU seconds on imports before a run of two steps begins; the forked child is a process of its own
with its own environment, folder and output, and runs the same `main`. What a fresh start itself does stays with the tests that use
`subprocess`.

test ── argv, folder, environment, two files ──► warm process ── fork ──► `lightningrl …`
     ◄── pid, exit status ──────────────────────┘
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sizes import PATIENCE_S

__all__ = ["WarmCommand", "WarmProcess"]

HEAVY = (
    "lightningrl.cli.app",
    "lightningrl.cli.train",
    "lightningrl.cli.export",
    "lightningrl.training.session",
    "lightningrl_torch.backend",
)


class WarmProcess:
    """A command that runs; as much of `subprocess.Popen` as tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self._connection = connection
        self.pid: int = json.loads(self._answers.readline())["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(TimeoutError):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutError."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            self.returncode = json.loads(self._answers.readline())["status"]
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmCommand:
    """The test's end. A context manager."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._path = f"{self._folder.name}/socket"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, __file__, self._path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"warm\n", "the warm process could not be started; its errors are above"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()

    def start(self, *arguments: str, output: IO[Any], errors: IO[Any], cwd: Path, environment: Mapping[str, str]) -> WarmProcess:
        """`lightningrl …` or `script.py …`, in a session of its own; what it says goes to the two files."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._path)
        request = json.dumps({"arguments": arguments, "cwd": str(cwd), "environment": dict(environment)}).encode()
        socket.send_fds(connection, [len(request).to_bytes(8)], [output.fileno(), errors.fileno()])
        connection.sendall(request)
        return WarmProcess(connection)

    def run(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end. Killed with its process group, and TimeoutError, after `timeout` seconds."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            whole = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
            process = self.start(*arguments, output=output, errors=errors, cwd=cwd, environment=whole)
            try:
                status = process.wait(timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


def serve(path: str) -> None:
    """The warm process: a child for each connection, until stdin ends. Returns in a child when its command has ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    print("warm", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    for pid, _ in running.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    size, files, _, _ = socket.recv_fds(connection, 8, 2)
                    request = json.loads(connection.makefile("rb").read(int.from_bytes(size)))
                    pid = os.fork()
                    if pid == 0:
                        become(request, files)
                        return
                    for file in files:
                        os.close(file)
                    connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
                    handle = os.pidfd_open(pid)
                    running[handle] = (pid, connection)
                    selector.register(handle, selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):
                    pid, connection = running.pop(key.fileobj)
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    _, status = os.waitpid(pid, 0)
                    with contextlib.suppress(OSError), connection:  # the test may be gone
                        connection.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def become(request: dict[str, Any], files: list[int]) -> None:
    """Turn this forked child into the command."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (files[0], 1), (files[1], 2)):
        os.dup2(source, target)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    time.tzset()
    sys.argv = request["arguments"]
    sys.path[0] = ""


def main() -> None:
    for module in HEAVY:
        __import__(module)
    serve(sys.argv[1])
    if sys.argv[0].endswith(".py"):
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    from lightningrl.cli import main as lightningrl

    lightningrl()


if __name__ == "__main__":
    main()
