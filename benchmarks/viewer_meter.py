"""CPU seconds of a server that began with a request to its viewer, told apart inside its process (`viewer.py person`).

The server imports this before anything else. It adds up the thread's CPU time of each callback of the loop and each job
of a thread that began with such a request. Callbacks of uvloop cannot be told apart, so that server runs on asyncio's
own loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

METER: Final = "LIGHTNINGRL_BENCHMARK_METER"
"""File that a metered server writes: a line with the time, the viewer's CPU seconds and the process's, every half
second."""
SITE: Final = "import sys\nsys.path.insert(0, {folder!r})\nimport viewer_meter\nviewer_meter.start_meter()\n"
SERVER: Final = "lightningrl_server"


class Meter:
    """CPU seconds of what began with a request to the viewer."""

    def __init__(self) -> None:
        self.is_looking = contextvars.ContextVar("is_looking", default=False)
        self._spent = 0.0
        self._lock = threading.Lock()

    def timed(self, function: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._spent += time.thread_time() - began

        return run

    def install(self) -> None:
        """Time callbacks and threads, and mark requests to the viewer where they come in."""
        run_callback, submit = asyncio.Handle._run, ThreadPoolExecutor.submit

        def run(handle: Any) -> None:
            looks = handle._context.get(self.is_looking, False)
            (self.timed(run_callback) if looks else run_callback)(handle)

        def submit_timed(
            pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Future[Any]:
            return submit(pool, self.timed(work) if self.is_looking.get() else work, *args, **kwargs)

        asyncio.Handle._run = run  # type: ignore[method-assign,assignment]
        ThreadPoolExecutor.submit = submit_timed  # type: ignore[method-assign,assignment]
        from lightningrl_viewer.guard import Guard

        answer = Guard.__call__

        async def call(guard: Any, *request: Any) -> None:
            self.is_looking.set(True)
            await answer(guard, *request)

        Guard.__call__ = call  # type: ignore[method-assign,assignment]

    def write(self, path: Path) -> None:
        """Write for ever."""
        with path.open("a", encoding="utf-8", buffering=1) as lines:
            while True:
                lines.write(f"{time.monotonic()} {self._spent} {time.process_time()}\n")
                time.sleep(0.5)


def start_meter() -> None:
    """Meter this process where it is a server's."""
    if SERVER not in sys.orig_argv:
        return
    sys.modules["uvloop"] = types.SimpleNamespace(new_event_loop=asyncio.new_event_loop)  # type: ignore[assignment]
    meter = Meter()
    meter.install()
    threading.Thread(target=meter.write, args=(Path(os.environ[METER]),), daemon=True).start()
