"""Asynchronous work for callers that wait, wherever they are: a notebook's thread has an event loop already; and whether it is cancelled.

run_beside(work()) ─► a thread ─► asyncio.run        Ctrl-C ─► the work is cancelled, ends in order ─► KeyboardInterrupt
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, TypeVar

__all__ = ["Show", "is_being_cancelled", "run_beside", "show_nobody"]

T = TypeVar("T")
Show = Callable[[str, int, int], None]
"""Told what is being done, and how much of how much is; of 0 = nobody knows."""


def show_nobody(what: str, done: int, total: int) -> None:
    """Nobody looks on."""


def is_being_cancelled() -> bool:
    """Whether somebody cancels the task that runs. A CancelledError without that came out of what it awaits, and is a failure like others:
    of a task that somebody else gave up, say."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def run_beside(work: Coroutine[Any, Any, T]) -> T:
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

    with ThreadPoolExecutor(1) as thread, _on_interrupt(interrupt):
        try:
            return thread.submit(copy_context().run, asyncio.run, main()).result()
        except asyncio.CancelledError:
            if interrupted.is_set():
                raise KeyboardInterrupt from None
            raise


@contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C acts instead of raising, so that it never tears what waits here apart; where somebody else handles it, it stays theirs."""
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
