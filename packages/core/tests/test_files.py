"""Files and folders are whole or as they were, also where the last step fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightningrl.files import whole_file, whole_folder


def test_a_folder_that_cannot_take_its_place_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    place = tmp_path / "export"
    with whole_folder(place) as scratch:
        scratch.mkdir()
        (scratch / "a").write_text("first")
    with pytest.raises(OSError), whole_folder(place) as scratch:
        pass
    assert (place / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, rename = tmp_path / "export", Path.rename
    place.mkdir()
    (place / "a").write_text("first")

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".export.new":
            raise OSError("the disk is full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="full"), whole_folder(place) as scratch:
        scratch.mkdir()
    assert (place / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_file_that_its_body_gives_up_is_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / "a.json"
    place.write_text("first")
    with pytest.raises(ValueError, match="given up"), whole_file(place) as scratch:
        scratch.write_text("half")
        raise ValueError("given up")
    assert place.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
