"""The bill: an estimate of the whole run, from the few rollouts and steps that were tried.

run = start + checkpoints + steps · (groups of a step · what a group took + learning) + validations · what one took
    + in CPU time a curve drawn for each step and validation

Learning goes by groups with an advantage, of which fewer are left as more rollouts earn the most. Where no group had an
advantage, rows were given one to try the learner: whether any will have one is not known, so half of them are billed,
and the range goes from none to all.

Rollouts change while the policy learns. `lightningrl_training.doctor.forecast` says how far they will have changed on
average, which is billed, and at least and at most, which is the range of the bill's rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from lightningrl.types import OtherCallKind, Trajectory
from lightningrl_training.doctor.forecast import (
    Forecast,
    ToCome,
    completion_tokens,
    distinct_tokens,
    forecast,
    forecast_trained,
    mean_tokens,
    moved,
    prompt_tokens,
    signals_to_come,
)
from lightningrl_training.doctor.memory_bill import MemoryBill, plan_run
from lightningrl_training.doctor.observation import Cost, Costs, Observation

__all__ = ["Bill", "BillLine", "make_bill"]


UNKNOWN: Final = 0.5
"""Share of groups that are billed as having an advantage, where none of those tried had one."""


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
class _Change:
    """Factors for what was tried, as the policy learns."""

    collect: float = 1.0
    learn: float = 1.0
    validate: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A run of some number of steps, in multiples of what was tried."""

    steps: int
    groups: float
    """Groups of all steps."""
    validations: int
    checkpoints: int
    tokens: float
    """Factor for tokens: groups of the run, per group that the untrained policy has made."""
    collect: float
    """Factor for collecting: groups of the run, per group collected, rehearsed steps weighted by their tokens."""
    learn: float
    teaching: float
    """Share of the groups that teach a policy on whose rows advantages were planted."""
    validate: float

    @classmethod
    def of(cls, seen: Observation, steps: int) -> _Plan:
        loop, every = seen.recipe.loop, seen.recipe.validation.every
        groups = steps * _groups_per_step(seen)
        # one before the first step, one every so many, one after the last
        validations = 1 + math.ceil(steps / every) if every and seen.tasks.validation else 0
        rehearsed = _rehearsed_groups(seen)
        return cls(
            steps=steps,
            groups=groups,
            validations=validations,
            checkpoints=1 + math.ceil(steps / loop.checkpoint_every),
            tokens=groups / max(1, len(seen.groups)),
            collect=groups / max(1.0, len(seen.groups) + rehearsed),
            learn=groups / max(1.0, seen.costs.learned_groups + rehearsed),
            teaching=UNKNOWN,
            validate=validations * len(seen.tasks.validation) / max(1, len(seen.validation)),
        )

    def cost(self, costs: Costs, change: _Change = _Change()) -> Cost:
        """Cost of the loop."""
        rollouts = self.of_rollouts(costs, change)
        return rollouts + costs.save * self.checkpoints + costs.draw * (self.steps + self.validations)

    def of_rollouts(self, costs: Costs, change: _Change = _Change()) -> Cost:
        """The part of the cost that changes with rollouts."""
        learn = (costs.learn + costs.planted * self.teaching) * (self.learn * change.learn)
        validate = costs.validate * (self.validate * change.validate)
        return costs.collect * (self.collect * change.collect) + learn + validate

    def present(self, seen: Observation, tokens: Callable[[Trajectory], int]) -> tuple[float, float]:
        """Tokens of all steps, and of all validations, if every rollout is as those that were tried."""
        members = (member for group in seen.groups for member in group.members)
        return self.tokens * sum(map(tokens, members)), self.validate * sum(map(tokens, seen.validation))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outlook:
    """Forecasts of how rollouts change while the policy learns."""

    to_come: ToCome
    prompts: Forecast
    completions: Forecast
    tokens: Forecast
    """Distinct tokens, which time goes by."""
    trained: Forecast
    signals: float
    """Share of groups with an advantage in the steps to come."""

    @classmethod
    def of(cls, seen: Observation, plan: _Plan) -> _Outlook:
        left, every = max(0, plan.steps - len(seen.steps)), seen.recipe.validation.every or 0
        to_come = ToCome(
            steps=left,
            groups=plan.groups * (left + 1) / max(1, plan.steps),
            nats=_nats(seen),
            validated=tuple(min(number * every, plan.steps) for number in range(plan.validations)),
            falls_silent=seen.falls_silent,
        )
        counts = prompt_tokens, completion_tokens, distinct_tokens
        prompts, completions, tokens = (forecast(seen.steps, count, to_come, seen.validation) for count in counts)
        return cls(
            to_come=to_come,
            prompts=prompts,
            completions=completions,
            tokens=tokens,
            trained=forecast_trained(seen.steps, to_come),
            signals=signals_to_come(seen.steps, to_come),
        )

    def changes(self, seen: Observation) -> tuple[_Change, _Change, _Change]:
        """The least, the expected and the most that what was tried will change by."""
        rollouts = self.tokens.low, self.tokens.amount, self.tokens.high
        validations = self.tokens.low, self.tokens.validated, self.tokens.high
        least, expected, most = (
            _Change(collect=longer, learn=longer * teaching, validate=validated)
            for longer, teaching, validated in zip(rollouts, self._teaching(seen), validations, strict=True)
        )
        return least, expected, most

    def _teaching(self, seen: Observation) -> tuple[float, float, float]:
        """Factors for the groups with an advantage, relative to the steps that were learned: half of those that are
        expected, these, and all."""
        signals = list(seen.signals[: seen.costs.learned_groups])
        now = fmean(signals + [signal for step in seen.rehearsed for signal in step.signals]) if signals else 0.0
        if not now or not seen.falls_silent or seen.recipe.loop.dynamic_sampling:
            return 1.0, 1.0, 1.0
        done, left = len(seen.steps), self.to_come.steps
        shares = self.signals / 2, self.signals, 1.0
        least, expected, most = ((done + left * share / now) / (done + left) for share in shares)
        return least, expected, most

    def explain(self, ahead: Forecast, rehearsed: int) -> str:
        seen = f"{100 * ahead.now:.0f} % of that after {rehearsed} rehearsed steps; " if rehearsed else ""
        way = f"{100 * self.to_come.gone:.0f} % of the way in {self.to_come.steps} steps"
        return f"{seen}learning leads to {100 * ahead.learned:.0f} % of that; {way}"


