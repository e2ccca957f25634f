"""Intermediate rewards that credit does not read, found by trying it on a group, whatever the method declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lightningrl.recipe import Recipe
from lightningrl.types import TrajectoryGroup, Transition
from lightningrl_credit.scoring import CreditedGroup, Scorer

__all__ = ["unread_rewards"]


def unread_rewards(recipe: Recipe, scorer: Scorer, credited: Sequence[CreditedGroup]) -> str | None:
    """Say in a sentence that intermediate rewards change no advantage, even if half a group earns more by its calls.
    None where they do, there are none, or no group can tell. Credit is assigned anew: not for a method with memory."""
    names = [name for name, reward in recipe.intermediate_rewards.items() if reward.weight != 0.0]
    group = next((each.group for each in credited if _can_tell(each.group)), None)
    if not names or group is None:
        return None
    paid = [
        replace(rollout, transitions=_paid(rollout.transitions, names)) if number % 2 else rollout
        for number, rollout in enumerate(group.trajectories)
    ]
    plain, other = (scorer.credit(rollouts, group.branches)[0].advantages for rollouts in (group.trajectories, paid))
    pairs = zip(chain.from_iterable(plain), chain.from_iterable(other), strict=True)
    if any(before is not None and after is not None and not np.array_equal(before, after) for before, after in pairs):
        return None
    keys = ", ".join(f"intermediate_rewards.{name}" for name in names)
    return (
        f"{keys}: credit.use = {recipe.credit.use!r} reads no rewards of calls (these do: 'turns', 'turn_gae'); "
        "they change nothing"
    )


def _can_tell(group: TrajectoryGroup) -> bool:
    rewarded = [rollout for rollout in group.trajectories if rollout.reward is not None]
    return sum(any(call.trainable for call in rollout.transitions) for rollout in rewarded) > 1


def _paid(calls: Sequence[Transition], names: Sequence[str]) -> tuple[Transition, ...]:
    """Reward the calls with 1, 1/2, 1/3 … more. All of them, as some are of roles that are not trained, and a call may
    be credited with what comes after it alone: a reward of one call might reach no trained call."""
    return tuple(
        replace(call, rewards={**call.rewards, **{name: (call.rewards.get(name) or 0.0) + 1.0 / n for name in names}})
        for n, call in enumerate(calls, start=1)
    )
