"""Clears a folder of rollouts: ends the processes that live in it, then removes it.

worker ── stdin ──► python guard.py FOLDER        the worker is gone, however it ended ─► clear(FOLDER)

Run as a program, it needs the standard library alone and no site-packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

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
        _remove(folder)
        if not was_inhabited and not os.path.lexists(folder):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE_S)


def _remove(folder: str) -> None:
    """Remove what is there, also folders that a program has closed (Go's module cache) or nested by the thousand: each
    is moved up before it is emptied. A link is removed, and what it leads to stays."""
    with contextlib.suppress(OSError):
        os.unlink(folder)  # noqa: PTH108  no folder: put there by a program
    left, prefix, number = ["."], os.urandom(8).hex(), 0
    with contextlib.suppress(OSError):
        _open(folder, os.lstat(folder).st_mode)
    with contextlib.suppress(OSError), _opened(folder) as top:
        while left:
            name = left.pop()
            with contextlib.suppress(OSError), _opened(name, top) as place:
                for entry in list(os.scandir(place)):
                    number += 1
                    with contextlib.suppress(OSError):
                        if not entry.is_dir(follow_symlinks=False):
                            os.unlink(entry.name, dir_fd=place)
                            continue
                        _open(entry.name, entry.stat(follow_symlinks=False).st_mode, place)
                        os.rename(entry.name, f"{prefix}{number}", src_dir_fd=place, dst_dir_fd=top)
                        left.append(f"{prefix}{number}")
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=top)
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106


def _open(folder: str, mode: int, place: int | None = None) -> None:
    """Make a folder writable that a program has closed."""
    if mode & 0o700 != 0o700:
        os.chmod(folder, 0o700, dir_fd=place)


@contextlib.contextmanager
def _opened(folder: str, place: int | None = None) -> Iterator[int]:
    """Open a folder that is no link. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def main() -> None:
    """Wait for the end of stdin, then clear the folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    clear(sys.argv[1])


if __name__ == "__main__":
    main()
