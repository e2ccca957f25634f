"""The run folder that an import makes: what `view`, `rollouts`, `export-rollouts` and `curate` open.

store.sqlite   the rollouts        grades.jsonl   a line for each call: rollout_id, call_id, grade, reasons
run.json       where they came from               recipe.json    a recipe of no agent, whose policy is never trained
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from lightningrl.files import write_durably
from lightningrl.recipe import Recipe
from lightningrl_traces.run_store import FOREIGN
from lightningrl_viewer.reading.origin import read_import

__all__ = ["GRADES", "read_mark", "write_folder"]

GRADES: Final = "grades.jsonl"


def read_mark(folder: Path) -> str | None:
    """The mark of the source that a folder was imported from; None where it holds no import."""
    traces = read_import(folder)
    return None if traces is None else str(traces.get("mark"))


def write_folder(folder: Path, mark: str, source: Path, formats: Sequence[str], grades: Iterable[str]) -> None:
    """Write what makes a folder with a store a run; `run.json`, which says that it is one, last."""
    path = folder / GRADES
    path.touch(mode=0o600)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(grades)
    (folder / "metrics.jsonl").touch(mode=0o600)
    write_durably(folder / "recipe.json", _recipe(folder.name).frozen_text())
    origin = {
        "source": None,
        "folder": str(folder.parent.resolve()),
        "run": str(folder.resolve()),
        "models": {},
        "settings": {},
        "traces": {"mark": mark, "source": str(source.resolve()), "formats": list(formats)},
    }
    write_durably(folder / "run.json", json.dumps(origin, indent=2) + "\n")


def _recipe(name: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": name.strip(".").removesuffix(".importing") or FOREIGN,
            "agent": "traces:none",
            "tasks": {"train": "traces:none"},
            "policy": {"name": FOREIGN, "model": FOREIGN, "trainable": False},
            "rewards": {"reported": {"use": "traces:none"}},
        }
    )
