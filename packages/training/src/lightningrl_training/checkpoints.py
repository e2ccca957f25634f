"""The checkpoints of a run: each whole, with the state of the loop after its step.

<run>/checkpoints/step-000010/{policies/NAME/, files.json, loop.json}
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.errors import RunFolderError
from lightningrl.recipe import LoopConfig
from lightningrl_runs.belongings import list_checkpoints

__all__ = ["Checkpoint", "LoopState", "best_checkpoint", "checkpoints", "find_checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """The state of the loop after a step; kept in each checkpoint."""

    step: int
    """Training steps done."""
    seconds: float
    """Time spent in the loop so far, over all its processes."""
    rollouts: int
    """Rollouts whose gradient the weights contain."""
    steps_with_signal: int = 0
    """Steps in which some group taught anything."""
    position: int = 0
    """Position in the stream of tasks: all before it are done with."""
    done_beyond: tuple[int, ...] = ()
    """Positions after it that are done with, too: asynchronous collection takes groups as they finish."""
    credit: Any = None
    """The memory of the credit assigner."""
    score: float | None = None
    """Score of these weights in validation; None = they were not validated, or nothing came of it."""
    best_score: float | None = None
    """The best score of a validation so far."""
    validations_since_best: int = 0
    """Validations since, whose score was no better."""

    def has_reached(self, loop: LoopConfig) -> bool:
        """True where a validation was as good as `loop.stop_at` asks for."""
        return loop.stop_at is not None and self.best_score is not None and self.best_score >= loop.stop_at

    def has_lost_patience(self, loop: LoopConfig) -> bool:
        """True where `loop.patience` validations in a row were no better than the best."""
        return loop.patience is not None and self.validations_since_best >= loop.patience


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    """Folder of the policies, each below its name."""
    state: LoopState


def checkpoints(path: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run folder, oldest first. While the run trains, old ones go."""
    complete = []
    for folder in list_checkpoints(path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            values = json.loads((folder / "loop.json").read_text(encoding="utf-8"))
            state = LoopState(**{**values, "done_beyond": tuple(values.get("done_beyond", ()))})
            complete.append(Checkpoint(folder=folder / "policies", state=state))
    return complete


def best_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint of the best validation, of equals the first; None = none was validated."""
    scored = [saved for saved in checkpoints(path) if saved.state.score is not None]
    return max(scored, key=lambda saved: saved.state.score or 0.0, default=None)


def find_checkpoint(path: Path, which: str | int | None = None) -> Checkpoint:
    """Find the `"newest"`, the `"best"` by validation, a step's; None = the best, if any. Raises RunFolderError."""
    saved = checkpoints(path)
    if not saved:
        raise RunFolderError(f"run {str(path)!r} has no checkpoint yet; train it first")
    best = best_checkpoint(path)
    if which == "newest" or (which is None and best is None):
        return saved[-1]
    if which in (None, "best"):
        if best is None:
            raise RunFolderError(
                f"run {str(path)!r} has no checkpoint that was validated, so none is the best; take 'newest', or a step"
            )
        return best
    chosen = next((each for each in saved if str(each.state.step) == str(which)), None)
    if chosen is None:
        steps = ", ".join(str(each.state.step) for each in saved)
        raise RunFolderError(
            f"run {str(path)!r} has no checkpoint of step {which!r}; take 'newest', 'best', or one of: {steps}"
        )
    return chosen
