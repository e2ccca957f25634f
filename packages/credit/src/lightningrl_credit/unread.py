"""Whether credit reads what calls were rewarded with: tried on a group, whatever the method declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightningrl.recipe import Recipe
from lightningrl.types import Transition
from lightningrl_credit.scoring import CreditedGroup, Scorer

__all__ = ["unread_rewards"]


def unread_rewards(recipe: Recipe, scorer: Scorer, credited: Sequence[CreditedGroup]) -> str | None:
    """A sentence on intermediate rewards that change no advantage, also where half of a group's rollouts earn more by their calls; None
    where they do, where there are none, and where no group can tell. Credit is assigned anew: not for a method that remembers."""
    names = [name for name, reward in recipe.intermediate_rewards.items() if reward.weight != 0.0]
    groups = [
        one.group
        for one in credited
        if sum(rollout.reward is not None and any(call.trainable for call in rollout.transitions) for rollout in one.group.trajectories) > 1
    ]
    if not names or not groups:
        return None
    group = groups[0]
    paid = [replace(one, transitions=_paid(one.transitions, names)) if number % 2 else one for number, one in enumerate(group.trajectories)]
    plain, other = (scorer.credit(rollouts, group.branches)[0].advantages for rollouts in (group.trajectories, paid))
    pairs = zip((value for calls in plain for value in calls), (value for calls in other for value in calls), strict=True)
    if any(one is not None and another is not None and not np.array_equal(one, another) for one, another in pairs):
        return None
    keys = ", ".join(f"intermediate_rewards.{name}" for name in names)
    return f"{keys}: credit.use = {recipe.credit.use!r} reads no rewards of calls (these do: 'turns', 'turn_gae'); they change nothing"


def _paid(calls: Sequence[Transition], names: Sequence[str]) -> tuple[Transition, ...]:
    """The calls with more for each, 1, 1/2, 1/3 …: some are of roles that are not trained, and a call may be credited with what comes
    after it alone, so that a reward of one call might reach no trained call."""
    return tuple(
        replace(call, rewards={**call.rewards, **{name: (call.rewards.get(name) or 0.0) + 1.0 / number for name in names}})
        for number, call in enumerate(calls, start=1)
    )
