"""The rewards lab: another reward on a run's stored rollouts, and what it would have changed. Nothing is trained, nothing is written.

recredit(the run, its recipe with the new reward) ─► each rollout before and after ─► Rescore
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.advantages.baselines import FloatArray, mean
from lightningrl.errors import ConfigError, LightningError
from lightningrl.recipe_file import with_settings
from lightningrl.types import Array
from lightningrl_credit.xray import Agreement, agree
from lightningrl_training.lab.recredit import Recredit, recredit
from lightningrl_viewer.reading.origin import RunOrigin

__all__ = ["Rescore", "RescoredRollout", "Rewards", "rescore", "summarize"]

BINS: Final = 10
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Of all rollouts together."""

    rewarded: int
    """Rollouts that have a reward."""
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    """Rollouts in each bin of `Rescore.edges`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoredRollout:
    """One whose reward or credit would have been another."""

    rollout_id: str
    task_id: str
    step: int
    before: float | None
    after: float | None
    flips: bool
    """It was above its group's mean and would be below, or the other way round."""
    failed: str | None
    """Why it would have no reward, where a reward failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescore:
    """The changes that another reward would have made."""

    rollouts: int
    edges: tuple[float, ...]
    """Of the histograms' bins."""
    before: Rewards
    after: Rewards
    changed: tuple[RescoredRollout, ...]
    """Those whose reward would have been another: first those that flip, then by how much."""
    groups: int
    gained: tuple[str, ...]
    """Groups that taught nothing and would have."""
    lost: tuple[str, ...]
    """Groups that taught and would not have."""
    credit: Agreement
    """Of each call's credit, before and after."""
    failures: int
    """Rollouts on which a reward failed."""


async def rescore(
    folder: Path,
    *,
    reward: Any = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: Collection[int] | None = None,
) -> Rescore:
    """`reward` in place of the recipe's reward `name` (None = its only one), with its weight; `settings` by dotted key. Raises ConfigError
    where that is not said, and whatever building and calling the reward raises."""
    recipe = RunOrigin.read(folder).recipe
    chosen: dict[str, Any] = {}
    if reward is not None:
        names = list(recipe.rewards)
        if name is None and len(names) > 1:
            raise ConfigError(f"run {str(folder)!r} has the rewards {', '.join(map(repr, names))}; say with --name which is meant")
        if name is not None and name not in names:
            raise ConfigError(f"run {str(folder)!r} has no reward {name!r}; choose one of: {', '.join(names)}")
        key = json.dumps(name or names[0], ensure_ascii=False)  # it may have a dot
        chosen = {f"rewards.{key}.use": reward, f"rewards.{key}.options": {}}
    elif name is not None or not settings:
        raise ConfigError("no reward is given to try; give one: --reward file.py:new")
    found = await recredit(folder, with_settings(recipe, {**chosen, **(settings or {})}), steps)
    if not found:
        raise LightningError(f"run {str(folder)!r} has no trained rollouts; there is none to try a reward on")
    return summarize(found)


def summarize(found: Sequence[Recredit]) -> Rescore:
    """Of rollouts credited anew."""
    by_group: dict[tuple[int, str], list[Recredit]] = {}
    for one in found:
        by_group.setdefault((one.step, one.before.group_id), []).append(one)
    taught = {key: (_teaches(group, "advantages_before"), _teaches(group, "advantages")) for key, group in by_group.items()}
    middles = {
        key: (_mean(one.before.reward for one in group), _mean(one.after.reward for one in group)) for key, group in by_group.items()
    }
    values = [value for one in found for value in (one.before.reward, one.after.reward) if value is not None]
    edges = np.histogram_bin_edges(values or [0.0], bins=BINS)
    changed = [_rescored(one, *middles[one.step, one.before.group_id]) for one in found if one.before.reward != one.after.reward]
    changed.sort(key=lambda one: (not one.flips, -abs((one.after or 0.0) - (one.before or 0.0))))
    return Rescore(
        rollouts=len(found),
        edges=tuple(edges.tolist()),
        before=_rewards([one.before.reward for one in found], edges),
        after=_rewards([one.after.reward for one in found], edges),
        changed=tuple(changed),
        groups=len(by_group),
        gained=tuple(name for (_, name), (before, after) in taught.items() if after and not before),
        lost=tuple(name for (_, name), (before, after) in taught.items() if before and not after),
        credit=agree(_by_call(found, "advantages_before"), _by_call(found, "advantages")),
        failures=sum(one.after.unrewarded is not None for one in found),
    )


def _rescored(one: Recredit, before: float | None, after: float | None) -> RescoredRollout:
    return RescoredRollout(
        rollout_id=one.after.rollout_id,
        task_id=one.after.task.id,
        step=one.step,
        before=one.before.reward,
        after=one.after.reward,
        flips=_side(one.before.reward, before) * _side(one.after.reward, after) < 0,
        failed=one.after.unrewarded,
    )


def _side(reward: float | None, middle: float | None) -> int:
    """1 above, -1 below, 0 at it."""
    away = 0.0 if reward is None or middle is None else reward - middle
    return 0 if abs(away) <= _ROUNDING else 1 if away > 0 else -1


def _teaches(group: Sequence[Recredit], which: str) -> bool:
    return any(values is not None and bool(values.any()) for one in group for values in getattr(one, which))


def _by_call(found: Sequence[Recredit], which: str) -> list[float]:
    values: list[Array | None] = [values for one in found for values in getattr(one, which)]
    return [float("nan") if one is None else float(one.mean()) for one in values]


def _mean(rewards: Iterable[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return mean(known) if known else None


def _rewards(values: Sequence[float | None], edges: FloatArray) -> Rewards:
    known = [value for value in values if value is not None]
    return Rewards(
        rewarded=len(known),
        mean=_mean(known),
        std=float(np.std(known)) if known else None,
        histogram=tuple(np.histogram(known, edges)[0].tolist()),
    )
