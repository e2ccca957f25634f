"""Counts of rollouts by kind, among those that are asked for: what a person narrows a list down by.

The numbers of a facet are those that choosing another of its values would give: its own choice is left out, all others
count.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightningrl_viewer.reading.queries.rollout_counts import Cell, FacetCount, Part, RewardValues
from lightningrl_viewer.reading.queries.rollout_query import RolloutQuery
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["Facets", "PartCounts", "RewardRange", "StepCount", "read_facets", "read_parts", "reward_ranges"]

_RANGES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRange:
    """Rewards from `low` to `high`, both included; one value where they are the same."""

    low: float
    high: float
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """The chosen rollouts of a training step, or of the validation after it."""

    step: int
    count: int
    reward: float | None
    """Mean of those that have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facets:
    """Counts of the rollouts that a query asks for."""

    count: int
    reward: float | None
    """Mean of those that have one."""
    unrewarded: int
    """Rollouts without a reward, with the same choices but for the reward."""
    steps: tuple[StepCount, ...]
    """All steps, whichever was chosen, in order."""
    modes: tuple[FacetCount, ...]
    endings: tuple[FacetCount, ...]
    """Outcomes, and `running` and `queued`."""
    rewards: tuple[RewardRange, ...]
    tasks: tuple[FacetCount, ...] = field(default=())
    """Least reward first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCounts:
    """Roles and tools of a run, with the number of rollouts that have them."""

    roles: tuple[FacetCount, ...]
    tools: tuple[FacetCount, ...]


async def read_facets(run: StoredRun, query: RolloutQuery, *, most_tasks: int = 12) -> Facets:
    overview = run.queries
    ranges = reward_ranges(await overview.reward_values())
    wide = replace(
        query,
        first_step=None,
        last_step=None,
        mode=None,
        outcome=None,
        state=None,
        low=None,
        high=None,
        is_unrewarded=False,
    )
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

    chosen, of_rewards = but(""), but("reward")
    by_range = _count(of_rewards, lambda cell: None if cell.bin is None else bisect_right(lows, begins[cell.bin]))
    by_step: dict[int, list[Cell]] = defaultdict(list)
    for cell in but("step"):
        by_step[cell.step].append(cell)
    return Facets(
        count=_size(chosen),
        reward=_mean(chosen),
        unrewarded=by_range.get(None, 0),
        steps=tuple(StepCount(step=step, count=_size(own), reward=_mean(own)) for step, own in sorted(by_step.items())),
        modes=_facet(but("mode"), lambda cell: cell.mode.value),
        endings=_facet(but("ending"), lambda cell: cell.outcome.value if cell.outcome else cell.state.value),
        rewards=tuple(replace(bounds, count=by_range.get(number, 0)) for number, bounds in enumerate(ranges)),
        tasks=await overview.task_counts(replace(query, task=None), most_tasks),
    )


async def read_parts(run: StoredRun, *, most: int = 12) -> PartCounts:
    """Count over the whole run, whatever is chosen: counting by call costs more than counting by rollout."""
    roles, tools = [await run.queries.part_counts(part, most) for part in (Part.ROLE, Part.TOOL)]
    return PartCounts(roles=roles, tools=tools)


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


def _facet(cells: Sequence[Cell], value: Callable[[Cell], str]) -> tuple[FacetCount, ...]:
    names = sorted({value(cell) for cell in cells})
    of = {name: [cell for cell in cells if value(cell) == name] for name in names}
    counts = [FacetCount(value=name, count=_size(own), reward=_mean(own)) for name, own in of.items()]
    return tuple(sorted(counts, key=lambda count: -count.count))


def _count(cells: Iterable[Cell], value: Callable[[Cell], int | None]) -> dict[int | None, int]:
    counts: dict[int | None, int] = defaultdict(int)
    for cell in cells:
        counts[value(cell)] += cell.count
    return counts


def _size(cells: Sequence[Cell]) -> int:
    return sum(cell.count for cell in cells)


def _mean(cells: Sequence[Cell]) -> float | None:
    rewarded = sum(cell.count for cell in cells if cell.bin is not None)
    return sum(cell.total for cell in cells) / rewarded if rewarded else None
