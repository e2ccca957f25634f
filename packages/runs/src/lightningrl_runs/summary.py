"""A run at a glance: its curves with their uncertainty, what is wrong with it, where its time and tokens went.

metrics.jsonl, store ─► read_summary(run, folder) ─► Summary: train, validation ─ parts ─ endings ─ alarms ─ bill
"""

from __future__ import annotations

import fcntl
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightningrl.figures import LEVEL, t_quantile, wilson
from lightningrl.types import RolloutMode
from lightningrl_runs.alarms import Alarm, find_alarms
from lightningrl_runs.metrics import read_rows
from lightningrl_runs.origin import read_values
from lightningrl_runs.progress import RunProgress, measure_progress
from lightningrl_runs.queries.rollout_counts import StepReward, ToolCount
from lightningrl_runs.queries.rollout_query import RolloutQuery
from lightningrl_runs.reader import StoredRun

__all__ = [
    "Bill",
    "Point",
    "StepLine",
    "Summary",
    "effective_count",
    "interval",
    "is_live",
    "read_summary",
]

_PARTS: Final = ("collect", "reward", "credit", "learn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Mean at a step; the interval holds the mean of all such rollouts with 95 %: Wilson's where rewards are 0 or 1,
    else Student's t over groups."""

    step: int
    mean: float
    low: float | None = None
    """None = one group alone says nothing of it."""
    high: float | None = None
    count: int = 0
    """Rollouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLine:
    """A training step."""

    step: int
    reward: float | None
    endings: Mapping[str, int]
    """Rollouts by outcome."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The run's use of tokens and time so far. None = its metrics do not say."""

    rollouts: int
    """All that were asked for."""
    counted_rollouts: float
    """Rollouts whose prompts and completions are counted, of training and validation."""
    trained_rollouts: float
    """Rollouts of the training steps."""
    prompt_tokens: float | None
    completion_tokens: float | None
    trained_tokens: float | None
    minutes: float | None
    seconds: Mapping[str, float]
    """Seconds of the training steps, by what they were spent on; `other` is the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run so far."""

    train: tuple[Point, ...]
    validation: tuple[Point, ...]
    parts: Mapping[str, tuple[Point, ...]]
    """Rewards that the reward is made of, and what intermediate ones pay a rollout, by name; of training."""
    steps: tuple[StepLine, ...]
    tools: tuple[ToolCount, ...]
    alarms: tuple[Alarm, ...]
    bill: Bill
    is_live: bool
    progress: RunProgress
    is_share: bool
    """True where each reward is 0 or 1, so that their mean is the share that was solved."""


async def read_summary(run: StoredRun, folder: Path) -> Summary:
    rows = read_rows(folder) or [{"step": record.step, **record.metrics} for record in await run.look.steps()]
    rewards = await run.queries.step_rewards()
    endings: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    cells = await run.queries.cells(RolloutQuery())
    for cell in cells:
        if cell.mode is RolloutMode.TRAIN and cell.outcome is not None:
            endings[cell.step][cell.outcome.value] += cell.count
    values = await run.queries.reward_values()
    is_share = values.is_all and set(values.values) <= {0.0, 1.0}
    tools, cut = await run.queries.tool_counts(), await run.queries.cut_calls()
    train = {point.step: point for point in _points(rewards, RolloutMode.TRAIN, is_share)}
    of_training = [row for row in rows if "rollouts" in row]
    trained = [
        StepLine(
            step=row["step"],
            reward=train[row["step"]].mean if row["step"] in train else None,
            endings=endings[row["step"]],
            metrics=row,
        )
        for row in of_training
    ]
    done = {line.step for line in trained}
    live, recipe = is_live(folder), read_values(folder)
    return Summary(
        train=tuple(point for step, point in train.items() if step in done or not done),
        validation=tuple(_points(rewards, RolloutMode.VALIDATION, is_share)),
        parts=_parts(of_training),
        steps=tuple(trained),
        tools=tools,
        alarms=find_alarms(of_training, endings, tools, cut),
        bill=_bill(rows, sum(cell.count for cell in cells)),
        is_live=live,
        progress=measure_progress(rows, cells, recipe, is_live=live),
        is_share=is_share,
    )


def is_live(folder: Path) -> bool:
    """True while a process holds the run's folder: its lock goes with it, whoever has its number afterwards."""
    try:
        with (folder / ".lock").open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def interval(mean: float, variance: float, groups: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of group means, by Student's t; None = one group. `variance` is the
    sample's."""
    if groups < 2:
        return None
    half = t_quantile(groups - 1, LEVEL) * math.sqrt(variance / (groups - 1))
    return mean - half, mean + half


def effective_count(reward: StepReward) -> float:
    """Return the number of independent draws that say as much of the mean as a step's rollouts do, which share tasks:
    from the number of its groups to that of its rollouts (Kish's effective sample size)."""
    # p = 0.5 in 4 groups of 8 whose means vary by 0.0625: 0.25 / (0.0625 / 3) = 12 draws, not 32
    spread, of_mean = reward.mean * (1 - reward.mean), reward.variance / max(1, reward.groups - 1)
    if spread <= 0.0 or reward.groups < 2:
        return float(reward.groups)
    return min(float(reward.count), max(float(reward.groups), spread / of_mean if of_mean > 0 else math.inf))


def _points(rewards: Sequence[StepReward], mode: RolloutMode, is_share: bool) -> list[Point]:
    points = []
    for reward in rewards:
        if reward.mode is mode:
            if is_share and reward.groups > 1:
                ends: tuple[float, float] | None = wilson(reward.mean, effective_count(reward))
            else:
                ends = interval(reward.mean, reward.variance, reward.groups)
            low, high = ends or (None, None)
            points.append(Point(step=reward.step, mean=reward.mean, low=low, high=high, count=reward.count))
    return points


def _parts(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Point, ...]]:
    parts: dict[str, tuple[Point, ...]] = {}
    names = {name for row in rows for name in row} - {"air/correlation"}
    for room, kind in (("reward/", ""), ("air/", " (intermediate)")):
        for name in sorted(name for name in names if name.startswith(room)):
            points = tuple(Point(step=row["step"], mean=row[name]) for row in rows if name in row)
            parts[name.removeprefix(room) + kind] = points
    return parts


def _bill(rows: Sequence[Mapping[str, Any]], rollouts: int) -> Bill:
    def total(*names: str) -> float | None:
        values = [row[name] for row in rows for name in names if name in row]
        return sum(values) if values else None

    spent = {part: seconds for part in _PARTS if (seconds := total(f"seconds_{part}")) is not None}
    whole = total("seconds")
    if whole is not None and spent:
        spent["other"] = max(0.0, whole - sum(spent.values()))
    minutes = [row["minutes"] for row in rows if "minutes" in row]
    return Bill(
        rollouts=rollouts,
        counted_rollouts=total("rollouts", "validation/rollouts") or 0.0,
        trained_rollouts=total("rollouts") or 0.0,
        prompt_tokens=total("prompt_tokens", "validation/prompt_tokens"),
        completion_tokens=total("completion_tokens", "validation/completion_tokens"),
        trained_tokens=total("trained_tokens"),
        minutes=max(minutes) if minutes else None,
        seconds=spent,
    )
