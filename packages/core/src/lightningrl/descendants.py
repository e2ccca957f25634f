"""Processes that a worker or a reward has started, whatever group they are in now: found by session and by a mark in their environment,
and killed.

worker ── leads ──► session ─┬─ its own group: the agent's forks and pools
   │                         └─ groups of programs (`command_agent`), with what these started
   └─ mark in the environment ──► who left the session, too (Linux, where one may look)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["MARK", "kill_children", "kill_descendants", "list_children", "make_mark"]

MARK: Final = "LIGHTNINGRL_WORKER_PROCESS"
"""The variable that holds a worker's mark. Whoever clears it and leaves the session is not found."""
ROUNDS: Final = 100
"""A process may start others while it is looked for, and takes a moment to die."""
PAUSE_S: Final = 0.01


def make_mark() -> str:
    """No other worker's."""
    return uuid.uuid4().hex


def kill_descendants(leader: int, mark: str) -> None:
    """Kill the session that `leader` leads and what has the mark, not `leader`. Returns when they are gone, or after a second."""
    for _ in range(ROUNDS):
        found = [pid for pid in _list_living() if pid != leader and _belongs(pid, leader, mark)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


def list_children() -> frozenset[int]:
    """Children of this process that live."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # as a rule: nobody has to be looked for
        return frozenset()
    return frozenset(_list_living(os.getpid()))


def kill_children(kept: frozenset[int]) -> None:
    """Kill all children of this process but those that are `kept`, and those that it adopts where it is a subreaper (Linux). Returns when
    there are none, or after so many rounds."""
    for _ in range(ROUNDS):
        children = list_children() - kept
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            for pid in children:
                os.waitpid(pid, 0)
            while not kept and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not children:
            return


def _list_living(parent: int | None = None) -> Iterator[int]:
    """All processes but zombies; only children of `parent`, where it is given."""
    if sys.platform != "linux":
        listed = subprocess.run(["/bin/ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
        for pid, its_parent, state in (line.split() for line in listed.splitlines()):
            if "Z" not in state and parent in (None, int(its_parent)):
                yield int(pid)
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, its_parent = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
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
