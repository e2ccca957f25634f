"""The bill: an estimate of the whole run, from the few rollouts and steps that were tried.

run      = start + checkpoints + steps · (groups of a step · what a group took + learning) + validations · what one took
           + in CPU time a curve drawn for each step and validation
memory   = processes (measured once all is served, less the weights) + weights + Adam's moments + the more of
           rollouts: packed weights + keys and values, measured here + plan(run) - plan(tried)
           a step: gradient + activations + logits

Learning goes by groups with an advantage, of which fewer are left as more rollouts earn the most. Where no group had an
advantage, rows were given one to try the learner: whether any will have one is not known, so half of them are billed,
and the range goes from none to all.

Rollouts change while the policy learns: as far as they will have changed on average is billed, and at least and at most
is the range of the bill's rows.

present  = mean of a group's rollouts     learned = mean of those of them that earned the most; of a group in which all
                                                    earned too little, as much more as those are than the rest elsewhere
beyond   = present + BEYOND · (learned - present)
half     = t · s · sqrt(1 / groups tried + 1 / groups to come): where nothing is learned, 95 % of runs lie within it
low, high = the least and the most of present ± half and beyond ± half, in multiples of present's mean
way gone after n steps = 1 - 2^(-n · nats that a step moves a rollout by ÷ HALF_WAY_NATS)
silent   = Π i · x ÷ (i · x + 1), i from 1 to the rollouts of a group that earned less than its best, x = steps · pace:
           so likely is it that all of them have come to earn as much, where some tasks are learned sooner than others
           (their paces have an exponential distribution)
pace     = ln(reward left to earn at first ÷ in the last steps) ÷ steps between them; ln 2 · nats ÷ HALF_WAY_NATS where
           few steps were tried
tokens   = first step and those rehearsed, as they were + each step to come: now + way gone · (learned - now)
now      = the last steps that were rehearsed

The untrained policy is within the run's range, too: what rollouts were, they may become again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Final

import numpy as np

from lightningrl.backends import MemoryPlan
from lightningrl.machine import gigabytes
from lightningrl.types import OtherCallKind, Trajectory, TrajectoryGroup, common_tokens
from lightningrl_runs.summary import interval
from lightningrl_training.doctor.observation import Cost, Observation, TriedStep
from lightningrl_training.memory_check import shared_bytes

__all__ = ["Bill", "BillLine", "Forecast", "MemoryBill", "ToCome", "forecast", "make_bill", "plan_run", "way_at_end"]

UNKNOWN: Final = 0.5
"""Share of groups that are billed as having an advantage, where none of those tried had one."""
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
LARGE: Final = 2e8
"""Bytes of weights from which on the engine gives keys and values back before a step."""
UNCHANGED: Final = 1.0, 1.0, 1.0

Count = Callable[[Trajectory], int]
"""Counts tokens of a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One row of the bill."""

    what: str
    amount: float
    unit: str = ""
    how: str
    """The computation, in words."""
    low: float | None = None
    """Least that it may be while the policy learns; None = it does not depend on that."""
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Predicted cost of the whole run."""

    steps: int
    """Training steps; fewer than the recipe's where loop.minutes ends the run earlier."""
    rollouts: int
    """Rollouts of training and validation, without branches."""
    prompt_tokens: float
    """Tokens of training, validation and branches, as for all tokens here."""
    completion_tokens: float
    trained_tokens: float
    judge_calls: float
    minutes: float
    cpu_minutes: float | None
    """CPU time of all cores; None = the system does not say."""
    memory_bytes: int | None
    """Largest use at any moment."""
    memory: MemoryBill | None
    """The same by what for; None = no backend plans its memory."""
    disk_bytes: float
    lines: tuple[BillLine, ...] = ()
    """The rows to print, each with its computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBill:
    """Bytes of a run, by what for."""

    processes: int
    """Python, its libraries, server and workers."""
    weights: int
    """Copies included."""
    optimizer: int
    gradient: int
    activations: int
    logits: int
    packed: int
    """Weights that stand a second time while several calls are decoded."""
    key_values: int
    """Memory of running calls and remembered prompts, and what the C library keeps of it."""
    keeps_key_values: bool
    """A step has them and the packed weights, too: of a small policy."""

    @property
    def always(self) -> int:
        return self.processes + self.weights + self.optimizer

    @property
    def rollouts(self) -> int:
        """Peak while rollouts run."""
        return self.always + self.packed + self.key_values

    @property
    def step(self) -> int:
        """Peak of a step of the learner."""
        beside = self.packed + self.key_values if self.keeps_key_values else 0
        return self.always + self.gradient + self.activations + self.logits + beside

    @property
    def peak(self) -> int:
        return max(self.rollouts, self.step)

    def __str__(self) -> str:
        packed = f"{gigabytes(self.packed)} weights in the order of decoding + " if self.packed else ""
        return (
            f"{gigabytes(self.weights)} weights + {gigabytes(self.optimizer)} Adam's moments + "
            f"{gigabytes(self.processes)} Python, libraries, server and workers, always; + "
            f"{packed}{gigabytes(self.key_values)} keys and values in rollouts: {gigabytes(self.rollouts)}; + "
            f"{gigabytes(self.gradient)} gradient + {gigabytes(self.activations)} activations + "
            f"{gigabytes(self.logits)} logits in a step: {gigabytes(self.step)}"
        )


def make_bill(seen: Observation) -> Bill:
    """Make the bill of the whole run."""
    run = _Run(seen, _steps(seen))
    prompts = run.ahead[prompt_tokens]
    memory = plan_run(seen, longer=max(prompts.now, prompts.at_end))
    lines = (*_count_lines(run), *_cost_lines(run, memory))
    amounts = {line.what: line.amount for line in lines}
    return Bill(
        steps=run.steps,
        rollouts=run.rollouts,
        prompt_tokens=amounts["prompt tokens"],
        completion_tokens=amounts["completion tokens"],
        trained_tokens=amounts["trained tokens"],
        judge_calls=amounts.get("judge calls", 0.0),
        minutes=amounts["minutes"],
        cpu_minutes=amounts.get("CPU minutes"),
        memory_bytes=int(amounts["memory"]) if "memory" in amounts else None,
        memory=memory,
        disk_bytes=amounts["disk"],
        lines=lines,
    )


def _steps(seen: Observation) -> int:
    """Steps of the recipe, or as many as loop.minutes leaves time for."""
    loop = seen.recipe.loop
    if loop.minutes is None or not loop.steps:
        return loop.steps

    def seconds(steps: int) -> float:
        return _Run(seen, steps).costs[1].seconds

    return min(loop.steps, 1 + bisect_left(range(1, loop.steps + 1), 60 * loop.minutes, key=seconds))


class _Run:
    """A run of so many steps: how often it does what was tried, and how rollouts change meanwhile."""

    def __init__(self, seen: Observation, steps: int) -> None:
        loop, every, held_out = seen.recipe.loop, seen.recipe.validation.every or 0, len(seen.tasks.validation)
        rehearsed = _rehearsed_groups(seen)
        self.seen, self.steps = seen, steps
        self.groups = steps * _groups_per_step(seen)
        # one before the first step, one every so many, one after the last
        self.validations = 1 + math.ceil(steps / every) if every and held_out else 0
        self.rollouts = round(self.groups * loop.group_size + self.validations * held_out)
        self.checkpoints = 1 + math.ceil(steps / loop.checkpoint_every)
        self.tokens = self.groups / max(1, len(seen.groups))
        """Groups, per group that the untrained policy has made. What follows are such factors, too."""
        self.collect = self.groups / max(1.0, len(seen.groups) + rehearsed)
        self.learn = self.groups / max(1.0, seen.costs.learned_groups + rehearsed)
        self.validate = self.validations * held_out / max(1, len(seen.validation))
        left = max(0, steps - len(seen.steps))
        self.to_come = to_come = ToCome(
            steps=left,
            groups=self.groups * (left + 1) / max(1, steps),
            nats=_nats(seen),
            validated=tuple(min(number * every, steps) for number in range(self.validations)),
            falls_silent=seen.falls_silent,
        )
        counts = prompt_tokens, completion_tokens, distinct_tokens
        self.ahead = {count: forecast(seen.steps, count, to_come, seen.validation) for count in counts}
        self.signals = signals_to_come(seen.steps, to_come)
        """Share of groups with an advantage in the steps to come."""
        # least, expected and most: how the cost of rollouts, of groups that teach and of validations changes, and which
        # share of the groups teaches a policy on whose rows advantages were planted
        time = self.ahead[distinct_tokens]
        self.changes = tuple(
            zip(
                (time.low, time.amount, time.high),
                self._teaching(),
                (time.low, time.validated, time.high),
                (0.0, UNKNOWN, 1.0),
                strict=True,
            )
        )

    def _teaching(self) -> tuple[float, float, float]:
        """Factors for the groups with an advantage, relative to the steps that were learned: half of those that are
        expected, these, and all."""
        seen = self.seen
        signals = list(seen.signals[: seen.costs.learned_groups])
        now = fmean(signals + [signal for step in seen.rehearsed for signal in step.signals]) if signals else 0.0
        if not now or not seen.falls_silent or seen.recipe.loop.dynamic_sampling:
            return 1.0, 1.0, 1.0
        done, left = len(seen.steps), self.to_come.steps
        shares = self.signals / 2, self.signals, 1.0
        least, expected, most = ((done + left * share / now) / (done + left) for share in shares)
        return least, expected, most

    @property
    def costs(self) -> list[Cost]:
        """The least, the expected and the most that the loop takes."""
        costs = self.seen.costs
        rest = costs.save * self.checkpoints + costs.draw * (self.steps + self.validations)
        return [self.rollouts_cost(*change) + rest for change in self.changes]

    def rollouts_cost(
        self, longer: float = 1.0, teaching: float = 1.0, validated: float = 1.0, planted: float = UNKNOWN
    ) -> Cost:
        """The part of the cost that changes with rollouts."""
        costs = self.seen.costs
        learn = (costs.learn + costs.planted * planted) * (self.learn * longer * teaching)
        return costs.collect * (self.collect * longer) + learn + costs.validate * (self.validate * validated)


def _groups_per_step(seen: Observation) -> float:
    """Groups that a step collects; with dynamic sampling, as many as it takes until enough of them teach."""
    loop = seen.recipe.loop
    if not loop.dynamic_sampling or not seen.signals:
        return loop.tasks_per_step
    return loop.tasks_per_step * min(1 + loop.dynamic_sampling, len(seen.signals) / max(0.5, sum(seen.signals)))


def _rehearsed_groups(seen: Observation) -> float:
    """Rehearsed groups, weighted by tokens: a group of twice the tokens counts twice, for it takes twice the time."""
    first, *rehearsed = ((len(step.groups), _mean(_by_group(step.groups, distinct_tokens))) for step in seen.steps)
    return sum(groups * (tokens / first[1] if first[1] else 1.0) for groups, tokens in rehearsed)


def _nats(seen: Observation) -> float:
    """Nats that a step of the run moves a rollout by: those of groups without an advantage stay where they are."""
    signals = [signal for step in seen.steps for signal in step.signals]
    return moved(seen) * fmean(signals) if any(signals) else moved(seen, is_planted=True) * UNKNOWN


def _count_lines(run: _Run) -> Iterator[BillLine]:
    """Rows of steps, rollouts, tokens and calls."""
    seen, steps, loop = run.seen, run.steps, run.seen.recipe.loop
    early = f", of {loop.steps}: loop.minutes = {loop.minutes:g} ends it" if steps < loop.steps and loop.minutes else ""
    yield BillLine(what="steps", amount=steps, how=f"loop.steps{early}")
    validated = f" + {run.validations} validations of {len(seen.tasks.validation)}" if run.validations else ""
    how = f"{steps} steps × {run.groups / max(1, steps):.3g} tasks × {loop.group_size}{validated}"
    yield BillLine(what="rollouts", amount=run.rollouts, how=how)
    members = [member for group in seen.groups for member in group.members]
    rehearsed = len(seen.rehearsed)
    for what, count in (("prompt tokens", prompt_tokens), ("completion tokens", completion_tokens)):
        ahead = run.ahead[count]
        in_steps = run.tokens * sum(map(count, members))
        in_validations = run.validate * sum(map(count, seen.validation))
        then = f"{100 * ahead.now:.0f} % of that after {rehearsed} rehearsed steps; " if rehearsed else ""
        how = (
            f"as many each as the {len(seen.rollouts)} rollouts tried of {len(seen.groups)} tasks; {then}learning "
            f"leads to {100 * ahead.learned:.0f} % of that; {100 * run.to_come.gone:.0f} % of the way in "
            f"{run.to_come.steps} steps"
        )
        amount = in_steps * ahead.amount + in_validations * ahead.validated
        yield _ranged(what, amount, in_steps + in_validations, how, ahead)
    trained, ahead = run.tokens * seen.costs.trained_tokens, forecast_trained(seen.steps, run.to_come)
    how = f"{sum(seen.signals)} of {len(seen.signals)} groups had an advantage"
    if trained * ahead.amount:
        how += f", {100 * run.signals:.0f} % of those to come; from half of these to all groups"
    else:
        how += f"; the rows below count with {100 * UNKNOWN:.0f} % of those to come"
    yield _ranged("trained tokens", trained * ahead.amount, trained, how, ahead)
    judged = sum(call.kind is OtherCallKind.JUDGE for member in members for call in member.other_calls)
    if judged:
        yield BillLine(what="judge calls", amount=run.tokens * judged, how="as many each as those")


def _ranged(what: str, amount: float, present: float, how: str, ahead: Forecast) -> BillLine:
    """A row with its range. `present`: its amount if every rollout is as those that were tried."""
    return BillLine(what=what, amount=amount, how=how, low=ahead.low * present, high=ahead.high * present)


def _cost_lines(run: _Run, memory: MemoryBill | None) -> Iterator[BillLine]:
    """Rows of time, memory and disk."""
    seen, costs = run.seen, run.seen.costs
    least, expected, most = (costs.start + cost for cost in run.costs)
    low, amount, high = (cost.seconds / 60 for cost in (least, expected, most))
    yield BillLine(what="minutes", amount=amount, how=_explain_minutes(run), low=low, high=high)
    if expected.cpu_seconds is not None:
        low, amount, high = ((cost.cpu_seconds or 0.0) / 60 for cost in (least, expected, most))
        how = "the same, in CPU time of all processes"
        yield BillLine(what="CPU minutes", amount=amount, how=how, low=low, high=high)
    used = [None if seen.machine is None else seen.machine.memory_used, None if memory is None else memory.peak]
    if any(size is not None for size in used):
        how = "the most that all processes had; longer rows need more" if memory is None else str(memory)
        yield BillLine(what="memory", amount=max(size for size in used if size is not None), unit="bytes", how=how)
    checkpoints = min(seen.recipe.loop.keep_checkpoints + 1, run.checkpoints)  # one more while it is written
    stored = run.ahead[distinct_tokens].amount * (costs.store_bytes / max(1, len(seen.first) + len(seen.tried)))
    how = (
        f"{run.rollouts} rollouts × {stored / 1e3:.1f} kB + {checkpoints} checkpoints × "
        f"{costs.checkpoint_bytes / 1e6:.1f} MB"
    )
    amount = run.rollouts * stored + checkpoints * costs.checkpoint_bytes
    yield BillLine(what="disk", amount=amount, unit="bytes", how=how)


def _explain_minutes(run: _Run) -> str:
    seen, costs, steps = run.seen, run.seen.costs, max(1, run.steps)
    present = run.rollouts_cost().seconds
    longer = run.rollouts_cost(*run.changes[1]).seconds / present if present else 1.0
    has_failed = any(lesson.error for lesson in seen.lessons.values())
    learns = (costs.learn + costs.planted * UNKNOWN).seconds * run.learn / steps
    learning = f"{learns:.1f} s learning{', until it failed' if has_failed else ''}"
    step = f"({costs.collect.seconds * run.collect / steps:.1f} s collecting + {learning})"
    how = f"start {costs.start.seconds:.0f} s + {run.steps} × {step}"
    if run.validations:
        how += f" + {run.validations} × {costs.validate.seconds * run.validate / run.validations:.1f} s validating"
    how += f" + {run.checkpoints} checkpoints × {costs.save.seconds:.2f} s"
    how += f"; collecting, learning, validating × {longer:.2f}, as rollouts change" if round(longer, 2) != 1.0 else ""
    return how


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
    tried: Sequence[TriedStep], tokens: Count, to_come: ToCome, validation: Sequence[Trajectory] = ()
) -> Forecast:
    """Forecast the tokens that `tokens` counts. `tried`: the untrained policy, then each rehearsed step. `validation`
    shows where learning leads if no group does."""
    last = [group for step in tried[-LAST:] for group in step.groups]
    spread = _spread(last, tokens, to_come.groups, validation)
    return _of_run([_by_group(step.groups, tokens) for step in tried], spread, to_come)


def forecast_trained(tried: Sequence[TriedStep], to_come: ToCome) -> Forecast:
    """Forecast tokens with an advantage: as many more or fewer as completions have, in the groups that have one.
    At most all have; at least half of those that are expected."""
    by_step = [
        [
            has_signal * fmean(map(completion_tokens, group.trajectories))
            for group, has_signal in zip(step.groups, step.signals, strict=True)
            if group.trajectories
        ]
        for step in tried
    ]
    last = [trained for step in by_step[-LAST:] for trained in step]
    now = _mean([signal for step in tried[-LAST:] for signal in step.signals])
    teaching, spread = signals_to_come(tried, to_come) / now if now else 1.0, UNCHANGED
    if mean := _mean(last):
        groups = [group for step in tried[-LAST:] for group in step.groups]
        shorter, learned, longer = _spread(groups, completion_tokens, to_come.groups)
        low, high = _ends(last, to_come.groups)
        least = max(0.0, min(low / mean, shorter) * min(1.0, teaching) / 2)
        spread = least, learned, max(high, longer * fmean(_by_group(groups, completion_tokens))) / mean
    return _of_run(by_step, spread, to_come, teaching)


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


def _of_run(
    by_step: Sequence[Sequence[float]], spread: tuple[float, float, float], to_come: ToCome, times: float = 1.0
) -> Forecast:
    """Forecast from the tokens of each group of each step tried. `spread`: where the steps to come may lead. `times`:
    factor for the expected mean of these."""
    means, steps = [_mean(groups) for groups in by_step], len(by_step) + to_come.steps
    first, *rehearsed = means
    if not first:
        return Forecast()
    low, learned, high = spread
    now = _mean([tokens for groups in by_step[-LAST:] for tokens in groups]) / first

    def after(more: float) -> float:
        return now * (1.0 + more * (learned - 1.0))

    def end(of_rest: float) -> float:
        return (sum(rehearsed) / first + (1 + to_come.steps) * of_rest) / steps

    validated = [
        means[step] / first if step < len(means) else after(way_after(to_come.nats, step - len(rehearsed)))
        for step in to_come.validated
    ]
    return Forecast(
        amount=(sum(means) / first + to_come.steps * times * after(to_come.gone)) / steps,
        validated=_mean(validated) if validated else 1.0,
        low=end(min(now * low, 1.0)),
        high=end(max(now * high, 1.0)),
        now=now,
        at_end=after(way_after(to_come.nats, to_come.steps)),
        learned=now * learned,
    )


def _spread(
    groups: Sequence[TrajectoryGroup], tokens: Count, wanted: float, validation: Sequence[Trajectory] = ()
) -> tuple[float, float, float]:
    """Where the mean of `wanted` more groups like these may lie, in multiples of theirs: at least, where learning
    leads, and at most."""
    present = _by_group(groups, tokens)
    learned = _learned_by_group(groups, tokens, validation)
    beyond = [max(0.0, now + BEYOND * (then - now)) for now, then in zip(present, learned, strict=True)]
    mean = _mean(present)
    if not mean:
        return UNCHANGED
    ends = [end / mean for values in (present, beyond) for end in _ends(values, wanted)]
    return max(0.0, min(ends)), fmean(learned) / mean, max(ends)


def _by_group(groups: Sequence[TrajectoryGroup], tokens: Count) -> list[float]:
    return [fmean(map(tokens, group.trajectories)) for group in groups if group.trajectories]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _learned_by_group(
    groups: Sequence[TrajectoryGroup], tokens: Count, validation: Sequence[Trajectory]
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


def plan_run(seen: Observation, *, longer: float = 1.0) -> MemoryBill | None:
    """Predict the memory of the run; None where no policy is planned on this machine's memory, or it does not say what
    is used. `longer`: prompts of the run's end, in multiples of those tried."""
    plans = {name: plan for name, plan in seen.plans.items() if not plan.on_gpu}
    if not plans or seen.memory_idle is None:
        return None
    weights = sum(plan.weights for plan in plans.values()) - shared_bytes(plans)
    here, whole = _key_values(seen, plans, longer)
    packed = sum(plan.packed for plan in plans.values())
    grown = max(0, (seen.memory_rollouts or 0) - seen.memory_idle - packed)
    prompts, completions = step_tokens(seen)
    tokens = prompts * max(1.0, longer) + completions
    largest = max(plans.values(), key=lambda plan: plan.activations(tokens))
    return MemoryBill(
        processes=max(0, seen.memory_idle - weights),
        weights=weights + sum(plan.copies for plan in plans.values()),
        optimizer=sum(plan.optimizer for plan in plans.values()),
        gradient=sum(plan.gradient for plan in plans.values()),
        activations=largest.activations(tokens),
        logits=largest.logits(completions),
        packed=packed,
        key_values=int(grown + max(0.0, whole - here)),
        keeps_key_values=weights < LARGE,
    )


