"""A process and the one that started it: its standard output is for answers that the parent reads, and it ends with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import BinaryIO, Final

__all__ = ["PR_SET_PDEATHSIG", "die_with_parent", "take_stdout"]

PR_SET_PDEATHSIG: Final = 1


def take_stdout() -> BinaryIO:
    """Standard output, kept for answers: what anybody prints from now on, in C or in a child too, goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux; elsewhere the end of stdin does it)."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
