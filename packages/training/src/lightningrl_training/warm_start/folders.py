"""The folders of a warm start's stages, each a run of its own in the run that they are for.

<run>/warm_start/teacher/   rollouts of the teacher      <run>/warm_start/rows/   what they were curated to
<run>/warm_start/tuning/    as of `lightningrl tune`: metrics.jsonl, curve.png, checkpoints/, policy/
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightningrl.recipe import Recipe
from lightningrl_training.run_folder import RunFolder, take_lock

__all__ = ["open_stage"]


def open_stage(path: Path, recipe: Recipe, models: Mapping[str, str]) -> RunFolder:
    """Open a stage's folder: as it is where the stage began, else made anew. Raises RunFolderError."""
    if (path / "recipe.json").is_file():
        folder = RunFolder(path, take_lock(path))
        if folder.latest() is not None or folder.has_rollouts():
            return folder
        folder.close()
    return RunFolder.create(path, recipe, None, {}, models=models)
