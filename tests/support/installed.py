"""What a reader has: an environment in which the pages' own `pip install` lines were run, with our packages as wheels built from here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from once import made_once

__all__ = ["install_as_the_pages_say", "install_lines"]

ROOT = Path(__file__).resolve().parents[2]


def install_as_the_pages_say(folder: Path) -> Path:
    """The environment's folder of commands. Made once in `folder`; raises with what was said."""
    return made_once(folder, make) / "venv" / "bin"


def make(folder: Path) -> None:
    uv = [sys.executable, "-m", "uv"]
    run([*uv, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(folder / "wheels"), str(ROOT)])
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    python = str(folder / "venv" / "bin" / "python")
    # pip finds the CPU build of torch where there is no GPU, as install.md says; uv does not
    run([python, "-m", "pip", "install", "--quiet", f"torch=={version('torch').partition('+')[0]}"])
    wheels = sorted(str(wheel) for wheel in (folder / "wheels").glob("*.whl"))
    run([*uv, "pip", "install", "--quiet", "--python", python, *wheels, *sorted(install_lines())])


def install_lines() -> set[str]:
    """What the fenced blocks of README and docs ask pip for."""
    asked: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for line in re.findall(r"^(?:uv )?pip install (?:--torch-backend cpu )?(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            asked |= set() if line.startswith("-e") else set(shlex.split(line))
    return asked


def run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{shlex.join(command)}\n{ran.stdout}\n{ran.stderr}"
