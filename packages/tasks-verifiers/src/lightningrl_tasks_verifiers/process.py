"""The process that has verifiers: started when it is first asked, started again after it died, ended with us.

ask(request) ──stdin, JSON lines──► bridge.py in the environment of `python`
     future ◄──stdout, by id──── a thread that reads
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError, LightningError
from lightningrl.processes import Child

__all__ = ["Bridge", "BridgeFailure"]

SCRIPT: Final = Path(__file__).with_name("bridge.py")
LONGEST_LINE: Final = 64 * 2**20
"""Bytes of one answer."""
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

    def __init__(self, child: Child) -> None:
        self.child = child
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
        with contextlib.suppress(OSError, ValueError):  # it has ended, which its reader tells
            self.child.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            self.child.stdin.flush()
        return future

    def forget(self, number: int) -> None:
        """Give up a request."""
        with self._lock:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        with self.child.stdout as answers:
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
        self.child.end()
        with self._lock:
            self._is_over, left = True, list(self._waiting.values())
        for future in left:
            future.set_exception(_ProcessEnd())
        with contextlib.suppress(OSError):
            self.child.stdin.close()


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
                        f"{request.get('index', request.get('start'))}{running.child.wrote()}"
                    ) from None
        raise AssertionError("unreachable")

    def start(self) -> _Running:
        """The running process, with its tasksets open."""
        with self._lock:
            if self._running is None or not self._running.child.is_running:
                self._running = self._launch()
            return self._running

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                running.child.end()

    def _launch(self) -> _Running:
        child = Child([self._python, "-I", str(SCRIPT)], is_asked=True)
        running = _Running(child)
        try:
            self.opened = [self._answer(running, request) for request in self._opening]
            self._check_environment()
        except _ProcessEnd:
            if child.start_error is not None:
                raise ConfigError(
                    f"verifiers: {self._python!r} cannot be run ({child.start_error}); {HOW_TO}"
                ) from None
            raise BridgeFailure(f"verifiers: {self._python!r} ended as it started{child.wrote()}") from None
        except BaseException:
            child.end()
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
            running.child.end()
            raise BridgeFailure(
                f"verifiers: no answer to {request['do']!r} within {self._timeout_s:g} s; raise timeout_s, or look "
                f"what the taskset waits for{running.child.wrote()}"
            ) from None
        finally:
            running.forget(number)
        if "error" in answer:
            raise BridgeFailure(f"verifiers: {answer['error']}")
        return answer
