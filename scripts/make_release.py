"""Build a release and try it: wheels and sdists, their metadata, README's own lines in an empty environment.

    make release            or  python scripts/make_release.py [FOLDER]

Writes into dist/, or FOLDER, which is new or empty. Nothing is uploaded: the last line says how that is done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from installed import ReadersShell, readme_lines
from releases import build_release, find_version_slips

ROOT = Path(__file__).resolve().parents[1]
TWINE = (sys.executable, "-m", "uv", "tool", "run", "--quiet", "twine")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty; move it away, or name another: python scripts/make_release.py FOLDER")
    if slips := find_version_slips(ROOT):
        sys.exit("\n".join(slips))
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f}  {text}", flush=True)

    made = build_release(ROOT, folder)
    say(f"{len(made)} files in {folder}")
    subprocess.run([*TWINE, "check", "--strict", *map(str, made)], check=True)
    with tempfile.TemporaryDirectory(prefix="lightningrl-release-") as home:
        wheels, empty = Path(home) / "wheels", Path(home) / "empty"
        empty.mkdir()
        wheels.mkdir()
        for wheel in folder.glob("*.whl"):
            shutil.copy(wheel, wheels)
        with ReadersShell(empty, wheels, say) as shell:
            for line in readme_lines():
                shell.type(line)
    say(f"README's lines ran from these wheels; the release lies in {folder}, and twine upload {folder}/* publishes it")


if __name__ == "__main__":
    main()
