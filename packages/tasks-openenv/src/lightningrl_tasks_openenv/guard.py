"""Program that runs a server and ends it, with all that it has started, when whoever asked for it is gone: their end of
its standard input is closed. Standard library alone.

    python guard.py COMMAND …       the exit status is the command's
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

LOOK_S = 0.2
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
PR_SET_PDEATHSIG = 1


def watch(command: list[str]) -> int:
    """Run the command until it ends or our parent does."""
    ours = os.getpid()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: die_with(ours)
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parent = os.getppid()
    try:
        while process.poll() is None:
            readable, _, _ = select.select([sys.stdin], [], [], LOOK_S)
            if readable or os.getppid() != parent:
                break
    finally:
        end(process)
    return process.wait()


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent, which can end nobody once it was killed itself (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the whole process group: SIGTERM, and SIGKILL for what is left."""
    send(process.pid, signal.SIGTERM)
    patience = time.monotonic() + GRACE_S
    while process.poll() is None and time.monotonic() < patience:
        time.sleep(0.02)
    send(process.pid, signal.SIGKILL)


def send(group: int, number: int) -> None:
    """Send a signal to a group that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1:]))
