"""Files for their owner alone: records hold what agents were asked, said and printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

__all__ = ["create_private"]


def create_private(path: Path) -> IO[bytes]:
    """Create a file to write, in the place of a file or link. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
