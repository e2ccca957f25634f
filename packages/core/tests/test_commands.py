"""The command line hosts what packages bring: their commands, those of strangers, and a sentence for those that are
missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from sizes import PATIENCE_S
from typer.testing import CliRunner

from lightningrl import commands
from lightningrl.commands import EXTRAS, app
from lightningrl.errors import ConfigError
from lightningrl.plugins import PluginManager, load_plugins

HELLO = '''
"""A stranger's commands: one function, one group."""
import typer
from lightningrl import Plugin, hookimpl

def create_hello():
    import this_is_heavy  # noqa: F401
    def hello(name: str, loud: bool = False) -> None:
        """Greet somebody."""
        print(f"Hello, {name}" + "!" * loud)
    return hello

def create_days():
    days = typer.Typer()
    @days.command()
    def tomorrow() -> None:
        """Say what comes."""
        print("another day")
    return days

@hookimpl
def lightningrl_commands():
    yield Plugin(name="hello", summary="Greet somebody from afar.", factory=create_hello)
    yield Plugin(name="days", summary="Look at days.", factory=create_days)
'''
HEAVY = "from pathlib import Path\nPath('imported').touch()\n"


def install(site: Path, name: str, modules: Mapping[str, str]) -> None:
    """Install a wheel of these modules with pip; the first is its plugin."""
    wheel = site.parent / f"{name}-0.1-py3-none-any.whl"
    info = f"{name}-0.1.dist-info"
    files = {
        **{f"{module}.py": text for module, text in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[lightningrl]\n{name} = {next(iter(modules))}\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=PATIENCE_S)


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "120"}
    command = [sys.executable, "-m", "lightningrl", *words]
    return subprocess.run(
        command, env=environment, cwd=site.parent, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def test_an_installed_package_adds_commands_that_are_imported_when_they_run(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "lightningrl_hello", {"lightningrl_hello": HELLO, "this_is_heavy": HEAVY})
    helped = run(site, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    ours, _, theirs = helped.stdout.partition("Commands of other packages")
    assert "Greet somebody from afar." in theirs and "Look at days." in theirs
    assert "Train the policy of RECIPE" in ours and "train" not in theirs
    assert not (tmp_path / "imported").exists()
    assert run(site, "hello", "Ada", "--loud").stdout == "Hello, Ada!\n"
    assert (tmp_path / "imported").exists()
    assert run(site, "days", "tomorrow").stdout == "another day\n"
    assert "Say what comes." in run(site, "days", "-h").stdout
    assert "from lightningrl_hello 0.1" in run(site, "plugins").stdout.replace("\n", " ")


def test_a_broken_plugin_is_named_and_other_commands_work(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "broken", {"broken": "import no_such_module_here"})
    helped = run(site, "--help")
    assert helped.returncode == 0
    assert "train" in helped.stdout
    assert "warning: plugin 'broken' of broken 0.1 cannot be loaded: ModuleNotFoundError" in helped.stderr
    assert "Traceback" not in helped.stderr


def test_a_command_of_a_name_that_is_taken_is_named_and_the_first_stays(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "z_later", {"z_later": HELLO.replace('"hello"', '"view"')})
    helped = run(site, "--help")
    assert (
        "warning: two commands are named 'view': from lightningrl-viewer 0.1.0 and z_later 0.1; uninstall one"
        in helped.stderr
    )
    assert "Look at a run in a browser" in helped.stdout


@pytest.mark.parametrize(
    ("command", "extra"), [("train", "torch"), ("work", "worker"), ("view", "view"), ("rollouts", "view")]
)
def test_a_command_whose_package_is_not_installed_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, command: str, extra: str
) -> None:
    monkeypatch.setattr(commands, "load_plugins", lambda report: PluginManager())
    listed, _, missing = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output.partition("Not installed:")
    assert command not in listed.replace("Train", "").split()
    assert re.search(rf"\b{command}\b.*: pip install 'lightningrl\[{extra}]'", " ".join(missing.split()))
    error = CliRunner().invoke(app, [command, "mine"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == f"command {command!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["plugins"], ["--help"]])
def test_an_output_that_takes_no_more_is_a_sentence(words: list[str]) -> None:
    command = [sys.executable, "-m", "lightningrl", *words]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: no space is left for what it writes or prints; free some space, then run again\n",
    )


def test_the_help_has_our_commands_in_their_order() -> None:
    assert set(load_plugins().commands) == set(EXTRAS)
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    listed = [line.split()[1] for line in text.partition("─ Commands ─")[2].splitlines()[1:] if re.match(r"│ \w", line)]
    assert listed == list(EXTRAS)


def test_help_and_lists_import_nothing_heavy() -> None:
    code = (
        "import sys, lightningrl.commands as c\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(c.app, ['--help']).exit_code == 0\n"
        "print([name for name in ('numpy', 'pydantic', 'httpx', 'sqlalchemy', 'torch', 'transformers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert ran.stdout == "[]\n"
