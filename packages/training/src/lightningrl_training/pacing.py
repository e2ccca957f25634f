"""Pacing of asynchronous collection: which groups a step may take next, so that none gets older than
`loop.max_staleness`.

Age is counted in versions, from a group's first call; a group that no worker has begun has none. A step may take any
finished group while the ones that stay out can still be taken in time, the oldest first; else it waits for the oldest.

    tasks_per_step = 4, max_staleness = 1, 2 more wanted        ages  1  1  0  0  0  0
    the next take leaves room for 1 more in this step           both of age 1 have to be in it: one of them is next
    tasks_per_step = 4, max_staleness = 1, 3 more wanted        ages  1  1  0  0  0  0  0
    the next take leaves room for 2 more in this step           any may be next
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Pacing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pacing:
    """The order in which groups may be taken where it is not that of their tasks."""

    tasks_per_step: int
    max_staleness: int
    versions: Callable[[], Mapping[str, int]]
    """The versions that policies serve now, by name."""

    def takeable(self, ages: Mapping[int, int], wanted: int) -> Sequence[int]:
        """Positions that may be taken next, the oldest first; `ages` of all that are out, by position. `wanted`: groups
        that the step still takes. Empty only where nothing is out."""
        oldest_first = sorted(ages, key=lambda position: (-ages[position], position))
        for place, position in enumerate(oldest_first):
            # without this group, `wanted - 1` more in this step and `tasks_per_step` in each until it is too old
            room = wanted - 1 + self.tasks_per_step * (self.max_staleness - ages[position])
            if place >= room:
                return oldest_first[: place + 1]
        return oldest_first
