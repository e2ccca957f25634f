"""What ties a worker process to its supervisor: a pipe that ends with it, and a death with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO, Final

__all__ = ["die_with_parent", "die_with_pipe", "kill_own_group", "take_stdin"]

PR_SET_PDEATHSIG: Final = 1


def take_stdin() -> BinaryIO:
    """Standard input, kept from the agent and from what it starts: they read nothing from theirs."""
    lifeline = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lifeline


def die_with_pipe(lifeline: BinaryIO) -> None:
    """Returns never: when the pipe ends, its writer is gone, and this process ends with what it started. What it says means nothing."""
    while os.read(lifeline.fileno(), 65_536):
        pass
    kill_own_group()


def kill_own_group() -> None:
    """This process and what it started, where it leads a group; else this process."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux; elsewhere the end of stdin does it)."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
