"""Measure what each task source's package adds to an installation of `lightningrl`, and print the table of
docs/how-to/task-sources.md.

    python scripts/install_sizes.py              all of packages/tasks-*
    python scripts/install_sizes.py openenv      one of them

wheels of the workspace ─► an environment with `lightningrl`, one with `lightningrl[EXTRA]` ─► files of site-packages
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
UV: Final = str(Path(sys.executable).with_name("uv"))
EXTRAS: Final = tuple(sorted(path.name.removeprefix("tasks-") for path in (ROOT / "packages").glob("tasks-*")))
OWN: Final = {"openenv": ROOT / ".venv-openenv", "verifiers": ROOT / ".venv-verifiers"}
"""Environments of the libraries that run in a process of their own (`make test-openenv`)."""


def installed(folder: Path) -> dict[str, int]:
    """Bytes of each file in an environment's packages, compiled ones left out."""
    (packages,) = folder.glob("lib/python*/site-packages")
    files = (path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(packages)): path.stat().st_size for path in files}


def install(wheels: Path, folder: Path, requirement: str) -> dict[str, int]:
    """Make an environment with a requirement, and list its files."""
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    command = [UV, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), "--find-links", str(wheels)]
    subprocess.run([*command, requirement], check=True)
    return installed(folder)


def mb(size: int) -> str:
    return f"{size / 1e6:.1f}" if size < 1e7 else f"{size / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(EXTRAS)}; none = all")
    arguments = parser.parse_args()
    if unknown := set(arguments.extras) - set(EXTRAS):
        parser.error(f"no extra {min(unknown)!r}; there are: {', '.join(EXTRAS)}")
    lines = []
    with tempfile.TemporaryDirectory(prefix="sizes-") as name:
        wheels = Path(name) / "wheels"
        subprocess.run(
            [UV, "build", "--quiet", "--wheel", "--all-packages", "--out-dir", str(wheels)], cwd=ROOT, check=True
        )
        plain = install(wheels, Path(name) / "plain", "lightningrl")
        for extra in arguments.extras or EXTRAS:
            files = install(wheels, Path(name) / extra, f"lightningrl[{extra}]")
            own = sum(
                size for path, size in files.items() if f"tasks_{extra.replace('-', '_')}" in path.partition("/")[0]
            )
            added = sum(size for path, size in files.items() if path not in plain) - own
            beside = OWN.get(extra)
            apart = mb(sum(installed(beside).values())) if beside is not None and beside.exists() else "–"
            lines.append(f"| `lightningrl[{extra}]` | {mb(own)} | {mb(added)} | {apart} |")
            print(lines[-1], flush=True)
    print(f"\n`lightningrl` alone: {mb(sum(plain.values()))} MB")
    print(
        "| MB | its own files | what it needs | its library, in an environment of its own |\n|---|---|---|---|",
        *lines,
        sep="\n",
    )


if __name__ == "__main__":
    main()
