"""Asynchronous work for callers that wait, a notebook's thread with an event loop, too; and if it is cancelled.

run_sync(work()) ─► a thread ─► asyncio.run        Ctrl-C ─► the work is cancelled, ends in order ─► KeyboardInterrupt
       ▲                   └─ @in_caller build() ─┐
       └────────── done where the caller waits ◄─────┘   objects that belong to a thread are then the caller's
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import wraps
from queue import Empty, SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

__all__ = ["Show", "in_caller", "run_sync", "show_nobody"]

P = ParamSpec("P")
T = TypeVar("T")
_CALLER: ContextVar[SimpleQueue[Callable[[], None]] | None] = ContextVar("caller", default=None)
"""Work for the thread that waits in `run_sync`."""
LONGEST_WAIT_S: Final = 0.2
"""Time until a signal's handler runs, at most."""
Show = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is; of 0 = nobody knows."""


def show_nobody(what: str, done: int, total: int) -> None:
    """Nobody looks on."""


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Do the work and return what it returns, from an event loop in a thread of its own."""
    running: list[asyncio.Task[Any]] = []
    interrupted = threading.Event()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append(task)
        if interrupted.is_set():
            task.cancel()
        return await work

    def interrupt() -> None:
        interrupted.set()
        for task in running:
            with suppress(RuntimeError):  # its loop has just been closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
    context = copy_context()
    context.run(_CALLER.set, asked)
    with ThreadPoolExecutor(1) as thread, _on_interrupt(interrupt):
        try:
            done = thread.submit(context.run, asyncio.run, main())
            done.add_done_callback(lambda _: asked.put(lambda: None))
            try:
                _serve(asked, done)
            except BaseException:  # of a signal's handler that is not ours: the work may wait for this thread
                interrupt()
                _serve(asked, done)
                raise
            return done.result()
        except asyncio.CancelledError:
            if interrupted.is_set():
                raise KeyboardInterrupt from None
            raise


def _serve(asked: SimpleQueue[Callable[[], None]], done: Future[Any]) -> None:
    """Do what the work asks of this thread, until it is done.

    A signal interrupts no wait that it comes just before, nor one of this thread where another is given the signal;
    Python's handler runs when the wait is over, so that no wait is long.
    """
    while not done.done():
        with suppress(Empty):
            asked.get(timeout=LONGEST_WAIT_S)()


def in_caller(function: Callable[P, T]) -> Callable[P, T]:
    """Call a function in the thread that waits for this work in `run_sync`, else here. Raises what it raises."""

    @wraps(function)
    def ask(*arguments: P.args, **options: P.kwargs) -> T:
        asked = _CALLER.get()
        if asked is None:
            return function(*arguments, **options)
        called: Future[T] = Future()

        def call() -> None:
            try:
                called.set_result(function(*arguments, **options))
            except BaseException as error:  # noqa: BLE001  it is the caller's
                called.set_exception(error)

        asked.put(call)
        return called.result()

    return ask


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C acts instead of raising, so that it tears nothing that waits here; another's handler stays."""
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_ours:
        signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
