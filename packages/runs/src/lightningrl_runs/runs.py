"""The runs of a folder beside each other: how far each came, and in what their recipes differ. No store is opened."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightningrl.errors import RunFolderError
from lightningrl_runs.metrics import read_rows
from lightningrl_runs.notes import RunNotes, read_notes
from lightningrl_runs.origin import read_import, read_values
from lightningrl_runs.summary import is_live
from lightningrl_server.store.location import has_store

__all__ = ["RunLine", "differences", "is_run", "read_runs", "run_folders"]

_NOT_COMPARED = ("name", "agent", "tasks.", "runtime.", "logger")
"""Keys that say where and how a run ran, not what was learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """A run in a list."""

    name: str
    folder: Path
    changed_at: float
    """Unix seconds of the last thing it measured."""
    is_live: bool
    steps: int = 0
    """Training steps that were measured."""
    rewards: Sequence[float] = ()
    """Mean reward of each training step."""
    validations: Sequence[float] = ()
    minutes: float | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values by dotted key."""
    total: int | None = None
    """Training steps that its recipe asks for; None = it does not say."""
    problem: str | None = None
    """Reason why its metrics or its notes cannot be read."""
    is_import: bool = False
    """Made by `lightningrl import-traces`: nothing was trained in it."""
    notes: RunNotes = field(default_factory=RunNotes)
    """Tags and note that people put on it."""

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed_at))


def is_run(folder: Path) -> bool:
    """True where a run was begun in it. A `run.json` alone may be any program's."""
    try:
        return (folder / "run.json").is_file() and has_store(folder)
    except OSError:  # the name is too long for one, or it may not be read
        return False


def run_folders(folder: Path) -> list[Path]:
    """List the runs right below a folder; none of those that may not be read."""
    return [path.parent for path in folder.glob("*/run.json") if is_run(path.parent)]


def read_runs(folder: Path) -> list[RunLine]:
    """Read the runs below a folder, newest first."""
    lines = [_read(run) for run in run_folders(folder)]
    return sorted(lines, key=lambda line: (-line.changed_at, line.name))


def differences(lines: Sequence[RunLine]) -> dict[str, list[Any]]:
    """Return the keys of the recipes whose values differ between these runs, with each run's value; None = it has
    none."""
    readable = [line for line in lines if line.recipe]
    keys = sorted({key for line in readable for key in line.recipe if not key.startswith(_NOT_COMPARED)})
    values = {key: [line.recipe.get(key) for line in lines] for key in keys}
    return {
        key: row
        for key, row in values.items()
        if any(line.recipe.get(key) != readable[0].recipe.get(key) for line in readable)
    }


def _read(folder: Path) -> RunLine:
    path = folder / "metrics.jsonl"
    place = path if path.is_file() else folder / "run.json"
    try:
        rows, problem = read_rows(folder), None
    except RunFolderError as error:
        rows, problem = [], str(error)
    trained, notes = [row for row in rows if "rollouts" in row], read_notes(folder)
    minutes = [row["minutes"] for row in rows if "minutes" in row]
    recipe = _recipe(folder, _stamp(folder / "recipe.json"))
    total = recipe.get("loop.steps")
    return RunLine(
        name=folder.name,
        folder=folder,
        changed_at=place.stat().st_mtime,
        is_live=is_live(folder),
        steps=len(trained),
        rewards=[row["reward"] for row in trained if "reward" in row],
        validations=[row["validation/reward"] for row in rows if "validation/reward" in row],
        minutes=max(minutes) if minutes else None,
        recipe=recipe,
        total=total if isinstance(total, int) else None,
        problem=problem or notes.problem,
        is_import=read_import(folder) is not None,
        notes=notes,
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=256)
def _recipe(folder: Path, _changed: tuple[int, int]) -> dict[str, Any]:
    return {key: json.dumps(value) if isinstance(value, list) else value for key, value in read_values(folder).items()}
