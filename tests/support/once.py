"""What is dear to make and only read is made by one of the test processes, for all of them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

__all__ = ["made_once"]


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by `make(folder)` in whichever process comes first; the others wait for it."""
    folder.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = folder.with_name(f"{folder.name}.finished")
        if not finished.exists():
            make(folder)
            finished.touch()
    return folder
