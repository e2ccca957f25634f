"""A folder for a command that leaves no run behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightningrl.errors import LightningError

__all__ = ["scratch_folder"]


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder that goes with the command, unless what it ends with names a log in it."""
    folder, is_named = Path(tempfile.mkdtemp(prefix=prefix)), False
    try:
        yield folder
    except LightningError as error:
        is_named = str(folder) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
