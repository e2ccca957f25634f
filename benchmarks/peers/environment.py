"""Environments of peers, one folder each below `.peers`, outside git: a peer's pins and ours never meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "environment"]

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / ".peers"


def environment(name: str, packages: Sequence[str], *, least: tuple[int, int] = (3, 11)) -> Path:
    """The Python of the peer's environment, made anew where what it holds has changed. `least` is the Python that the
    peer needs."""
    folder = CACHE / name
    python, mark, pins = folder / "bin/python", folder / "installed.txt", "\n".join(packages)
    if mark.exists() and mark.read_text() == pins:
        return python
    print(f"installing {', '.join(packages)} into {folder.relative_to(ROOT)} (once) …", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    uv = str(Path(sys.executable).with_name("uv"))
    interpreter = os.environ.get("PEER_PYTHON", f">={least[0]}.{least[1]}")  # which uv finds or fetches
    subprocess.run([uv, "venv", "--quiet", "--python", interpreter, str(folder)], check=True)
    # uv does not read pip's settings: the folder of wheels that pip would look in, if there is one, has torch's CPU
    # build.
    links = ["--find-links", where] if (where := os.environ.get("PIP_FIND_LINKS")) else []
    command = [uv, "pip", "install", "--quiet", "--python", str(python), *links]
    torch = [package for package in packages if package.startswith("torch==")]
    if torch and links and any(Path(links[1]).glob(f"torch-{torch[0].removeprefix('torch==')}+cpu-*")):
        packages = [f"{package}+cpu" if package in torch else package for package in packages]
    elif torch:
        subprocess.run([*command, "--torch-backend", "cpu", *torch], check=True)
    subprocess.run([*command, *packages], check=True)
    mark.write_text(pins)
    return python
