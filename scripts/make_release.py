"""Build a release and try it: wheels and sdists, their metadata, README's own lines in an empty environment, then every
package in it.

    make release            or  python scripts/make_release.py [FOLDER]

Writes into dist/, or FOLDER, which is new or empty. Nothing is uploaded: the last lines say what was tried, how long it
took, and how the release is published.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from installed import ReadersShell, readme_lines
from releases import build_release, find_version_slips, list_packages, read_version

ROOT = Path(__file__).resolve().parents[1]
UV = (sys.executable, "-m", "uv")
ALONE: Final = frozenset({"lightningrl-verl"})
"""Packages that are installed without what they need, which is gigabytes; `make test-verl` tries them with it."""


class Stages:
    """What was tried, and the seconds that each took."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._lines: list[str] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f}  {text}", flush=True)

    def close(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._lines.append(f"  {name:10} {now - self._last:5.0f} s  {text}")
        self._last = now

    def summary(self) -> str:
        return "\n".join([*self._lines, f"  {'in all':10} {time.monotonic() - self._began:5.0f} s"])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty; move it away, or name another: python scripts/make_release.py FOLDER")
    if slips := find_version_slips(ROOT):
        sys.exit("\n".join(slips))
    stages = Stages()
    made, names = build_release(ROOT, folder), sorted(list_packages(ROOT))
    wheels = [file for file in made if file.suffix == ".whl"]
    stages.close("built", f"{len(wheels)} wheels and {len(made) - len(wheels)} sdists of {len(names)} packages")
    subprocess.run(
        [*UV, "tool", "run", "--quiet", "twine", "--no-color", "check", "--strict", *map(str, made)], check=True
    )
    stages.close("metadata", f"twine check --strict passes {len(made)} files")
    with tempfile.TemporaryDirectory(prefix="lightningrl-release-") as home:
        try_wheels(Path(home), wheels, names, stages)
    print(f"\nlightningrl {read_version(ROOT)} is ready in {folder}:\n{stages.summary()}")
    print(f"  nothing is uploaded; publish it: twine upload {folder}/*")


def try_wheels(home: Path, wheels: Sequence[Path], names: Sequence[str], stages: Stages) -> None:
    """Type README's lines in an empty folder, then install and import every package in the environment they made."""
    links, empty = home / "wheels", home / "empty"
    empty.mkdir()
    links.mkdir()
    for wheel in wheels:
        shutil.copy(wheel, links)
    lines = readme_lines()
    with ReadersShell(empty, links, stages.say) as shell:
        for line in lines:
            shell.type(line)
    stages.close("README", f"its {len(lines)} lines ran from the wheels in an empty folder")
    python = empty / ".venv" / "bin" / "python"
    found = ",".join(filter(None, (os.environ.get("UV_FIND_LINKS", ""), str(links))))
    install = [*UV, "pip", "install", "--quiet", "--python", str(python)]
    whole = [name for name in names if name not in ALONE]
    subprocess.run([*install, *whole], check=True, env={**os.environ, "UV_FIND_LINKS": found})
    subprocess.run(
        [*install, "--no-deps", *(set(names) & ALONE)], check=True, env={**os.environ, "UV_FIND_LINKS": found}
    )
    modules = sorted({module for wheel in wheels for module in list_modules(wheel)})
    program = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([python, "-I", "-c", program, *modules], check=True, cwd=empty)
    subprocess.run([python.with_name("lightningrl"), "plugins"], check=True, cwd=empty, stdout=subprocess.DEVNULL)
    alone = f"; {', '.join(sorted(ALONE))} without what they need" if ALONE else ""
    stages.close("packages", f"all {len(names)} installed together, each imports and lists its plugins{alone}")


def list_modules(wheel: Path) -> set[str]:
    """Return the top-level modules of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist() if "/" in name}
    return {top for top in tops if not top.endswith((".dist-info", ".data"))}


if __name__ == "__main__":
    main()
