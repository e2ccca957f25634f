"""Tags and a note that people put on a run: `notes.json` in its folder, for its pages and for `lightningrl runs`.

<run>/notes.json   {"tags": ["baseline", "lr=1e-4"], "note": "the run of the talk"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightningrl.errors import RunFolderError
from lightningrl.files import write_durably
from lightningrl.sanitize import parse_json, printable
from lightningrl_runs.origin import is_own

__all__ = ["NOTES", "RunNotes", "read_notes", "write_notes"]

NOTES: Final = "notes.json"
MOST_TAGS: Final = 20
LONGEST_TAG: Final = 40
LONGEST_NOTE: Final = 4_000
_MOST_BYTES: Final = 64_000
_TAG: Final = re.compile(rf"[\w][\w.:=+/@-]{{0,{LONGEST_TAG - 1}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """Tags and note of a run."""

    tags: tuple[str, ...] = ()
    """Sorted, each once."""
    note: str = ""
    problem: str | None = None
    """Reason why the file cannot be read; tags and note are empty then, and it is not written over."""

    @classmethod
    def of(cls, tags: Iterable[str] = (), note: str = "") -> RunNotes:
        """Make notes of what a person gave. Raises RunFolderError naming a tag or note that cannot be kept."""
        tags = sorted(set(tags))
        for tag in tags:
            if not _TAG.fullmatch(tag) or printable(tag) != tag:
                raise RunFolderError(
                    f"{tag[:60]!r} is no tag; begin with a letter or a digit, and use letters, digits and "
                    f". : = + / @ - _, at most {LONGEST_TAG} characters"
                )
        if len(tags) > MOST_TAGS:
            raise RunFolderError(f"{len(tags)} tags are too many for a run; give it at most {MOST_TAGS}")
        text = "\n".join(line.rstrip() for line in note.splitlines()).strip()
        if len(text) > LONGEST_NOTE:
            raise RunFolderError(f"a note of {len(text):,} characters is too long; write at most {LONGEST_NOTE:,}")
        return cls(tags=tuple(tags), note=text)


def read_notes(folder: Path) -> RunNotes:
    """Read a run's tags and note; empty where it has none. A file that holds anything else is said in `problem`."""
    path = folder / NOTES
    try:
        if not path.is_file():
            return RunNotes()
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        value = parse_json(content) if len(content) <= _MOST_BYTES else None
    except OSError as error:
        return RunNotes(problem=f"{str(path)!r} cannot be read: {error.strerror}; make it readable, or remove it")
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(tags := value.get("tags", []), list):
        return _broken(path)
    note = value.get("note", "")
    if not isinstance(note, str) or not all(isinstance(tag, str) for tag in tags):
        return _broken(path)
    try:
        return RunNotes.of(tags, note)
    except RunFolderError as error:
        return RunNotes(problem=f"{str(path)!r}: {error}")


def write_notes(folder: Path, notes: RunNotes) -> None:
    """Write a run's tags and note in one rename; empty ones remove the file. Raises RunFolderError where the folder is
    no run of ours, where its file holds something else, and where it cannot be written."""
    path = folder / NOTES
    if not is_own(folder):
        raise RunFolderError(f"no run of ours in {str(folder)!r}; name the folder of a run")
    if (problem := read_notes(folder).problem) is not None:
        raise RunFolderError(problem)
    notes = RunNotes.of(notes.tags, notes.note)
    text = json.dumps({"tags": notes.tags, "note": notes.note}, ensure_ascii=False, indent=1) + "\n"
    try:
        if notes.tags or notes.note:
            write_durably(path, text)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"notes cannot be written to {str(path)!r}: {error.strerror}; free space or make the folder writable"
        ) from error


def _broken(path: Path) -> RunNotes:
    return RunNotes(problem=f'{str(path)!r} is not {{"tags": ["…"], "note": "…"}}; mend it, or remove it')
