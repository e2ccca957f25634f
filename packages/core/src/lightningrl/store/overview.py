"""Questions about many rollouts at once: which of them, in what order, and how many there are of each kind.

Steps are counted from 1, as everywhere on screen: step 1 trains the rollouts that were planned at 0. A validation has the step after
which it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from lightningrl.types import Outcome, RolloutMode, RolloutState, ToolStatus

__all__ = [
    "Cell",
    "FacetCount",
    "Mark",
    "Overview",
    "Part",
    "RewardValues",
    "RolloutQuery",
    "RolloutRow",
    "Sort",
    "StepReward",
    "ToolCount",
]


class Sort(StrEnum):
    """The order of rollouts: what comes first."""

    DISAGREE = "disagree"
    """The groups whose rewards differ most, each group together."""
    NEWEST = "newest"
    WORST = "worst"
    BEST = "best"
    SLOWEST = "slowest"


class Mark(StrEnum):
    """An event in a rollout, or of its group."""

    CUT = "cut"
    """A completion ended at max_tokens."""
    BREAK = "break"
    TOOL_ERROR = "tool_error"
    REFUSED = "refused"
    """The gateway refused a call."""
    FAILED_REWARD = "failed_reward"
    SILENT = "silent"
    """All rewards of its group are equal: nothing is learned from it."""


class Part(StrEnum):
    """A kind of participant in rollouts."""

    ROLE = "role"
    TOOL = "tool"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutQuery:
    """Which rollouts. None = any."""

    first_step: int | None = None
    last_step: int | None = None
    mode: RolloutMode | None = None
    outcome: Outcome | None = None
    state: RolloutState | None = None
    low: float | None = None
    """Least reward."""
    high: float | None = None
    """Greatest reward."""
    is_unrewarded: bool = False
    task: str | None = None
    role: str | None = None
    tool: str | None = None
    mark: Mark | None = None
    text: str | None = None
    """Part of the rollout's or the task's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """A line of a table of rollouts."""

    id: str
    group_id: str
    task_id: str
    input: Any
    mode: RolloutMode
    step: int
    state: RolloutState
    outcome: Outcome | None
    reward: float | None
    spread: float | None
    """Standard deviation of the group's rewards; None = fewer than two have one."""
    calls: int
    attempts: int
    duration_s: float | None
    """Of the deciding attempt."""
    answer: Any = None
    """The task's reference answer."""
    output: Any = None
    """Of the deciding attempt; None = there is none yet, or it is long."""
    error: str | None = None
    """Of the deciding attempt; None as above."""
    is_long: bool = False
    """Output or error is longer than a list reads (`LONGEST_READ`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Rollouts of one step, mode, ending and range of rewards."""

    step: int
    mode: RolloutMode
    state: RolloutState
    outcome: Outcome | None
    bin: int | None
    """Which range of rewards; None = it has none."""
    count: int
    total: float
    """Sum of the rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FacetCount:
    """Rollouts with one value of a facet."""

    value: str | None
    """None = nobody said."""
    count: int
    reward: float | None = None
    """Mean of those that have one; of roles and tools nobody asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardValues:
    """The rewards that occur, in order."""

    values: tuple[float, ...]
    is_all: bool
    """They are at most eight; else the least and the greatest are given alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReward:
    """The rewards of a step's rollouts. Those of a group share a task, so the mean's uncertainty is that of the groups' means."""

    step: int
    mode: RolloutMode
    count: int
    mean: float
    groups: int
    variance: float
    """Of the groups' means (population)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCount:
    """Calls of a tool that ended alike."""

    name: str
    status: ToolStatus
    count: int


class Overview(Protocol):
    """How a store can be asked about many rollouts."""

    async def list_rows(
        self, query: RolloutQuery, sort: Sort = Sort.DISAGREE, after: str | None = None, limit: int = 100
    ) -> tuple[RolloutRow, ...]:
        """Those that come after the rollout `after`. `UnknownRecord` where there is none of that name."""
        ...

    async def cells(self, query: RolloutQuery, edges: Sequence[float] = ()) -> tuple[Cell, ...]:
        """`edges`: where ranges of rewards begin, but for the first."""
        ...

    async def task_counts(self, query: RolloutQuery, limit: int = 20) -> tuple[FacetCount, ...]:
        """Least reward first."""
        ...

    async def part_counts(self, part: Part, limit: int = 20) -> tuple[FacetCount, ...]:
        """Rollouts that have ended, by what took part in their deciding attempt; the most frequent first."""
        ...

    async def reward_values(self) -> RewardValues: ...

    async def step_rewards(self) -> tuple[StepReward, ...]:
        """In order."""
        ...

    async def tool_counts(self) -> tuple[ToolCount, ...]: ...

    async def cut_calls(self) -> dict[int, int]:
        """Completions of training rollouts that ended at max_tokens, by step."""
        ...
