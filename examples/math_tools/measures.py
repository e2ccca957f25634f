"""What the learning table says of a validation, beside its reward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from reward import answer_match

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Column of the table -> value. A rollout that failed is a wrong one."""
    by_depth: dict[int, list[float]] = {}
    for one in trajectories:
        by_depth.setdefault(int(one.task.metadata["depth"]), []).append(answer_match(one.task, one.output))
    rights = [right for column in by_depth.values() for right in column]
    count = max(1, len(trajectories))
    return {
        "accuracy": sum(rights) / count,
        **{f"{depth} step{'s' * (depth > 1)}": sum(column) / len(column) for depth, column in sorted(by_depth.items())},
        "calls per rollout": sum(len(one.transitions) for one in trajectories) / count,
        "unanswered": sum(not one.output for one in trajectories) / count,
    }
