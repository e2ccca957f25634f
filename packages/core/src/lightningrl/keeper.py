"""Runs a program and ends with it all that it started, whatever group, session, folder or environment that has.

process ── LIFELINE, SIGTERM ──► keeper, which adopts orphans (Linux) ──► program ──► what it starts

    python keeper.py LIFELINE GRACE_S MOST_BYTES command …       MOST_BYTES of one file; 0 = no bound

The end of the lifeline (the process is gone) kills all at once; SIGTERM reaches the program's group first, and all is
killed `GRACE_S` later. The status is the program's. One that cannot be started is told on stderr, and by its errno on
the lifeline. The program dies with a keeper that is killed (Linux).
Run as a program, it needs the standard library alone and no site-packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

__all__ = ["list_descendants", "main"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 10.0
"""Seconds that what is killed may take to end."""
PAUSE_S = 0.005
LOOK_S = 0.5
"""Between two looks for the parent: one that was forked from it may hold the lifeline as well."""


def list_descendants(pid: int) -> list[int]:
    """Processes that one has started, orphans among them, and those in turn. Empty where there is no /proc."""
    if not os.path.isdir("/proc/self"):  # noqa: PTH112  pathlib is not imported here
        return []
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"{entry.path}/stat", errors="replace") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    descendants = children.pop(pid, [])
    for each in descendants:
        descendants += children.pop(each, ())
    return descendants


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class _Program:
    """The program, and all that it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        """Status of `waitpid`; None = it runs."""

    def reap(self) -> bool:
        """Take the statuses of those that have ended. False = no children are left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.status = ended[1]
            return True
        return False

    def end(self) -> None:
        """Kill all, also what is started meanwhile: a parent's end makes its children ours."""
        until = time.monotonic() + PATIENCE_S
        _signal_group(self.pid, signal.SIGKILL)
        while self.reap() and time.monotonic() < until:
            for pid in list_descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(PAUSE_S)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux's alone
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _become(command: list[str], lifeline: int, most_bytes: int, keeper: int) -> None:
    """In the child: become the program, in a group of its own."""
    os.set_inheritable(lifeline, False)
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the line above
            os._exit(1)
        os.setpgid(0, 0)
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        if most_bytes:
            with contextlib.suppress(OSError, ValueError):  # the limit of this process is lower
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(lifeline, str(error.errno).encode())
        os.write(2, f"{error}: {command[0]!r}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def main() -> None:
    """Run the program to its end, or to our parent's."""
    own, parent = os.getpid(), os.getppid()
    lifeline, grace_s, most_bytes = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if (pid := os.fork()) == 0:
        _become(sys.argv[4:], lifeline, most_bytes, own)
    with contextlib.suppress(OSError):  # it is a program already, or gone
        os.setpgid(pid, pid)
    program, until = _Program(pid), None
    while program.status is None and (until is None or time.monotonic() < until):
        left_s = LOOK_S if until is None else min(LOOK_S, max(0.0, until - time.monotonic()))
        ready = select.select((reads, lifeline), (), (), left_s)[0]
        if lifeline in ready or os.getppid() != parent:
            break
        if reads in ready and signal.SIGTERM in os.read(reads, 4096) and until is None:
            _signal_group(pid, signal.SIGTERM)
            until = time.monotonic() + grace_s
        program.reap()
    program.end()
    status = os.waitstatus_to_exitcode(signal.SIGKILL if program.status is None else program.status)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
