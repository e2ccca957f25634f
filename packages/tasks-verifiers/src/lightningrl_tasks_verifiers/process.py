"""The process that has verifiers: started when it is first asked, started again after it died, ended with us.

ask(request) ──stdin, JSON lines──► bridge.py in the environment of `python`
     future ◄──stdout, by id──── a thread that reads
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final

from lightningrl.errors import ConfigError, LightningError

__all__ = ["Bridge", "BridgeFailure"]

SCRIPT: Final = Path(__file__).with_name("bridge.py")
LONGEST_LINE: Final = 64 * 2**20
"""Bytes of one answer."""
LOG_TAIL: Final = 600
"""Characters of the process's standard error in a sentence."""
MOST_STARTS: Final = 2
"""Times that one request is asked: a process that ends under it twice is ended by it."""
HOW_TO: Final = (
    "make an environment that has verifiers and the taskset's package, and name its interpreter: "
    "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install 'verifiers>=0.4,<0.5' THE-PACKAGE; "
    'options.python = ".venv-verifiers/bin/python"'
)


class BridgeFailure(LightningError):
    """The process of verifiers ended, gave no answer in time, or its taskset failed."""


class _ProcessEnd(Exception):
    """The process ended under a request."""


class _Running:
    """A process that runs, and who waits for its answers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, number: int, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Send a request. Its future raises _ProcessEnd where the process ends first."""
        future = Future[dict[str, Any]]()
        with self._lock:
            if self._is_over:
                future.set_exception(_ProcessEnd())
                return future
            self._waiting[number] = future
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, which its reader tells
            self.process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            self.process.stdin.flush()
        return future

    def forget(self, number: int) -> None:
        """Give up a request."""
        with self._lock:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """End it and those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None and self.process.stdin is not None
        with self.process.stdout as answers:
            while line := answers.readline(LONGEST_LINE):
                try:
                    answer = json.loads(line)
                    number = int(answer["id"])
                except (ValueError, KeyError, TypeError):
                    break  # too long, or no answer at all
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
        self.kill()
        with self._lock:
            self._is_over, left = True, list(self._waiting.values())
        for future in left:
            future.set_exception(_ProcessEnd())
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class Bridge:
    """Answers of the process, by request. Threads may ask at once."""

    def __init__(self, python: str, opening: Sequence[Mapping[str, Any]], *, timeout_s: float) -> None:
        """`opening`: requests that a new process is asked first, each time."""
        self._python = python
        self._opening = tuple(opening)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: _Running | None = None
        self._log: IO[bytes] | None = None
        self._pid = os.getpid()
        self.opened: list[dict[str, Any]] = []
        """Answers to `opening`, of the process that runs."""

    def ask(self, **request: Any) -> dict[str, Any]:
        """Answer of the process. Raises BridgeFailure, ConfigError where the environment is none."""
        for left in reversed(range(MOST_STARTS)):
            running = self.start()
            try:
                return self._answer(running, request)
            except _ProcessEnd:
                if not left:
                    raise BridgeFailure(
                        f"verifiers: its process ended {MOST_STARTS} times under {request['do']!r} of task "
                        f"{request.get('index', request.get('start'))}{self._tail()}"
                    ) from None
        raise AssertionError("unreachable")

    def start(self) -> _Running:
        """The running process, with its tasksets open."""
        with self._lock:
            if self._pid != os.getpid():  # forked: the process is our parent's
                self._running, self._log, self._pid = None, None, os.getpid()
            if self._running is None or self._running.process.poll() is not None:
                try:
                    self._running = self._launch()
                except BaseException:
                    self._close_log()
                    raise
            return self._running

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None and self._pid == os.getpid():
                running.kill()
            self._close_log()
            atexit.unregister(self.close)

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = None

    def _launch(self) -> _Running:
        self._log = self._log or tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        try:
            process = subprocess.Popen([self._python, "-I", str(SCRIPT)], start_new_session=True, **pipes)
        except OSError as error:
            raise ConfigError(f"verifiers: {self._python!r} cannot be run ({error}); {HOW_TO}") from None
        running = _Running(process)
        atexit.unregister(self.close)
        atexit.register(self.close)
        try:
            self.opened = [self._answer(running, request) for request in self._opening]
            self._check_environment()
        except _ProcessEnd:
            raise BridgeFailure(f"verifiers: {self._python!r} ended as it started{self._tail()}") from None
        except BaseException:
            running.kill()
            raise
        return running

    def _check_environment(self) -> None:
        for answer in self.opened:
            if "missing" in answer:
                where = f"the environment of {self._python!r} has no verifiers 0.4 ({answer['missing']})"
                raise ConfigError(f"verifiers: {where}; {HOW_TO}")

    def _answer(self, running: _Running, request: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            answer = running.ask(number, request).result(self._timeout_s)
        except TimeoutError:
            running.kill()
            raise BridgeFailure(
                f"verifiers: no answer to {request['do']!r} within {self._timeout_s:g} s; raise timeout_s, or look "
                f"what the taskset waits for{self._tail()}"
            ) from None
        finally:
            running.forget(number)
        if "error" in answer:
            raise BridgeFailure(f"verifiers: {answer['error']}")
        return answer

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace").strip()[-LOG_TAIL:]
        return f"; it wrote: {tail}" if tail else ""
