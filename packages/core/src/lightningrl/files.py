"""Files and folders that are whole or not there, and locks that go with their process."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["create_private", "lock", "locked", "release", "sync", "whole_file", "whole_folder", "write_durably"]


def create_private(path: Path) -> IO[bytes]:
    """Create a file to write, in the place of a file or link, for its owner alone. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def write_durably(path: Path, content: str | bytes) -> None:
    """Write a file of its owner's alone, in one rename: whole and on disk, or as it was. Raises OSError."""
    with whole_file(path) as scratch, create_private(scratch) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path beside `path`, at which the body makes a file. That is brought to disk and takes the place of `path`
    when the body ends; where it fails, or is killed, `path` is as it was. Raises OSError."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Do the same for a folder, which the body makes; what a killed process left beside `path` goes. Between two
    renames the folder that was there is beside it, as `.NAME.PID.old`; it comes back where the second fails. Raises
    OSError."""
    path = path.absolute()
    scratch, old = path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        yield scratch
        for made in [*scratch.rglob("*"), scratch]:
            sync(made)
        if path.exists():  # nothing takes the place of a folder that holds something
            path.rename(old)
        try:
            scratch.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of a file that is there for it; a link is not followed. Raises as `lock` does, and OSError."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b") as file:
        lock(file, wait_s=wait_s)
        yield


def lock(file: IO[str] | IO[bytes] | int, *, wait_s: float = 0.0) -> None:
    """Lock an open file for this process, until it is closed; Windows has no such lock. Raises BlockingIOError where
    another process has it for `wait_s`: one that is just ending, or asks whether it is locked, has it for a moment."""
    if sys.platform == "win32":
        return
    import fcntl

    give_up = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise
        time.sleep(0.02)


def release(file: IO[str] | IO[bytes]) -> None:
    """Close a locked file. Closed alone, it would be held by processes that were forked meanwhile."""
    if sys.platform != "win32" and not file.closed:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()
