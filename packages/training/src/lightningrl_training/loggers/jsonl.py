"""`metrics.jsonl`: one JSON object per line, on disk when `log` returns.

{"step": 3, "time": 1763690000.5, "reward": 0.41, "minutes": 0.7}
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from lightningrl.errors import RunFolderError
from lightningrl.files import create_private, whole_file
from lightningrl_runs.metrics import read_lines

__all__ = ["JsonlLogger"]


class JsonlLogger:
    """Appends metrics to a file. A line that a killed process left unfinished is cut off when the file is opened."""

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        """`resume_after` drops lines of later steps, soon run again. Raises RunFolderError where it cannot write."""
        self._path = path
        try:
            if path.is_file():
                _repair(path, resume_after)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line. NaN and infinities, which JSON lacks, become null. Raises RunFolderError on a full disk."""
        values = {name: _number(value) for name, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values}, allow_nan=False) + "\n"
        data = line.encode()
        try:
            start = os.fstat(self._file.fileno()).st_size
            written = self._file.write(data)
            if written != len(data):
                self._file.truncate(start)
                raise OSError(f"only {written} of {len(data)} bytes fitted")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"metrics cannot be written to {str(self._path)!r}: {error}; free some space, then run again with --resume"
        )


def _repair(path: Path, resume_after: int | None) -> None:
    """Rewrite the file without an unfinished line and without later steps, if it has any."""
    lines = b"".join(line for step, line, _ in read_lines(path) if resume_after is None or step <= resume_after)
    if len(lines) == path.stat().st_size:
        return
    with whole_file(path) as scratch:
        with create_private(scratch) as file:
            file.write(lines)
        shutil.copymode(path, scratch)


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
