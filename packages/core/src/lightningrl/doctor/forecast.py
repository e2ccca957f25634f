"""A forecast of a run's rollouts from a few: as the policy is, and how far that moves while it learns.

present[group] = mean over its rollouts           learned[group] = present + BEYOND · (mean over those that earned the most of it - present)
half = t · s · sqrt(1 / groups tried + 1 / groups of the run)      both are samples: 95 % of runs lie within it where nothing is learned
Spread = from the lower end of either to the upper end of either, in multiples of present's mean
way gone after n steps = 1 - 2^(-n · nats a step moves a rollout by ÷ HALF_WAY_NATS), on average over the run's steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Final

from lightningrl.look.summary import interval
from lightningrl.types import Trajectory, TrajectoryGroup

__all__ = ["AS_IT_IS", "Spread", "completion_tokens", "forecast", "forecast_trained", "prompt_tokens", "way_gone"]

BEYOND: Final = 1.5
"""How much farther learning leads than to the best of today's groups: a better policy has better ones. Chosen with runs of text_to_sql,
math_tools, rag and two_policies in view; from_scratch and node_agent had no say (docs/doctor.md)."""
HALF_WAY_NATS: Final = 5.0
"""That a rollout's log-probability has been moved by when half of the way is gone. Chosen with text_to_sql and math_tools."""
LONGEST: Final = 1e12
"""In halves: however far a step moves, a run does not go all of the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """In multiples of what rollouts take now."""

    low: float
    learned: float
    """To where learning leads."""
    high: float

    def after(self, gone: float) -> float:
        """Where so much of the way to `learned` is gone."""
        return 1.0 + gone * (self.learned - 1.0)


AS_IT_IS = Spread(low=1.0, learned=1.0, high=1.0)


def prompt_tokens(trajectory: Trajectory) -> int:
    return sum(len(call.prompt_ids) for call in trajectory.transitions if call.replayed_from is None)


def completion_tokens(trajectory: Trajectory) -> int:
    return sum(len(call.completion_ids) for call in trajectory.transitions if call.replayed_from is None)


def forecast(groups: Sequence[TrajectoryGroup], tokens: Callable[[Trajectory], int], wanted: float) -> Spread:
    """Of a run of `wanted` groups."""
    present = [fmean(tokens(one) for one in group.trajectories) for group in groups if group.trajectories]
    best = [fmean(tokens(one) for one in _best(group)) for group in groups if group.trajectories]
    learned = [max(0.0, now + BEYOND * (then - now)) for now, then in zip(present, best, strict=True)]
    mean = fmean(present) if present else 0.0
    if not mean:
        return AS_IT_IS
    ends = [end / mean for values in (present, learned) for end in _ends(values, wanted)]
    return Spread(low=max(0.0, min(ends)), learned=fmean(learned) / mean, high=max(ends))


def forecast_trained(groups: Sequence[TrajectoryGroup], signals: Sequence[bool], wanted: float) -> Spread:
    """Of tokens with an advantage: groups that teach nothing now may come to, and those that teach may fall silent one after the other
    until, at the end of the run, none is left: half of now."""
    present = [
        has_signal * fmean(completion_tokens(one) for one in group.trajectories)
        for group, has_signal in zip(groups, signals, strict=True)
        if group.trajectories
    ]
    mean = fmean(present) if present else 0.0
    if not mean:
        return AS_IT_IS
    longer = forecast(groups, completion_tokens, wanted)
    low, high = _ends(present, wanted)
    all_teach = fmean(fmean(completion_tokens(one) for one in group.trajectories) for group in groups if group.trajectories)
    return Spread(low=max(0.0, min(low / mean, longer.low) / 2), learned=longer.learned, high=max(high, longer.high * all_teach) / mean)


def way_gone(moved: float, steps: int) -> float:
    """The share of the way to `learned` that a run's rollouts have gone on average, where a step moves a rollout's log-probability by
    `moved` nats in the direction asked for; 0 where nothing moves."""
    halves = min(max(0.0, moved) * steps / HALF_WAY_NATS, LONGEST)
    return 1.0 - (1.0 - 2.0**-halves) / (math.log(2.0) * halves) if halves > 1e-6 else 0.0


def _best(group: TrajectoryGroup) -> Sequence[Trajectory]:
    """Those that earned the most; all where nobody earned."""
    rewards = [one.reward for one in group.trajectories if one.reward is not None]
    return [one for one in group.trajectories if one.reward == max(rewards)] if rewards else group.trajectories


def _ends(values: Sequence[float], wanted: float) -> tuple[float, float]:
    """Of the mean of `wanted` more such values; the mean alone where one was tried."""
    mean = fmean(values)
    around = interval(mean, pvariance(values), len(values))
    if around is None:
        return mean, mean
    half = (around[1] - mean) * math.sqrt(1 + len(values) / max(1.0, wanted))
    return mean - half, mean + half
