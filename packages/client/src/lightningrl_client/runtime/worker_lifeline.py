"""The ties of a worker process to its supervisor: a pipe that ends with it, and a line for its first words.

The first words are the worker's: they are said before the agent runs, and nothing that is said later is heard.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import BinaryIO, Final

from lightningrl.processes import MARK, kill_descendants

__all__ = ["LOST_STATUS", "die_with_pipe", "kill_own_group", "read_failure", "say_first", "take_stdin"]

LOST_STATUS: Final = 4
"""The exit status of a worker that gave up on the server."""
READY: Final = b"\0ready\n"
LONGEST_FAILURE: Final = 16_384
"""Bytes of the sentence that says why a worker could not begin."""


def take_stdin() -> BinaryIO:
    """Standard input, kept from the agent and from what it starts: they read nothing from theirs."""
    lifeline = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def die_with_pipe(lifeline: BinaryIO) -> None:
    """Returns never: when the pipe ends, its writer is gone, and this process ends with what it started. What it says
    means nothing."""
    while os.read(lifeline.fileno(), 65_536):
        pass
    kill_descendants(os.getpid(), os.environ.get(MARK, ""))
    kill_own_group()


def kill_own_group() -> None:
    """This process and what it started, where it leads a group; else this process."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def say_first(line: int, failure: str = "") -> None:
    """Why this worker cannot begin, or that it does; then the line is closed. `line` 0 = nobody listens."""
    if not line:
        return
    os.set_blocking(line, False)
    with contextlib.suppress(OSError):  # the supervisor is gone, or the agent's module has filled the line
        os.write(line, failure.encode(errors="replace")[:LONGEST_FAILURE] if failure else READY)
    with contextlib.suppress(OSError):
        os.close(line)


def read_failure(line: int) -> str:
    """Why a worker that has ended could not begin; "" = it did, or said nothing. Closes the line."""
    os.set_blocking(line, False)
    try:
        words = os.read(line, LONGEST_FAILURE)
    except OSError:  # what it left behind holds the other end
        words = b""
    os.close(line)
    return "" if READY in words else words.decode(errors="replace")
