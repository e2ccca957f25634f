"""Tags and notes of a run: what was written is read, and nothing else's file is taken for one or written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightningrl.errors import RunFolderError
from lightningrl_runs.notes import NOTES, RunNotes, read_notes, write_notes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"source": None, "models": {}, "settings": {}}))
    return folder


def test_tags_and_a_note_come_back_as_they_were_written(run: Path) -> None:
    assert read_notes(run) == RunNotes()
    write_notes(run, RunNotes.of(["lr=1e-4", "baseline", "baseline"], "  the run of the talk ✓\r\n\nsecond line  "))
    assert read_notes(run) == RunNotes(tags=("baseline", "lr=1e-4"), note="the run of the talk ✓\n\nsecond line")
    assert (run / NOTES).stat().st_mode & 0o777 == 0o600
    write_notes(run, RunNotes())
    assert sorted(file.name for file in run.iterdir()) == ["run.json"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"tags": "a"}', '{"tags": [1]}', '{"note": 3}', '{"tags": ["a b"]}', "x" * 70_000, "[" * 9_000],
)
def test_a_file_of_something_else_is_said_and_not_written_over(run: Path, content: str) -> None:
    (run / NOTES).write_text(content)
    found = read_notes(run)
    assert found.problem is not None and NOTES in found.problem and not found.tags and not found.note
    with pytest.raises(RunFolderError, match=NOTES):
        write_notes(run, RunNotes.of(["new"]))
    assert (run / NOTES).read_text() == content


def test_a_link_is_replaced_and_what_it_leads_to_stays(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"tags": ["theirs"], "note": ""}')
    (run / NOTES).symlink_to(other)
    (run / f".{NOTES}.new").symlink_to(other)
    write_notes(run, RunNotes.of(["mine"]))
    assert read_notes(run).tags == ("mine",) and not (run / NOTES).is_symlink()
    assert "theirs" in other.read_text()


def test_a_folder_that_is_no_run_of_ours_gets_no_notes(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run of ours"):
        write_notes(tmp_path, RunNotes.of(["a"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tag", ["", "two words", "-a", "a,b", "<b>", "‮abc", "x" * 41, "a\n"])
def test_a_tag_that_cannot_be_kept_is_named(tag: str) -> None:
    with pytest.raises(RunFolderError, match="is no tag"):
        RunNotes.of([tag])
