"""Clears a folder of rollouts: ends the processes that live in it, then removes it.

worker ── stdin ──► python guard.py FOLDER        the worker is gone, however it ended ─► clear(FOLDER)

Run as a program, it needs the standard library alone and no site-packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

__all__ = ["clear", "end_inhabitants"]

PATIENCE_S = 5.0
PAUSE_S = 0.02


def find_inhabitants(folder: str) -> list[int]:
    """Find the processes whose HOME or current folder is below `folder`, whatever group or session they are in. Empty
    where there is no /proc."""
    if not os.path.isdir("/proc/self"):  # noqa: PTH112  pathlib is not imported here
        return []
    below, home = f"{folder}/", f"HOME={folder}/".encode()
    pids = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            with open(f"{entry.path}/environ", "rb") as file:  # noqa: PTH123
                is_at_home = any(variable.startswith(home) for variable in file.read().split(b"\0"))
            if is_at_home or f"{os.readlink(f'{entry.path}/cwd')}/".startswith(below):  # noqa: PTH115
                pids.append(int(entry.name))
    return pids


def end_inhabitants(folder: str) -> bool:
    """Kill who lives in `folder`. Returns True if anybody did."""
    for pid in (inhabitants := find_inhabitants(folder)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(inhabitants)


def clear(folder: str, patience_s: float = PATIENCE_S) -> bool:
    """End who lives in `folder` and remove it, for at most `patience_s`. Returns True if nothing is left."""
    until = time.monotonic() + patience_s
    while True:
        was_inhabited = end_inhabitants(folder)
        if os.path.islink(folder):  # noqa: PTH114  put there by a program: what it leads to is not ours
            os.unlink(folder)  # noqa: PTH108
        shutil.rmtree(folder, ignore_errors=True)
        if not was_inhabited and not os.path.lexists(folder):
            return True
        if time.monotonic() > until:
            return False
        _open_folders(folder)
        time.sleep(PAUSE_S)


def _open_folders(folder: str) -> None:
    """Make folders writable that a program has closed, as Go's module cache."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)  # noqa: PTH101


def main() -> None:
    """Wait for the end of stdin, then clear the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    clear(sys.argv[1])


if __name__ == "__main__":
    main()
