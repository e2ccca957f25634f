"""Files for their owner alone: logs and records hold what agents were asked, said and printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

__all__ = ["create_private", "open_private"]


def open_private(path: Path) -> IO[bytes]:
    """Open a file to append to, unbuffered, created where there is none. A link is not followed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b", buffering=0)
    os.fchmod(file.fileno(), 0o600)
    return file


def create_private(path: Path) -> IO[bytes]:
    """Create a file to write, in the place of a file or link. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
