"""What the learning table says of a validation, beside its reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightningrl import Trajectory

__all__ = ["measure"]


def measure(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Column of the table -> value. A rollout that failed is a wrong one."""
    by_kind: dict[str, list[float]] = {}
    for rollout in trajectories:
        right = float(rollout.output == rollout.task.answer)
        by_kind.setdefault(str(rollout.task.metadata.get("sentences", "all")), []).append(right)
    rights = [right for column in by_kind.values() for right in column]
    count = max(1, len(trajectories))
    parts = {kind: sum(column) / len(column) for kind, column in sorted(by_kind.items()) if len(by_kind) > 1}
    return {
        "accuracy": sum(rights) / count,
        **{f"{kind} sentences": share for kind, share in parts.items()},
        "calls per rollout": sum(len(rollout.transitions) for rollout in trajectories) / count,
    }
