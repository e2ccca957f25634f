"""Ctrl-C and SIGTERM: they end the current task, and say so at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

__all__ = ["cancel_on_signals"]


def cancel_on_signals(announce: Callable[[], object] = lambda: None) -> None:
    """Cancel the task that calls this when the process is told to stop; `announce` is called the first time."""
    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def stop(number: int) -> None:
        if not told:
            announce()
        told.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
