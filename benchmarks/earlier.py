"""Another commit of this repository, checked out beside this tree with an environment of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ENVIRONMENT", "ROOT", "checked_out"]

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Of what is measured: every tree keeps its bytecode, else one compiles at each start what another has kept."""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Its tree, installed; a folder that is one already (its `.venv` made) is taken as it is."""
    if Path(commit).is_dir():
        yield Path(commit).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="lightningrl-against-") as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True, capture_output=True)
        try:
            print(f"installing {commit} …", flush=True)
            subprocess.run(["make", ".venv/.installed"], cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True, capture_output=True)