def _nats(seen: Observation) -> float:
    """Nats that a step of the run moves a rollout by: those of groups without an advantage stay where they are."""
    signals = [signal for step in seen.steps for signal in step.signals]
    return moved(seen) * fmean(signals) if any(signals) else moved(seen, is_planted=True) * UNKNOWN


def _rehearsed_groups(seen: Observation) -> float:
    """Rehearsed groups, weighted by tokens: a group of twice the tokens counts twice, for it takes twice the time."""
    first, *rehearsed = seen.steps
    mean = mean_tokens(first, distinct_tokens)
    return sum(len(step.groups) * (mean_tokens(step, distinct_tokens) / mean if mean else 1.0) for step in rehearsed)


def _ranged(what: str, amount: float, present: float, how: str, ahead: Forecast) -> BillLine:
    """A row with its range. `present`: its amount if every rollout is as those that were tried."""
    return BillLine(what=what, amount=amount, how=how, low=ahead.low * present, high=ahead.high * present)


def make_bill(seen: Observation) -> Bill:
    """Make the bill of the whole run."""
    recipe, costs = seen.recipe, seen.costs
    plan = _Plan.of(seen, _steps(seen))
    outlook = _Outlook.of(seen, plan)
    _, change, _ = outlook.changes(seen)
    members = [member for group in seen.groups for member in group.members]
    judged = sum(call.kind is OtherCallKind.JUDGE for member in members for call in member.other_calls)

    def total(tokens: Callable[[Trajectory], int], ahead: Forecast) -> float:
        of_steps, of_validations = plan.present(seen, tokens)
        return of_steps * ahead.amount + of_validations * ahead.validated

    whole = costs.start + plan.cost(costs, change)
    rollouts = round(plan.groups * recipe.loop.group_size + plan.validations * len(seen.tasks.validation))
    checkpoints = min(recipe.loop.keep_checkpoints + 1, plan.checkpoints)  # one more while it is written
    memory = plan_run(seen, longer=max(outlook.prompts.now, outlook.prompts.at_end))
    used = [None if seen.machine is None else seen.machine.memory_used, None if memory is None else memory.peak]
    bill = Bill(
        steps=plan.steps,
        rollouts=rollouts,
        prompt_tokens=total(prompt_tokens, outlook.prompts),
        completion_tokens=total(completion_tokens, outlook.completions),
        trained_tokens=plan.tokens * costs.trained_tokens * outlook.trained.amount,
        judge_calls=plan.tokens * judged,
        minutes=whole.seconds / 60,
        cpu_minutes=None if whole.cpu_seconds is None else whole.cpu_seconds / 60,
        memory_bytes=max((size for size in used if size is not None), default=None),
        memory=memory,
        disk_bytes=rollouts * outlook.tokens.amount * _stored(seen) + checkpoints * costs.checkpoint_bytes,
    )
    return replace(bill, lines=tuple(_lines(bill, plan, outlook, seen, checkpoints)))


def _stored(seen: Observation) -> float:
    """Bytes of a rollout in the store."""
    return seen.costs.store_bytes / max(1, len(seen.first) + len(seen.tried))


def _groups_per_step(seen: Observation) -> float:
    """Groups that a step collects; with dynamic sampling, as many as it takes until enough of them teach."""
    loop = seen.recipe.loop
    if not loop.dynamic_sampling or not seen.signals:
        return loop.tasks_per_step
    return loop.tasks_per_step * min(1 + loop.dynamic_sampling, len(seen.signals) / max(0.5, sum(seen.signals)))


