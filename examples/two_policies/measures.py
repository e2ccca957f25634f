"""What the learning table says of a validation beside its reward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "text_to_sql"))
sys.path.insert(0, str(Path(__file__).parent))

from reward import is_correct
from verdicts import verdicts_right

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over the rollouts that ended."""
    ended = [one for one in trajectories if one.output is not None]
    first = [one.output["drafts"][0]["query"] for one in ended]
    return {
        "accuracy": sum(is_correct(one.task, one.output["query"]) for one in ended) / len(trajectories),
        "first draft": sum(is_correct(one.task, query) for one, query in zip(ended, first, strict=True))
        / len(trajectories),
        "verdicts right": sum(verdicts_right(one.task, one.output) for one in ended) / max(1, len(ended)),
        "drafts per rollout": sum(len(one.output["drafts"]) for one in ended) / max(1, len(ended)),
    }
