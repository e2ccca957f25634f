"""A release: the version that every package and page says, and the files that are published."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["build_release", "find_version_slips", "list_packages", "read_version"]


def read_version(root: Path) -> str:
    """Read the one version, which is core's."""
    return str(_project(root / "packages" / "core" / "pyproject.toml")["version"])


def list_packages(root: Path) -> dict[str, Path]:
    """The published packages, by name; what only builds an environment for tests is none."""
    return {str(_project(path)["name"]): path for path in sorted(root.glob("packages/*/pyproject.toml"))}


def find_version_slips(root: Path) -> list[str]:
    """List, in a sentence each, where another version stands than core's."""
    version, packages = read_version(root), list_packages(root)
    slips = []
    for path in (root / "pyproject.toml", *root.glob("packages/*/cpu/pyproject.toml"), *packages.values()):
        project = _project(path)
        if project["version"] != version:
            slips.append(f"{path}: version {project['version']}, and core has {version}")
        extras: Sequence[str] = [each for group in project.get("optional-dependencies", {}).values() for each in group]
        for text in (*project.get("dependencies", ()), *extras):
            name, _, pinned = re.sub(r"\[.*?\]", "", text).partition("==")
            if name in packages and pinned not in ("", version):
                slips.append(f"{path}: needs {text}, and core has {version}")
    for name, pattern in (("CITATION.cff", r"^version: (\S+)$"), ("CHANGELOG.md", r"^## (\d\S*)")):
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if match is None or match[1] != version:
            slips.append(f"{root / name}: version {match[1] if match else 'missing'}, and core has {version}")
    return slips


def build_release(root: Path, folder: Path, only: Sequence[str] = ()) -> list[Path]:
    """Build wheels and sdists into a folder: of `only` these packages, of all where it is empty."""
    uv = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(folder)]
    for name, path in list_packages(root).items():
        if not only or name in only:
            subprocess.run([*uv, str(path.parent)], check=True)
    return sorted(file for file in folder.iterdir() if file.name.endswith((".whl", ".tar.gz")))


def _project(path: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project