def _steps(seen: Observation) -> int:
    """Steps of the recipe, or as many as loop.minutes leaves time for."""
    loop = seen.recipe.loop
    if loop.minutes is None or not loop.steps:
        return loop.steps

    def seconds(steps: int) -> float:
        plan = _Plan.of(seen, steps)
        _, expected, _ = _Outlook.of(seen, plan).changes(seen)
        return plan.cost(seen.costs, expected).seconds

    return min(loop.steps, 1 + bisect_left(range(1, loop.steps + 1), 60 * loop.minutes, key=seconds))


def _lines(bill: Bill, plan: _Plan, outlook: _Outlook, seen: Observation, checkpoints: int) -> Iterator[BillLine]:
    loop, costs = seen.recipe.loop, seen.costs
    is_early = plan.steps < loop.steps and loop.minutes
    early = f", of {loop.steps}: loop.minutes = {loop.minutes:g} ends it" if is_early else ""
    yield BillLine(what="steps", amount=bill.steps, how=f"loop.steps{early}")
    validated = f" + {plan.validations} validations of {len(seen.tasks.validation)}" if plan.validations else ""
    tasks = f"{plan.groups / max(1, plan.steps):.3g} tasks"
    how = f"{plan.steps} steps × {tasks} × {loop.group_size}{validated}"
    yield BillLine(what="rollouts", amount=bill.rollouts, how=how)
    here = f"as many each as the {len(seen.rollouts)} rollouts tried of {len(seen.groups)} tasks"
    for what, tokens, count, ahead in (
        ("prompt tokens", bill.prompt_tokens, prompt_tokens, outlook.prompts),
        ("completion tokens", bill.completion_tokens, completion_tokens, outlook.completions),
    ):
        yield _ranged(
            what,
            tokens,
            sum(plan.present(seen, count)),
            f"{here}; {outlook.explain(ahead, len(seen.rehearsed))}",
            ahead,
        )
    how = f"{sum(seen.signals)} of {len(seen.signals)} groups had an advantage"
    if bill.trained_tokens:
        how += f", {100 * outlook.signals:.0f} % of those to come; from half of these to all groups"
    else:
        how += f"; the rows below count with {100 * UNKNOWN:.0f} % of those to come"
    yield _ranged("trained tokens", bill.trained_tokens, plan.tokens * costs.trained_tokens, how, outlook.trained)
    if bill.judge_calls:
        yield BillLine(what="judge calls", amount=bill.judge_calls, how="as many each as those")
    least, expected, most = outlook.changes(seen)
    ends = [
        costs.start + replace(plan, teaching=teaching).cost(costs, change)
        for teaching, change in ((0.0, least), (1.0, most))
    ]
    low, high = (end.seconds / 60 for end in ends)
    how = _explain_minutes(plan, expected, seen)
    yield BillLine(what="minutes", amount=bill.minutes, how=how, low=low, high=high)
    if bill.cpu_minutes is not None:
        low, high = ((end.cpu_seconds or 0.0) / 60 for end in ends)
        how = "the same, in CPU time of all processes"
        yield BillLine(what="CPU minutes", amount=bill.cpu_minutes, how=how, low=low, high=high)
    if bill.memory_bytes is not None:
        how = "the most that all processes had; longer rows need more" if bill.memory is None else str(bill.memory)
        yield BillLine(what="memory", amount=bill.memory_bytes, unit="bytes", how=how)
    each = f"{bill.rollouts} rollouts × {outlook.tokens.amount * _stored(seen) / 1e3:.1f} kB"
    how = f"{each} + {checkpoints} checkpoints × {costs.checkpoint_bytes / 1e6:.1f} MB"
    yield BillLine(what="disk", amount=bill.disk_bytes, unit="bytes", how=how)


def _explain_minutes(plan: _Plan, change: _Change, seen: Observation) -> str:
    costs, steps = seen.costs, max(1, plan.steps)
    present = plan.of_rollouts(costs).seconds
    longer = plan.of_rollouts(costs, change).seconds / present if present else 1.0
    has_failed = any(lesson.error for lesson in seen.lessons.values())
    learns = costs.learn + costs.planted * plan.teaching
    learning = f"{learns.seconds * plan.learn / steps:.1f} s learning{', until it failed' if has_failed else ''}"
    step = f"({costs.collect.seconds * plan.collect / steps:.1f} s collecting + {learning})"
    how = f"start {costs.start.seconds:.0f} s + {plan.steps} × {step}"
    if plan.validations:
        validation = costs.validate.seconds * plan.validate / plan.validations
        how += f" + {plan.validations} × {validation:.1f} s validating"
    how += f" + {plan.checkpoints} checkpoints × {costs.save.seconds:.2f} s"
    how += f"; collecting, learning, validating × {longer:.2f}, as rollouts change" if round(longer, 2) != 1.0 else ""
    return how
