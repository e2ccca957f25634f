"""Processes that start others: they end with their parent, and everything that they started ends with them.

parent ── stdin, stdout, death signal ──► leader of a session ─┬─ its own group: forks and pools of somebody's code
                                            │                  └─ groups of programs, with what these started
                                            └─ mark in the environment ──► processes that left the session (Linux)

What they print goes to files for their owner alone: logs hold what agents were asked, said and printed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Final

__all__ = [
    "MARK",
    "ROUNDS",
    "die_with_parent",
    "kill",
    "kill_descendants",
    "list_living",
    "make_mark",
    "open_private",
    "take_stdout",
]

MARK: Final = "LIGHTNINGRL_WORKER_PROCESS"
"""The variable that holds a leader's mark. A process that clears it and leaves the session is not seen."""
ROUNDS: Final = 100
"""A process may start others while it is looked for, and takes a moment to die."""
PAUSE_S: Final = 0.01
PR_SET_PDEATHSIG: Final = 1


def open_private(path: Path) -> IO[bytes]:
    """Open a file to append to, unbuffered, created where there is none. A link is not followed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b", buffering=0)
    os.fchmod(file.fileno(), 0o600)
    return file


def take_stdout() -> BinaryIO:
    """Take standard output for answers to the parent: what is printed from now on, in C too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent (Linux; elsewhere the end of stdin does it). 0 = has none."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def make_mark() -> str:
    """Draw a mark that no other leader has."""
    return uuid.uuid4().hex


def kill_descendants(leader: int, mark: str) -> None:
    """Kill the session that `leader` leads and what has the mark, not `leader`: until all are gone, or for a second."""
    for _ in range(ROUNDS):
        pids = [pid for pid in list_living() if pid != leader and _belongs(pid, leader, mark)]
        if not pids:
            return
        kill(pids)
        time.sleep(PAUSE_S)


def kill(pids: Iterable[int]) -> None:
    """Kill those that live and are ours to kill."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def list_living(parent: int | None = None) -> Iterator[int]:
    """List all processes but zombies; only children of `parent`, where it is given."""
    if sys.platform != "linux":
        listing = subprocess.run(["/bin/ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
        for pid, its_parent, state in (line.split() for line in listing.stdout.splitlines()):
            if "Z" not in state and parent in (None, int(its_parent)):
                yield int(pid)
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
                state, its_parent = stat.rpartition(")")[2].split()[:2]
                if state not in ("Z", "X") and parent in (None, int(its_parent)):
                    yield int(entry.name)


def _belongs(pid: int, leader: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        if os.getsid(pid) == leader:
            return True
    if sys.platform != "linux" or not mark:
        return False
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # somebody else's, or it has ended meanwhile
        return False
