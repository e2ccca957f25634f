"""`lightningrl export`: a run's newest weights as a transformers folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightningrl.errors import RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl.training.parts import Parts
from lightningrl.training.run_folder import RunFolder, newest_run

__all__ = ["export_command"]


def export_command(target: Path, *, run: Path | None, runs: Path) -> None:
    folder, recipe, _ = RunFolder.resume(run or newest_run(runs), {})
    try:
        saved = folder.latest()
        if saved is None:
            raise RunFolderError(f"run {str(folder.path)!r} has no checkpoint yet; train it first")
        if target.exists() and any(target.iterdir()):
            raise RunFolderError(f"folder {str(target)!r} is not empty; give another")
        backend = Parts.build(recipe, load_plugins(), will_run=False).backend()
        try:
            backend.load(saved[0])
            backend.export(target)
        finally:
            backend.close()
    finally:
        folder.close()
    Console().print(f"wrote {target}: weights after step {saved[1].step}", highlight=False)
