"""Processes that start others: they end with their parent, and everything that they started ends with them.

parent ── lifeline ──► keeper.py ──► a program, `Child` ──► what it starts

parent ── stdin, stdout, death signal ──► leader of a session ─┬─ its own group: forks and pools of somebody's code
                                            │                  └─ groups of programs, with what these started
                                            └─ mark in the environment ──► processes that left the session (Linux)

A keeper of its own costs a program 24 ms of CPU; who starts many, or has to know their pids, leads them by a mark.

What they print goes to files for their owner alone: logs hold what agents were asked, said and printed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, Final

from lightningrl import keeper

__all__ = [
    "ENDING_S",
    "MARK",
    "ROUNDS",
    "Child",
    "die_with_parent",
    "keeping",
    "kill",
    "kill_descendants",
    "list_living",
    "make_mark",
    "open_private",
    "start_error",
    "take_stdout",
]

ENDING_S: Final = 2 * keeper.PATIENCE_S
"""Seconds that a keeper may take to end all, beyond its grace."""
LOG_TAIL: Final = 600
"""Characters of a program's log in a sentence."""
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


def keeping(lifeline: socket.socket, grace_s: float = 0.0, most_bytes: int = 0) -> tuple[str, ...]:
    """Words before a command that have a keeper run it, which inherits `lifeline`."""
    return (sys.executable, "-I", "-S", keeper.__file__, str(lifeline.fileno()), str(grace_s), str(most_bytes))


def start_error(lifeline: socket.socket) -> OSError | None:
    """Return why a program that has ended could not be started; None = it was. `lifeline`: the end that is ours."""
    lifeline.setblocking(False)
    with contextlib.suppress(OSError):  # something runs still, and nothing could end it
        if code := lifeline.recv(16):
            return OSError(int(code), os.strerror(int(code)))
    return None


class Child:
    """A program that runs. What it prints goes to a log of its own, which is gone with it.

    `end` it; the end of this process ends it as well. In a process that is forked meanwhile it counts as ended, and
    cannot be ended from there.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 0.0,
        is_asked: bool = False,
    ) -> None:
        """Start it. `environment` is added to ours; `grace_s` is its time between SIGTERM and SIGKILL. `is_asked`: its
        `stdin` and `stdout` are pipes; else it reads nothing."""
        self._owner = os.getpid()
        self._grace_s = grace_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in the end
        self._tail = ""
        self._lock = threading.RLock()
        self._lifeline, theirs = socket.socketpair()
        self.start_error: OSError | None = None
        """Why it could not be started, once it has ended."""
        with theirs:
            self._process = subprocess.Popen(
                [*keeping(theirs, grace_s), *command],
                stdin=subprocess.PIPE if is_asked else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_asked else self._log,
                stderr=self._log,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        atexit.register(self.end)

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def is_running(self) -> bool:
        """True while it runs; False in a process that was forked since."""
        return self._owner == os.getpid() and self.status is None

    @property
    def status(self) -> int | None:
        """Its exit status; None = it runs."""
        return self._process.poll()

    def wrote(self) -> str:
        """Return `; it wrote: …` with the end of its log, empty where it wrote nothing."""
        with self._lock:
            if not self._log.closed:
                log, most = self._log.fileno(), 4 * LOG_TAIL  # bytes of a character, at most
                end = os.pread(log, most, max(0, os.fstat(log).st_size - most)).decode(errors="replace").strip()
                self._tail = f"; it wrote: {end[-LOG_TAIL:]}" if end else ""
            return self._tail

    def end(self) -> None:
        """End it and all that it has started. May be called again."""
        atexit.unregister(self.end)
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._log.closed:
                return
            if self.status is None:
                self._process.terminate()
                self._process.send_signal(signal.SIGCONT)  # the program may have stopped its keeper
                try:
                    self._process.wait(self._grace_s + ENDING_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self.start_error = start_error(self._lifeline)
            self.wrote()
            self._lifeline.close()
            self._log.close()


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
