"""What a reader has: an empty folder and one shell, into which the pages' own lines are typed, with our packages as
wheels built from here.

pip and uv find the wheels by PIP_FIND_LINKS and UV_FIND_LINKS. A line that asks PyTorch's own index for its CPU build
is replaced where it fails, and that is said: not every machine reaches that index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from once import made_once

__all__ = ["ReadersShell", "build_wheels", "install_as_the_pages_say", "install_lines", "readme_lines"]

ROOT = Path(__file__).resolve().parents[2]
CPU_BUILD: Final = "--torch-backend cpu "
ENDED: Final = "status of the line: "


class ReadersShell:
    """bash in a folder, with no virtual environment of ours."""

    def __init__(self, folder: Path, wheels: Path, say: Callable[[str], None]) -> None:
        """Each line is said after a `$`, and what it prints."""
        self._say = say
        links = {name: os.environ.get(name, "") for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
        found = {
            "PIP_FIND_LINKS": f"{links['PIP_FIND_LINKS']} {wheels}",
            "UV_FIND_LINKS": f"{links['UV_FIND_LINKS']},{wheels}".lstrip(","),
        }
        path = os.pathsep.join(
            entry for entry in os.environ["PATH"].split(os.pathsep) if entry != str(Path(sys.executable).parent)
        )
        ours = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env={
                "PIP_QUIET": "2",
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                **ours,
                **found,
                "PATH": path,
                "COLUMNS": "120",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bash.communicate()

    def type(self, line: str) -> None:
        """Returns when it has ended well; raises else."""
        status = self._run(line)
        if status and CPU_BUILD in line:
            self._say("(that index is not reached from here; the line above is replaced by these two)")
            status = self._run(f"pip install torch=={version('torch').partition('+')[0]}") or self._run(
                line.replace(CPU_BUILD, "")
            )
        if status:
            raise RuntimeError(f"{line!r} ended with status {status}")

    def _run(self, line: str) -> int:
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._say(f"$ {line}")
        self._bash.stdin.write(f"{line}\necho '{ENDED}'$?\n")
        for printed in self._bash.stdout:
            said, ended, status = printed.rstrip("\n").partition(ENDED)
            if said or not ended:
                self._say(said)
            if ended:
                return int(status)
        raise RuntimeError(f"{line!r} ended the shell")


def build_wheels(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "uv",
        "build",
        "--quiet",
        "--all-packages",
        "--wheel",
        "--out-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)


def readme_lines() -> list[str]:
    """Lines of README for whoever has our packages from an index: all but those of `make`, in an environment of its
    own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (package,) = re.findall(r"^Once it is released .*`(pip install [^`]+)`", text, re.MULTILINE)
    lines = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line and not line.startswith("make ")
    ]
    return [f"python -m venv .venv && source .venv/bin/activate && {package}", *lines]


def install_lines() -> list[str]:
    """README's lines from an environment to our packages, then what the other pages install, each once."""
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    asked = [line for page in pages for line in re.findall(r"^(?:uv )?pip install (?!-e).+$", page, re.MULTILINE)]
    first = readme_lines()
    return list(dict.fromkeys([*first[: first.index("lightningrl init first")], *asked]))


def install_as_the_pages_say(folder: Path) -> Path:
    """The environment's folder of commands. Made once in `folder`; raises with what was said."""
    return made_once(folder, make) / "home" / ".venv" / "bin"


def make(folder: Path) -> None:
    build_wheels(folder / "wheels")
    (folder / "home").mkdir()
    said: list[str] = []
    try:
        with ReadersShell(folder / "home", folder / "wheels", said.append) as shell:
            for line in install_lines():
                shell.type(line)
    except RuntimeError as error:
        raise AssertionError("\n".join([*said, str(error)])) from error
