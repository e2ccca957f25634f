"""A newcomer's walk: README's lines as whoever has our packages types them into one shell in an empty folder,
with LightningRL installed from wheels built from here.

    python scripts/walk.py [FOLDER]

Prints every line with the seconds since the beginning. Where PyTorch's own index is not reached, it says which line was
replaced by what.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from installed import ReadersShell, build_wheels, readme_lines


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="lightningrl-walk-"))
    (folder / "empty").mkdir(parents=True)
    build_wheels(folder / "wheels")
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f}  {text}", flush=True)

    with ReadersShell(folder / "empty", folder / "wheels", say) as shell:
        for line in readme_lines():
            shell.type(line)
    say("done")


if __name__ == "__main__":
    main()
