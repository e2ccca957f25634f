"""A run's numbers, read: `metrics.jsonl`, one JSON object per line.

{"step": 3, "time": 1763690000.5, "reward": 0.41, "minutes": 0.7}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightningrl.errors import RunFolderError

__all__ = ["read_lines", "read_metrics", "read_rows"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder as `read_metrics` gives them, read anew when they change; empty where there are
    none."""
    path = folder / "metrics.jsonl"
    try:
        stat = path.stat()
    except OSError:
        return []
    return _read_cached(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _read_cached(path: Path, _changed: int, _size: int) -> list[dict[str, Any]]:
    return read_metrics(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics by step, in order: lines of one step are joined, the last value of a name counts; null values are
    left out.

    An unfinished last line is skipped. Raises RunFolderError naming a broken line.
    """
    steps: dict[int, dict[str, Any]] = {}
    for step, _, entry in read_lines(path):
        steps.setdefault(step, {}).update({name: value for name, value in entry.items() if value is not None})
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Finished lines: each one's step, its bytes, and what it says. Raises RunFolderError naming a broken one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                try:
                    entry = json.loads(line)
                    yield int(entry["step"]), line, entry
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise RunFolderError(
                        f"line {number} of {str(path)!r} is no metrics entry: {error!r}; remove it"
                    ) from error
