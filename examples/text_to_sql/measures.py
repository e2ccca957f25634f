"""What the learning table says of a validation beside its reward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from reward import first_try_correct, was_rescued

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`first try`: share of tasks whose first query is right. `rescued`: of the wrong first queries that were
    rewritten, the share that ended right; `rewritten` counts them."""
    ended = [one for one in trajectories if one.output is not None]
    rescues = [verdict for one in ended if (verdict := was_rescued(one.task, one.output)) is not None]
    return {
        "first try": sum(first_try_correct(one.task, one.output) for one in ended) / len(trajectories),
        "rescued": sum(rescues) / max(1, len(rescues)),
        "rewritten": float(len(rescues)),
        "calls per rollout": sum(len(one.transitions) for one in ended) / max(1, len(ended)),
    }
