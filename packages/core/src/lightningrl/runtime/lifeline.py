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
    """Keep stdin and stdout for the pool. The agent reads nothing from stdin, and what it prints goes to stderr.

    Processes that the agent starts have neither: programs do not inherit them, and forked processes let go of them.
    """
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

    def let_go() -> None:
        for descriptor in (commands.fileno(), events.fileno()):
            replace_by_nothing(descriptor, inheritable=False)

    os.register_at_fork(after_in_child=let_go)
    replace_by_nothing(0, inheritable=True)
    os.dup2(2, 1)
    return commands, events


def replace_by_nothing(descriptor: int, *, inheritable: bool) -> None:
    """Its number stays taken, for whoever still closes it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor, inheritable)
    os.close(nothing)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux; elsewhere the end of stdin does it)."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
