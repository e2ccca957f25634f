"""Counts of rollouts by kind, among those that are asked for: what a person narrows a list down by.

The numbers of a facet are those that choosing another of its values would give: its own choice is left out, all others
count.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lightningrl_runs.queries.rollout_counts import Cell, FacetCount, Part, RewardValues
from lightningrl_runs.queries.rollout_query import RolloutQuery
from lightningrl_runs.reader import StoredRun

__all__ = ["Facets", "RewardRange", "read_facets", "read_parts", "reward_ranges"]

_RANGES = 5
V = TypeVar("V", int, str)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRange:
    """Rewards from `low` to `high`, both included; one value where they are the same."""

    low: float
    high: float
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facets:
    """Counts of the rollouts that a query asks for."""

    count: int
    reward: float | None
    """Mean of those that have one."""
    unrewarded: int
    """Rollouts without a reward, with the same choices but for the reward."""
    steps: tuple[FacetCount[int], ...]
    """All steps, training and the validation after it, whichever was chosen, in order."""
    modes: tuple[FacetCount[str], ...]
    endings: tuple[FacetCount[str], ...]
    """Outcomes, and `running` and `queued`."""
    rewards: tuple[RewardRange, ...]
    tasks: tuple[FacetCount[str], ...]
    """Least reward first."""


async def read_facets(run: StoredRun, query: RolloutQuery, *, most_tasks: int = 12) -> Facets:
    overview = run.queries
    ranges = reward_ranges(await overview.reward_values())
    wide = RolloutQuery(task=query.task, role=query.role, tool=query.tool, mark=query.mark, text=query.text)
    lows = [bounds.low for bounds in ranges[1:]]
    after = None if query.high is None else math.nextafter(query.high, math.inf)
    edges = sorted({*lows, *(edge for edge in (query.low, after) if edge is not None)})
    begins = [-math.inf, *edges]  # the chosen rewards begin and end with a cell, wherever they lie in the ranges
    cells = await overview.cells(wide, edges)
    checks: dict[str, Callable[[Cell], bool]] = {
        "step": lambda cell: (
            (query.first_step is None or cell.step >= query.first_step)
            and (query.last_step is None or cell.step <= query.last_step)
        ),
        "mode": lambda cell: query.mode is None or cell.mode is query.mode,
        "ending": lambda cell: (
            (query.outcome is None or cell.outcome is query.outcome)
            and (query.state is None or cell.state is query.state)
        ),
        "reward": lambda cell: _has_reward(cell, query, begins),
    }

    failed = [(cell, [name for name, check in checks.items() if not check(cell)]) for cell in cells]

    def but(left_out: str) -> list[Cell]:
        return [cell for cell, names in failed if not names or names == [left_out]]

    chosen = but("")
    by_range = Counter[int | None]()
    for cell in but("reward"):
        by_range[None if cell.bin is None else bisect_right(lows, begins[cell.bin])] += cell.count
    return Facets(
        count=_size(chosen),
        reward=_mean(chosen),
        unrewarded=by_range[None],
        steps=_facet(but("step"), lambda cell: cell.step),
        modes=_most_first(_facet(but("mode"), lambda cell: cell.mode.value)),
        endings=_most_first(_facet(but("ending"), lambda cell: (cell.outcome or cell.state).value)),
        rewards=tuple(replace(bounds, count=by_range[number]) for number, bounds in enumerate(ranges)),
        tasks=await overview.task_counts(replace(query, task=None), most_tasks),
    )


async def read_parts(run: StoredRun, *, most: int = 12) -> dict[Part, tuple[FacetCount[str | None], ...]]:
    """Count rollouts over the whole run, whatever is chosen: counting by call costs more than counting by rollout."""
    return {part: await run.queries.part_counts(part, most) for part in Part}


def reward_ranges(rewards: RewardValues) -> tuple[RewardRange, ...]:
    """Return each value where there are few, else ranges of one width, each of which ends just before the next."""
    if rewards.is_all:
        return tuple(RewardRange(low=value, high=value) for value in rewards.values)
    low, high = rewards.values
    lows = [low + (high - low) * number / _RANGES for number in range(_RANGES)]
    highs = [*(math.nextafter(begin, -math.inf) for begin in lows[1:]), high]
    return tuple(RewardRange(low=begin, high=end) for begin, end in zip(lows, highs, strict=True))


def _has_reward(cell: Cell, query: RolloutQuery, begins: Sequence[float]) -> bool:
    if query.is_unrewarded:
        return cell.bin is None
    if query.low is None and query.high is None:
        return True
    if cell.bin is None:
        return False
    begin = begins[cell.bin]
    return (query.low is None or begin >= query.low) and (query.high is None or begin <= query.high)


def _facet(cells: Sequence[Cell], value: Callable[[Cell], V]) -> tuple[FacetCount[V], ...]:
    """Count by value, in the values' order."""
    by_value: dict[V, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_value[value(cell)].append(cell)
    return tuple(FacetCount(value=name, count=_size(own), reward=_mean(own)) for name, own in sorted(by_value.items()))


def _most_first(counts: Sequence[FacetCount[str]]) -> tuple[FacetCount[str], ...]:
    return tuple(sorted(counts, key=lambda count: -count.count))


def _size(cells: Sequence[Cell]) -> int:
    return sum(cell.count for cell in cells)


def _mean(cells: Sequence[Cell]) -> float | None:
    rewarded = sum(cell.count for cell in cells if cell.bin is not None)
    return sum(cell.total for cell in cells) / rewarded if rewarded else None
