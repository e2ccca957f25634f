"""Files for their owner alone: logs hold what agents were asked, said and printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

__all__ = ["open_private"]


def open_private(path: Path) -> IO[bytes]:
    """Open a file to append to, unbuffered, made where there is none; what an earlier version left readable is so no more. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b", buffering=0)
    os.fchmod(file.fileno(), 0o600)
    return file
