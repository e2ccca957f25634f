"""A forecast of a run's rollouts, from the few that the untrained policy has made and the steps that were rehearsed
after them.

present = mean of a group's rollouts      learned = mean of those of them that earned the most; of a group in which all
                                                    earned too little, as much more as those are than the rest elsewhere
beyond  = present + BEYOND · (learned - present)
half    = t · s · sqrt(1 / groups tried + 1 / groups to come): where nothing is learned, 95 % of runs lie within it
Spread  = the least and the most of present ± half and beyond ± half, in multiples of present's mean
way gone after n steps = 1 - 2^(-n · nats that a step moves a rollout by ÷ HALF_WAY_NATS)
silent  = Π i · x ÷ (i · x + 1), i from 1 to the rollouts of a group that earned less than its best, x = steps · pace:
          so likely is it that all of them have come to earn as much, where some tasks are learned sooner than others
          (their paces have an exponential distribution)
pace    = ln(reward left to earn at first ÷ in the last steps) ÷ steps between them; ln 2 · nats ÷ HALF_WAY_NATS where
          few steps were tried
run     = first step and those rehearsed, as they were + each step to come: now + way gone · (learned - now)
now     = the last steps that were rehearsed

The untrained policy is within the run's range, too: what rollouts were, they may become again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Final

import numpy as np

from lightningrl.types import Trajectory, TrajectoryGroup, common_tokens
from lightningrl_training.doctor.observation import Observation, TriedStep
from lightningrl_viewer.reading.summary import interval

__all__ = [
    "Forecast",
    "Spread",
    "ToCome",
    "completion_tokens",
    "distinct_tokens",
    "forecast",
    "forecast_trained",
    "mean_tokens",
    "moved",
    "prompt_tokens",
    "signals_to_come",
    "way_after",
    "way_at_end",
    "way_gone",
]

BEYOND: Final = 1.5
"""Factor by which the range goes beyond the best of today's groups: a better policy has better ones. Chosen with runs
of text_to_sql, math_tools, rag and two_policies in view (docs/how-to/doctor.md)."""
HALF_WAY_NATS: Final = 5.0
"""Nats by which a rollout's log-probability has moved when half of the way is gone. Chosen with text_to_sql and
math_tools."""
LONGEST: Final = 50.0
"""Most halvings that are computed: however far a step moves, a run does not go all of the way."""
LAST: Final = 4
"""Steps that describe the policy after a rehearsal: one step's tasks are a small sample. After fewer, all that was
tried describes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Low, expected and high cost, relative to today's rollouts."""

    low: float = 1.0
    learned: float = 1.0
    """Cost of the rollouts that learning leads to."""
    high: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ToCome:
    """The part of a run that was neither tried nor rehearsed."""

    steps: int
    groups: float
    """Groups of all these steps, and of the first, whose rollouts will be others."""
    nats: float
    """Nats that a step moves a rollout by; those of groups without an advantage stay where they are."""
    validated: tuple[int, ...] = ()
    """Steps of the run that each of its validations follows."""
    falls_silent: bool = False
    """A group has no advantage once its rollouts all earn the same."""

    @property
    def gone(self) -> float:
        """Share of the way to where learning leads, on average over these steps."""
        return way_gone(self.nats, self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Tokens of a run's mean rollout, relative to the mean rollout of the untrained policy."""

    amount: float = 1.0
    validated: float = 1.0
    """The same of its validations, relative to one of the untrained policy: the first is as that, the last after all
    steps."""
    low: float = 1.0
    high: float = 1.0
    now: float = 1.0
    """After the rehearsed steps."""
    at_end: float = 1.0
    """After all steps."""
    learned: float = 1.0
    """Where learning leads."""


def prompt_tokens(trajectory: Trajectory) -> int:
    return sum(len(call.prompt_ids) for call in trajectory.transitions if call.replayed_from is None)


def completion_tokens(trajectory: Trajectory) -> int:
    return sum(len(call.completion_ids) for call in trajectory.transitions if call.replayed_from is None)


def distinct_tokens(trajectory: Trajectory) -> int:
    """Count prompt and completion tokens, those of a prefix that calls share once: engine and learner work on them
    once, too."""
    rows = [
        np.concatenate([call.prompt_ids, call.completion_ids]).astype(">u4")  # bytes compare like the ids themselves
        for call in trajectory.transitions
        if call.replayed_from is None
    ]
    rows.sort(key=lambda row: row.tobytes())
    return sum(map(len, rows)) - sum(common_tokens(row, following) for row, following in pairwise(rows))


def forecast(
    tried: Sequence[TriedStep],
    tokens: Callable[[Trajectory], int],
    to_come: ToCome,
    validation: Sequence[Trajectory] = (),
) -> Forecast:
    """Forecast the tokens that `tokens` counts. `tried`: the untrained policy, then each rehearsed step. `validation`
    shows where learning leads if no group does."""
    last = [group for step in tried[-LAST:] for group in step.groups]
    means, spread = [mean_tokens(step, tokens) for step in tried], _spread(last, tokens, to_come.groups, validation)
    return _of_run(means, _by_group(last, tokens), spread, to_come)


def forecast_trained(tried: Sequence[TriedStep], to_come: ToCome) -> Forecast:
    """Forecast tokens with an advantage: as many more or fewer as completions have, in the groups that have one.
    At most all have; at least half of those that are expected."""
    last = [present for step in tried[-LAST:] for present in _trained_by_group(step)]
    now = _mean([signal for step in tried[-LAST:] for signal in step.signals])
    teaching = signals_to_come(tried, to_come) / now if now else 1.0
    spread = Spread()
    if mean := _mean(last):
        groups = [group for step in tried[-LAST:] for group in step.groups]
        longer, (low, high) = _spread(groups, completion_tokens, to_come.groups), _ends(last, to_come.groups)
        least = max(0.0, min(low / mean, longer.low) * min(1.0, teaching) / 2)
        all_teach = longer.high * fmean(_by_group(groups, completion_tokens))
        spread = Spread(low=least, learned=longer.learned, high=max(high, all_teach) / mean)
    return _of_run([_mean(_trained_by_group(step)) for step in tried], last, spread, to_come, teaching)


def signals_to_come(tried: Sequence[TriedStep], to_come: ToCome) -> float:
    """Share of groups with an advantage, on average over the steps to come. Each group that was tried is as far from
    such a step as the policy has steps to make from the one to the other."""
    pace = _pace(tried, to_come) if to_come.falls_silent else 0.0
    last, steps = list(enumerate(tried))[-LAST:], range(len(tried), len(tried) + max(1, to_come.steps))
    short = [
        (made, len(_halves(group.trajectories)[1]))
        for made, step in last
        for group, has_signal in zip(step.groups, step.signals, strict=True)
        if has_signal
    ]
    teaching = sum(1.0 - _silent(rollouts, (step - made) * pace) for step in steps for made, rollouts in short)
    return teaching / max(1, len(steps) * sum(len(step.signals) for _, step in last))


def way_gone(moved: float, steps: int) -> float:
    """Share of the way to `learned` that rollouts have gone on average over so many steps more, the first of them after
    one, where a step moves a rollout's log-probability by `moved` nats in the direction asked for; 0 where nothing
    moves."""
    return fmean(way_after(moved, step) for step in range(1, steps + 1)) if steps else 0.0


def way_after(moved: float, steps: int) -> float:
    """Share of the way that rollouts have gone after so many steps of `moved` nats each."""
    return 1.0 - math.pow(2.0, -min(max(0.0, moved) * steps / HALF_WAY_NATS, LONGEST))


def moved(seen: Observation, *, is_planted: bool = False) -> float:
    """Nats that a step moves a rollout by, at the learning rate after its warm-up; 0 where no lesson says.
    `is_planted`: by lessons with planted advantages, in place of those with their own."""
    trained = sum(len(call.completion_ids) for call in seen.calls if call.trainable)
    warmup = seen.recipe.backend_options.get("warmup_steps") or 1  # the lesson is a step at the first part of it
    gains = [
        lesson.gain * (float(warmup) if lesson.learning_rate else 1.0)
        for lesson in seen.lessons.values()
        if lesson.gain is not None and lesson.is_planted == is_planted
    ]
    return fmean(gains) * trained / len(seen.rollouts) if gains and seen.rollouts else 0.0


def way_at_end(seen: Observation) -> float | None:
    """Share of the way to `learned` that rollouts have gone after all steps of the recipe; None where no lesson
    says."""
    nats = moved(seen)
    return way_after(nats, seen.recipe.loop.steps) if nats > 0.0 else None


def mean_tokens(step: TriedStep, tokens: Callable[[Trajectory], int]) -> float:
    """Mean tokens of a rollout of the step; 0 where it has none."""
    return _mean(_by_group(step.groups, tokens))


def _of_run(
    means: Sequence[float], last: Sequence[float], rest: Spread, to_come: ToCome, times: float = 1.0
) -> Forecast:
    """`means`: of the steps tried. `last`: by group, what the steps to come begin with. `rest`: where those may lead.
    `times`: factor for the expected mean of these."""
    first, *rehearsed = means
    steps = len(means) + to_come.steps
    if not first:
        return Forecast()
    now = _mean(last) / first

    def after(more: float) -> float:
        return now * (1.0 + more * (rest.learned - 1.0))

    def end(of_rest: float) -> float:
        return (sum(rehearsed) / first + (1 + to_come.steps) * of_rest) / steps

    validated = [
        means[step] / first if step < len(means) else after(way_after(to_come.nats, step - len(rehearsed)))
        for step in to_come.validated
    ]
    return Forecast(
        amount=(sum(means) / first + to_come.steps * times * after(to_come.gone)) / steps,
        validated=_mean(validated) if validated else 1.0,
        low=end(min(now * rest.low, 1.0)),
        high=end(max(now * rest.high, 1.0)),
        now=now,
        at_end=after(way_after(to_come.nats, to_come.steps)),
        learned=now * rest.learned,
    )


def _spread(
    groups: Sequence[TrajectoryGroup],
    tokens: Callable[[Trajectory], int],
    wanted: float,
    validation: Sequence[Trajectory] = (),
) -> Spread:
    """Spread of the mean of `wanted` more groups like these."""
    present = _by_group(groups, tokens)
    learned = _learned_by_group(groups, tokens, validation)
    beyond = [max(0.0, now + BEYOND * (then - now)) for now, then in zip(present, learned, strict=True)]
    mean = _mean(present)
    if not mean:
        return Spread()
    ends = [end / mean for values in (present, beyond) for end in _ends(values, wanted)]
    return Spread(low=max(0.0, min(ends)), learned=fmean(learned) / mean, high=max(ends))


def _by_group(groups: Sequence[TrajectoryGroup], tokens: Callable[[Trajectory], int]) -> list[float]:
    return [fmean(map(tokens, group.trajectories)) for group in groups if group.trajectories]


def _trained_by_group(step: TriedStep) -> list[float]:
    return [
        has_signal * fmean(map(completion_tokens, group.trajectories))
        for group, has_signal in zip(step.groups, step.signals, strict=True)
        if group.trajectories
    ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _learned_by_group(
    groups: Sequence[TrajectoryGroup], tokens: Callable[[Trajectory], int], validation: Sequence[Trajectory]
) -> list[float]:
    """Mean tokens of the rollouts of each group that earned the most. Where all of a group earned the same, and less
    than others did, nobody shows the way: it is as much longer as those of the other groups are than their rest, or of
    validation where no group has a rest."""
    halves = [_halves(group.trajectories) for group in groups if group.trajectories]
    shown = halves if any(rest for _, rest in halves) else [_halves(validation)]
    pairs = [(fmean(map(tokens, best)), fmean(map(tokens, rest))) for best, rest in shown if rest]
    longer = sum(best for best, _ in pairs) / sum(rest for _, rest in pairs) if any(rest for _, rest in pairs) else 1.0
    most = max(
        (reward for best, _ in (*halves, *shown) if best and (reward := best[0].reward) is not None), default=0.0
    )
    return [
        fmean(map(tokens, best)) * (1.0 if rest or (earned := best[0].reward) is None or earned >= most else longer)
        for best, rest in halves
    ]


def _halves(rollouts: Sequence[Trajectory]) -> tuple[Sequence[Trajectory], Sequence[Trajectory]]:
    """The rollouts that earned the most, and those that earned less; all and none where nobody earned."""
    rewards = [one.reward for one in rollouts if one.reward is not None]
    if not rewards:
        return rollouts, ()
    best = [one for one in rollouts if one.reward == max(rewards)]
    return best, [one for one in rollouts if one.reward is not None and one.reward < max(rewards)]


def _pace(tried: Sequence[TriedStep], to_come: ToCome) -> float:
    """Natural logarithm of the factor by which a step divides what the policy has left to earn."""
    if len(tried) <= LAST:
        return math.log(2.0) * min(max(0.0, to_come.nats) / HALF_WAY_NATS, LONGEST)
    rewards = [
        [one.reward for group in step.groups for one in group.trajectories if one.reward is not None] for step in tried
    ]
    most = max((reward for step in rewards for reward in step), default=0.0)
    before, after = most - _mean(rewards[0]), most - _mean([reward for step in rewards[-LAST:] for reward in step])
    if before <= 0.0 or after <= 0.0:
        return 0.0
    return max(0.0, math.log(before / after)) / (len(tried) - (LAST + 1) / 2)


def _silent(short: int, gone: float) -> float:
    """Probability that the rollouts of a group that earn less than its best have all come to earn as much. `short`:
    their number; 0 = all earn the same, and have an advantage all the same. `gone`: steps · pace."""
    return math.prod(number * gone / (number * gone + 1.0) for number in range(1, short + 1)) if short else 0.0


def _ends(values: Sequence[float], wanted: float) -> tuple[float, float]:
    """Ends of the interval of the mean of `wanted` more such values; the mean alone where one was tried."""
    mean = fmean(values)
    around = interval(mean, pvariance(values), len(values))
    if around is None:
        return mean, mean
    half = (around[1] - mean) * math.sqrt(1 + len(values) / max(1.0, wanted))
    return mean - half, mean + half
