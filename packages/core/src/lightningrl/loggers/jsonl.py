"""`metrics.jsonl`: one JSON object per line, on disk when `log` returns.

{"step": 3, "time": 1763690000.5, "reward": 0.41, "minutes": 0.7}
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl.errors import RunFolderError
from lightningrl.private import create_private

__all__ = ["JsonlLogger", "read_metrics"]


class JsonlLogger:
    """Appends metrics to a file. A line that a killed process left unfinished is cut off when the file is opened."""

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        """`resume_after` drops lines of later steps, which are about to be run again. Raises RunFolderError where it cannot write."""
        self._path = path
        try:
            if path.is_file():
                _repair(path, resume_after)
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line. Numbers that JSON cannot say (NaN, infinities) become null. Raises RunFolderError on a full disk."""
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
        return RunFolderError(f"metrics cannot be written to {str(self._path)!r}: {error}; free some space, then run again with --resume")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics by step, in order: lines of one step are joined, the last value of a name counts; null values are left out.

    An unfinished last line is skipped. Raises RunFolderError naming a broken line.
    """
    steps: dict[int, dict[str, Any]] = {}
    for step, _, entry in _entries(path):
        steps.setdefault(step, {}).update({name: value for name, value in entry.items() if value is not None})
    return [steps[step] for step in sorted(steps)]


def _entries(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Finished lines: each one's step, its bytes, and what it says. Raises RunFolderError naming a broken one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                try:
                    entry = json.loads(line)
                    yield int(entry["step"]), line, entry
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise RunFolderError(f"line {number} of {str(path)!r} is no metrics entry: {error!r}; remove it") from error


def _repair(path: Path, resume_after: int | None) -> None:
    """Rewrite the file without an unfinished line and without later steps, if it has any."""
    kept = b"".join(line for step, line, _ in _entries(path) if resume_after is None or step <= resume_after)
    if len(kept) == path.stat().st_size:
        return
    scratch = path.with_name(f".{path.name}.new")
    with create_private(scratch) as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(path, scratch)
    scratch.replace(path)


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
