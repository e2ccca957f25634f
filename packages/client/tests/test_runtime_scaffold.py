"""`lightningrl new adapter NAME`: what it writes works as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightningrl.errors import ConfigError
from lightningrl.scaffold import new_package


def test_a_new_adapter_passes_its_own_tests(tmp_path: Path) -> None:
    folder = new_package("adapter", "my-framework", tmp_path / "mine")
    assert (
        "class MyFrameworkAdapter(BaseInstrumentor)" in (folder / "src/lightningrl_my_framework/adapter.py").read_text()
    )
    assert [
        str(file)
        for file in folder.rglob("*")
        if "NAME_" in str(file) or (file.is_file() and "NAME_" in file.read_text())
    ] == []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:langsmith_plugin"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout[-3000:]
    assert " passed" in tests.stdout


def test_its_plugin_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_package("adapter", "other", tmp_path / "other")
    monkeypatch.syspath_prepend(str(folder / "src"))
    from lightningrl_other import plugin  # type: ignore[import-not-found]

    from lightningrl.plugins import PluginManager

    manager = PluginManager()
    manager.register(plugin)
    assert type(manager.adapters["other"].factory()).__name__ == "OtherAdapter"


@pytest.mark.parametrize("name", ["", "My Framework", "1st", "class", "a/b"])
def test_a_name_that_is_no_package_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="lower-case"):
        new_package("adapter", name, tmp_path / "x")


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="in use"):
        new_package("adapter", "fine", tmp_path)
