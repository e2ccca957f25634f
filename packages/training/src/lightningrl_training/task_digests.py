"""Digests of the tasks that a run started with, eight bytes each: a run that goes on must be given the same ones.

tasks ─► digests of id, input and answer, in their order ─► <run>/tasks.npz        3 MB for 300,000 tasks
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import RunFolderError
from lightningrl.types import Task
from lightningrl_server.store.columns import encode_json
from lightningrl_training.tasks import TaskSets

__all__ = ["TaskDigests", "decode_digests", "digest_tasks", "encode_digests", "explain_other_tasks"]

TaskDigests = Mapping[str, NDArray[np.uint64]]
"""Digests in the order of the tasks, by set."""


def digest_tasks(tasks: TaskSets) -> TaskDigests:
    return {"training": _digest(tasks.train), "validation": _digest(tasks.validation)}


def explain_other_tasks(before: TaskDigests, now: TaskDigests) -> str | None:
    """The difference of a run's tasks from those it started with; None = they are the same."""
    return (
        "; ".join(
            _explain(name, before[name], now[name]) for name in now if not np.array_equal(before[name], now[name])
        )
        or None
    )


def encode_digests(digests: TaskDigests) -> bytes:
    file = io.BytesIO()
    np.savez(file, training=digests["training"], validation=digests["validation"])
    return file.getvalue()


def decode_digests(path: Path) -> TaskDigests:
    """Raises RunFolderError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in ("training", "validation")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RunFolderError(
            f"{str(path)!r} cannot be read ({error}); restore it, or remove it to go on with the tasks there are"
        ) from error


def _digest(tasks: Iterable[Task]) -> NDArray[np.uint64]:
    parts = (encode_json([task.id, task.input, task.answer], f"task {task.id!r}").encode() for task in tasks)
    return np.frombuffer(b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in parts), np.uint64)


def _explain(name: str, before: NDArray[np.uint64], now: NDArray[np.uint64]) -> str:
    new, gone = int(np.isin(now, before, invert=True).sum()), int(np.isin(before, now, invert=True).sum())
    if not new and not gone:
        return f"the {len(now)} {name} tasks are in another order"
    return f"of {len(now)} {name} tasks {new} are new or changed, and of the {len(before)} before {gone} are gone"
