"""A newcomer's walk: README's shell blocks, word for word, in an empty folder, with LightningRL installed from built wheels.

    python scripts/walk.py [FOLDER]

Prints every line with the seconds since the beginning. On a machine without a GPU PyTorch's CPU build comes first, as docs/install.md says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.13.0"
SECTION = "## An agent, a reward, a recipe"


def commands() -> list[str]:
    """What README's section has a reader type."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    return [line for block in re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL) for line in block.splitlines() if line]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="lightningrl-walk-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f}  {text}", flush=True)

    wheels, home = folder / "wheels", folder / "empty"
    home.mkdir()
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_FIND_LINKS": f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}", "COLUMNS": "120"}
    began = time.monotonic()
    for command in (f"pip install --quiet torch=={TORCH}", 'pip install --quiet "lightningrl[torch]"', *commands()):
        say(f"$ {command}")
        with subprocess.Popen(  # noqa: S602  (what a reader types into a shell)
            command, shell=True, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip())
        if process.returncode:
            raise SystemExit(f"{command!r} ended with status {process.returncode}")
    say("done")


if __name__ == "__main__":
    main()
