"""The curated folder: files of rows, for their owner alone, and there only when all are whole.

FOLDER/{sft,dpo,kto,tasks}.jsonl, or below train/ and validation/, and report.json
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from lightningrl.errors import RunFolderError

__all__ = ["KINDS", "RowFiles", "check_target"]

KINDS: Final = ("sft", "dpo", "kto", "tasks")


def check_target(folder: Path) -> None:
    """Raise RunFolderError where a folder cannot become a curated one: it has files already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunFolderError(f"{str(folder)!r} is no empty folder; name another for the curated rows: --into")


class RowFiles:
    """Rows being written beside the folder that they will be in; leaving without `publish` leaves nothing behind."""

    def __init__(self, folder: Path, *, is_split: bool) -> None:
        check_target(folder)
        self.counts: Counter[tuple[str, str]] = Counter()
        """Rows by side (`train`, `validation`, or empty) and kind."""
        self._folder = folder.absolute()
        self._sides = ("train", "validation") if is_split else ("",)
        self._files: dict[tuple[str, str], TextIO] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._draft = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}.", dir=self._folder.parent))
        except OSError as error:
            raise RunFolderError(
                f"no folder can be written at {str(self._folder)!r}: {error.strerror}; name another: --into"
            ) from error
        for side in self._sides:
            (self._draft / side).mkdir(exist_ok=True)
            for kind in KINDS:
                self._files[side, kind] = self._open.enter_context(_create(self._draft / side / f"{kind}.jsonl"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def write(self, side: str, kind: str, row: dict[str, Any]) -> None:
        """Add a row."""
        self._files[side, kind].write(json.dumps(row, ensure_ascii=False) + "\n")
        self.counts[side, kind] += 1

    def publish(self, report: dict[str, Any]) -> None:
        """Write the report and let the folder appear."""
        self._open.close()
        with _create(self._draft / "report.json") as file:
            file.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        check_target(self._folder)
        if self._folder.exists():
            self._folder.rmdir()
        self._draft.rename(self._folder)


def _create(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
