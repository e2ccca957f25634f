"""A warm start: rows of traces or of a teacher, a tuned policy made of them, and RL from there, in one run.

traces | teacher ─► rows (curation) ─► tuned policy ─► the run's own start
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from lightningrl.recipe import Recipe

__all__ = ["explain_warm_start", "is_tuned"]


def explain_warm_start(recipe: Recipe) -> list[str]:
    """Say what is wrong with a recipe's table, a sentence; none where it has no such table, or all is well."""
    if not recipe.warm_start:
        return []
    if find_spec("lightningrl_traces") is None:
        return ["warm_start curates rows by a package that is not installed; pip install 'lightningrl[traces]'"]
    from lightningrl_training.warm_start.settings import find_mistakes

    return find_mistakes(recipe)


def is_tuned(run: Path) -> bool:
    """True where a run's warm start is over."""
    return (run / "warm_start" / "tuning" / "policy").is_dir()
