"""The rewards lab: another reward on a run's stored rollouts, and its effect. Nothing is trained or written.

recredit(the run, its recipe with the new reward) ─► each rollout before and after ─► Rescore
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.advantages import FloatArray, mean
from lightningrl.errors import ConfigError, LightningError
from lightningrl.types import Array
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.xray import Agreement, agree
from lightningrl_training.lab.recredit import Recredit, recredit
from lightningrl_viewer.reading.origin import RunOrigin

__all__ = ["Rescore", "RescoredRollout", "Rewards", "rescore", "summarize"]

BINS: Final = 10
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of all rollouts together."""

    rewarded: int
    """Rollouts that have a reward."""
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    """Rollouts in each bin of `Rescore.edges`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoredRollout:
    """A rollout whose reward or credit would have been another."""

    rollout_id: str
    task_id: str
    step: int
    before: float | None
    after: float | None
    flips: bool
    """True where it was above its group's mean and would be below, or the other way round."""
    failed: str | None
    """The reason why it would have no reward, where a reward failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescore:
    """The changes that another reward would have made."""

    rollouts: int
    edges: tuple[float, ...]
    """Edges of the histograms' bins."""
    before: Rewards
    after: Rewards
    changed: tuple[RescoredRollout, ...]
    """Rollouts whose reward would have been another: first those that flip, then by size of the change."""
    groups: int
    gained: tuple[str, ...]
    """Groups that taught nothing and would have."""
    lost: tuple[str, ...]
    """Groups that taught and would not have."""
    credit: Agreement
    """Agreement of each call's credit, before and after."""
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
    """Try `reward` in place of the recipe's reward `name` (None = its only one), with its weight; `settings` by dotted
    key. Raises ConfigError where no reward is given, and whatever building and calling the reward raises."""
    recipe = RunOrigin.read(folder).recipe
    chosen: dict[str, Any] = {}
    if reward is not None:
        names = list(recipe.rewards)
        if name is None and len(names) > 1:
            raise ConfigError(
                f"run {str(folder)!r} has the rewards {', '.join(map(repr, names))}; say with --name which is meant"
            )
        if name is not None and name not in names:
            raise ConfigError(f"run {str(folder)!r} has no reward {name!r}; choose one of: {', '.join(names)}")
        key = json.dumps(name or names[0], ensure_ascii=False)  # it may have a dot
        chosen = {f"rewards.{key}.use": reward, f"rewards.{key}.options": {}}
    elif name is not None or not settings:
        raise ConfigError("no reward is given to try; give one: --reward file.py:new")
    rollouts = await recredit(folder, with_settings(recipe, {**chosen, **(settings or {})}), steps)
    if not rollouts:
        raise LightningError(f"run {str(folder)!r} has no trained rollouts; there is none to try a reward on")
    return summarize(rollouts)


def summarize(rollouts: Sequence[Recredit]) -> Rescore:
    """Summarize the changes of rollouts that were credited anew."""
    by_group: dict[tuple[int, str], list[Recredit]] = {}
    for rollout in rollouts:
        by_group.setdefault((rollout.step, rollout.before.group_id), []).append(rollout)
    changed: list[RescoredRollout] = []
    gained, lost = list[str](), list[str]()
    for (_, name), group in by_group.items():
        did, would = _teaches(group, "advantages_before"), _teaches(group, "advantages")
        gained += [name] if would and not did else []
        lost += [name] if did and not would else []
        means = [_mean(_rewards(group, when)) for when in ("before", "after")]
        changed += [_rescored(each, *means) for each in group if each.before.reward != each.after.reward]
    before, after = (_rewards(rollouts, when) for when in ("before", "after"))
    edges = np.histogram_bin_edges([*before, *after] or [0.0], bins=BINS)
    changed.sort(key=lambda rollout: (not rollout.flips, -abs((rollout.after or 0.0) - (rollout.before or 0.0))))
    return Rescore(
        rollouts=len(rollouts),
        edges=tuple(edges.tolist()),
        before=_describe(before, edges),
        after=_describe(after, edges),
        changed=tuple(changed),
        groups=len(by_group),
        gained=tuple(gained),
        lost=tuple(lost),
        credit=agree(_by_call(rollouts, "advantages_before"), _by_call(rollouts, "advantages")),
        failures=sum(rollout.after.unrewarded is not None for rollout in rollouts),
    )


def _rescored(rollout: Recredit, before: float | None, after: float | None) -> RescoredRollout:
    return RescoredRollout(
        rollout_id=rollout.after.rollout_id,
        task_id=rollout.after.task.id,
        step=rollout.step,
        before=rollout.before.reward,
        after=rollout.after.reward,
        flips=_side(rollout.before.reward, before) * _side(rollout.after.reward, after) < 0,
        failed=rollout.after.unrewarded,
    )


def _side(reward: float | None, middle: float | None) -> int:
    """1 above, -1 below, 0 at it."""
    away = 0.0 if reward is None or middle is None else reward - middle
    return 0 if abs(away) <= _ROUNDING else 1 if away > 0 else -1


def _teaches(group: Sequence[Recredit], which: str) -> bool:
    return any(values is not None and bool(values.any()) for rollout in group for values in getattr(rollout, which))


def _by_call(rollouts: Sequence[Recredit], which: str) -> list[float]:
    calls: list[Array | None] = [values for rollout in rollouts for values in getattr(rollout, which)]
    return [float("nan") if values is None else float(values.mean()) for values in calls]


def _rewards(rollouts: Sequence[Recredit], when: str) -> list[float]:
    return [value for rollout in rollouts if (value := getattr(rollout, when).reward) is not None]


def _mean(rewards: Sequence[float]) -> float | None:
    return mean(rewards) if rewards else None


def _describe(rewards: Sequence[float], edges: FloatArray) -> Rewards:
    return Rewards(
        rewarded=len(rewards),
        mean=_mean(rewards),
        std=float(np.std(rewards)) if rewards else None,
        histogram=tuple(np.histogram(rewards, edges)[0].tolist()),
    )
