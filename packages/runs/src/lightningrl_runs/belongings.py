"""The files that a run made in its folder, and their removal. What else lies there is somebody's, and stays.

names of ours, in their places       store.sqlite-wal · logs/worker-3.log · branches/step-40/g17-3/store.sqlite
what a checkpoint's files.json lists  checkpoints/step-000010/policies/policy/state.pt
what run.json says loggers made      tensorboard/events.out.… · wandb/run-20251125_130000-x1y2
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from lightningrl_runs.origin import read_object, read_run_file

__all__ = [
    "FILES",
    "list_checkpoints",
    "list_made",
    "remove_checkpoint",
    "remove_made",
]

FILES: Final = "files.json"
"""The list of a checkpoint's files, in it."""
LISTED: Final = "files of this checkpoint"
_STORE: Final = r"store\.sqlite(-(wal|shm|lock|journal))?"
_PLACE: Final = rf"(run\.json|{_STORE}|logs/(server(-\d+)?|worker-\d+)\.log)"
"""Files of a place for rollouts: a branched rollout, an examined policy."""
_CHECKPOINT: Final = re.compile(r"step-\d{6,}")
_NAMES: Final = re.compile(
    rf"({_STORE}|logs/(server(-\d+)?|worker-\d+)\.log|recipe\.json|tasks\.npz|metrics\.jsonl|curve\.png|view\.key"
    r"|notes\.json"
    r"|\.(recipe\.json|run\.json|tasks\.npz|metrics\.jsonl|curve\.png|view\.key|notes\.json)\.new"
    r"|warm_start/rows/(report\.json|((train|validation)/)?(sft|dpo|kto|tasks)\.jsonl)"
    r"|tune/(rows\.json|reference(_validation)?\.npy)"
    rf"|branches/step-\d+/[^/]+/{_PLACE}|evaluations/[^/]+/[^/]+/{_PLACE})"
)

_LEVELS: Final = 4
"""Folders above a file of `_NAMES`, at most."""


def remove_made(run: Path) -> None:
    """Remove what the run in this folder made, but for its lock and its `run.json`, by which the folder is known as
    ours. No link is followed, so what lies elsewhere stays. A kill in the midst leaves the newest checkpoint whole, or
    none."""
    for stage in ("teacher", "tuning"):
        if _is_folder(run, "warm_start", stage) and (run / "warm_start" / stage / "run.json").is_file():
            remove_made(run / "warm_start" / stage)
            _remove(run, f"warm_start/{stage}/.lock", f"warm_start/{stage}/run.json")
    if _is_folder(run, "checkpoints"):
        for checkpoint in list_checkpoints(run):
            remove_checkpoint(checkpoint)
    _remove(run, "recipe.json")
    for scratch in (run / "checkpoints").glob(".step-*"):
        if _CHECKPOINT.fullmatch(scratch.name[1:]):
            _remove(run, f"checkpoints/{scratch.name}", whole=True)
    for name in map(str, read_run_file(run).get("made", ())):
        if name.count("/") == 1:
            _remove(run, name, whole=True)
    reports = [report.name for report in (run / "evaluations").glob("*.json") if _is_evaluation(report)]
    _remove(run, *(f"evaluations/{name}" for name in reports), *filter(_NAMES.fullmatch, list(_list_files(run))))
    for name in ("checkpoints", "logs", "tune"):
        _remove_empty(run / name)


def list_checkpoints(run: Path) -> list[Path]:
    """Folders with the names of checkpoints, oldest first. A copy under another name (`step-000010-keep`) is its
    maker's."""
    return sorted(folder for folder in (run / "checkpoints").glob("step-*") if _CHECKPOINT.fullmatch(folder.name))


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, at once as one that counts. Other folders are left alone, and so is what a link leads to."""
    if folder.is_symlink():
        folder.unlink()
        return
    listed = read_object(folder / FILES).get(LISTED)
    if not isinstance(listed, list):
        return
    # what lies in a folder comes before it
    _remove(folder, "loop.json", *sorted(map(str, listed), reverse=True), FILES, "policies")
    _remove_empty(folder)


def list_made(folder: Path) -> str:
    """Text of `FILES` for a checkpoint that is whole but for that."""
    return json.dumps({LISTED: _list_below(folder)}) + "\n"


def _list_below(folder: Path) -> list[str]:
    """Files and folders below a folder, by their path from there."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def _list_files(folder: Path) -> Iterator[str]:
    """Files below a folder, as deep as ours lie, by their path from there; links to folders are not followed."""
    left = [""]
    while left:
        above = left.pop()
        with suppress(OSError), os.scandir(folder / above) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield f"{above}{entry.name}"
                elif above.count("/") < _LEVELS:
                    left.append(f"{above}{entry.name}/")


def _is_evaluation(report: Path) -> bool:
    """True for a file of results beside the folder with the rollouts of the policies that were examined."""
    return report.with_suffix("").is_dir() and {"evaluations", "comparison"} <= read_object(report).keys()


@contextmanager
def _open_folder(run: Path, parts: Sequence[str]) -> Iterator[int]:
    """Open a folder below `run`. Raises OSError where it is none, or the way to it leads over a link."""
    with ExitStack() as opened:
        place = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
        opened.callback(os.close, place)
        for part in parts:
            place = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            opened.callback(os.close, place)
        yield place


def _is_folder(run: Path, *parts: str) -> bool:
    try:
        with _open_folder(run, parts):
            return True
    except OSError:
        return False


def _remove(run: Path, *names: str, whole: bool = False) -> None:
    """Remove files, links and empty folders below `run`, `whole` folders too, and the folders that are empty without
    them. What a link leads to stays."""
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            continue
        try:
            with _open_folder(run, parts[:-1]) as place:
                if not stat.S_ISDIR(os.stat(parts[-1], dir_fd=place, follow_symlinks=False).st_mode):
                    os.unlink(parts[-1], dir_fd=place)
                elif whole:
                    shutil.rmtree(parts[-1], dir_fd=place)
                else:
                    _remove_empty(parts[-1], place)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
                continue
            raise
        for above in range(len(parts) - 1, 0, -1):
            with suppress(OSError), _open_folder(run, parts[: above - 1]) as place:
                _remove_empty(parts[above - 1], place)


def _remove_empty(folder: Path | str, place: int | None = None) -> None:
    """Remove a folder in which nothing lies."""
    with suppress(OSError):
        os.rmdir(folder, dir_fd=place)
