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
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except LightningError as error:
        if str(folder) not in str(error):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
