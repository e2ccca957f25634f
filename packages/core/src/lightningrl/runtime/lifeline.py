"""What ties a worker process to its pool: private pipes, and a death with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO, Final

__all__ = ["die_with_parent", "take_standard_streams"]

PR_SET_PDEATHSIG: Final = 1


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for the pool. The agent reads nothing from stdin, and what it prints goes to stderr."""
    commands = os.fdopen(os.dup(0), "rb")
    events = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, events


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux; elsewhere the end of stdin does it)."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