def _key_values(seen: Observation, plans: Mapping[str, MemoryPlan], longer: float) -> tuple[float, float]:
    """Planned bytes of keys and values: here, and in the run, whose further calls ask what no other has asked."""
    loop, runtime = seen.recipe.loop, seen.recipe.runtime
    most = max(1, runtime.workers * runtime.concurrency)
    wave = loop.tasks_per_step * loop.group_size
    held_out = len(seen.tasks.validation) if seen.recipe.validation.every else 0
    here = whole = 0.0
    for name, plan in plans.items():
        calls = [call for rollout in seen.tried for call in rollout.transitions if call.policy == name]
        if not calls:
            continue
        longest = max(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
        prompts = sum(len(call.prompt_ids) for call in calls) / len(seen.tried)
        different = sum(map(len, {tuple(call.prompt_ids.tolist()) for call in calls}))  # one that comes again is there
        each = different / len(seen.tried) + max(0.0, longer - 1.0) * prompts
        here += plan.caches(min(most, wave), longest, different)
        whole += plan.caches(min(most, max(wave, held_out)), longest, int(each * (wave + held_out)))
    return here, whole


def step_tokens(seen: Observation) -> tuple[float, float]:
    """Different tokens of prompts and of completions in the rows of the run's largest step: a group's prompts are read
    once, and a group without an advantage has no rows."""
    loop = seen.recipe.loop
    calls = [call for rollout in seen.rollouts for call in rollout.transitions]
    rollouts = _most_groups(seen) * loop.group_size / max(1, len(seen.rollouts))
    prompts = sum(len(call.prompt_ids) / loop.group_size for call in calls)
    return rollouts * prompts, rollouts * sum(len(call.completion_ids) for call in calls)


def _most_groups(seen: Observation) -> float:
    """Groups with an advantage in the step that has the most of them, as is to be expected of the share that was seen:
    the greatest of `loop.steps` draws of a binomial distribution, at least one group."""
    loop = seen.recipe.loop
    signals = [signal for step in seen.steps for signal in step.signals]
    if loop.dynamic_sampling or not signals or all(signals):
        return loop.tasks_per_step
    share = (sum(signals) + 1) / (len(signals) + 2)  # of few groups it is known badly (Laplace)
    below = most = 0.0
    for count in range(loop.tasks_per_step):
        ways = math.comb(loop.tasks_per_step, count)
        below += ways * share**count * (1 - share) ** (loop.tasks_per_step - count)
        most += 1 - below ** max(1, loop.steps)  # E[max] = Σ P(max > count)
    return max(1.0, most)
