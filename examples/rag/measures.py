"""What a table of runs says about validation rollouts, beside their reward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from reward import exact_match, f1, has_format

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over all rollouts; one that failed or came to no answer counts as 0 in all but `searches`.

    `searches` are the searches of a rollout, `repeated` the share of them that had been made before in the same
    rollout.
    """
    count = max(1, len(trajectories))
    searches = [[str(call.arguments) for call in one.tool_calls if call.name == "search"] for one in trajectories]
    made = sum(map(len, searches))
    return {
        "f1": sum(f1(one.task.answer, one.output) for one in trajectories) / count,
        "exact_match": sum(exact_match(one.task.answer, one.output) for one in trajectories) / count,
        "format": sum(has_format(one.output) for one in trajectories) / count,
        "searches": made / count,
        "repeated": (made - sum(len(set(queries)) for queries in searches)) / max(1, made),
    }
