"""The bill: what the whole run will take, from the few rollouts and the one step that were tried.

run = start + checkpoints + steps · (groups of a step · what a group took + learning) + validations · what one took
    + in CPU time a curve drawn for each step and validation

Billed is what rollouts take at the present policy. They do not stay as long as that while it learns: `lightningrl.doctor.forecast` says
from where to where they may move, and the bill's rows have that range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from lightningrl.doctor.forecast import Spread, completion_tokens, forecast, forecast_trained, prompt_tokens
from lightningrl.doctor.observation import Cost, Costs, Observation
from lightningrl.types import OtherCallKind, Trajectory

__all__ = ["Bill", "BillLine", "make_bill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BillLine:
    """One row of the bill."""

    what: str
    amount: float
    unit: str
    how: str
    """How it was computed."""
    low: float | None = None
    """Where it may lie while the policy learns; None = it does not depend on that."""
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """Of a whole run."""

    steps: int
    """Fewer than the recipe's where loop.minutes ends it before."""
    rollouts: int
    """Validation included, branches left out."""
    prompt_tokens: float
    """Validation and branches included, as for all tokens here."""
    completion_tokens: float
    trained_tokens: float
    judge_calls: float
    minutes: float
    cpu_minutes: float | None
    """Of all cores together; None = the system does not say."""
    memory_bytes: int | None
    """The most at a time."""
    disk_bytes: float
    lines: tuple[BillLine, ...] = ()
    """As a table, with how each was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """Of some rollouts."""

    prompt: int
    completion: int
    judged: int

    @classmethod
    def count(cls, trajectories: Iterable[Trajectory]) -> _Tokens:
        every = tuple(trajectories)
        calls = [call for one in every for call in one.transitions if call.replayed_from is None]
        judged = sum(call.kind is OtherCallKind.JUDGE for one in every for call in one.other_calls)
        prompt, completion = (sum(map(len, column)) for column in ([c.prompt_ids for c in calls], [c.completion_ids for c in calls]))
        return cls(prompt=prompt, completion=completion, judged=judged)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """A run of so many steps, in multiples of what was tried."""

    steps: int
    groups: float
    """In all steps."""
    validations: int
    checkpoints: int
    collect: float
    learn: float
    validate: float

    @classmethod
    def of(cls, seen: Observation, steps: int) -> _Plan:
        loop, every = seen.recipe.loop, seen.recipe.validation.every
        groups = steps * _groups_per_step(seen)
        # one before the first step, one every so many, one after the last
        validations = 1 + math.ceil(steps / every) if every and seen.tasks.validation else 0
        return cls(
            steps=steps,
            groups=groups,
            validations=validations,
            checkpoints=1 + math.ceil(steps / loop.checkpoint_every),
            collect=groups / max(1, len(seen.groups)),
            learn=groups / max(1, seen.costs.learned_groups),
            validate=validations * len(seen.tasks.validation) / max(1, len(seen.validation)),
        )

    def seconds(self, costs: Costs, of: Callable[[Cost], float | None]) -> float | None:
        """Of the loop; None where one of its parts is not known."""
        parts = (
            (costs.collect, self.collect),
            (costs.learn, self.learn),
            (costs.validate, self.validate),
            (costs.save, self.checkpoints),
            (costs.draw, self.steps + self.validations),
        )
        found = [(of(cost), times) for cost, times in parts]
        return None if any(value is None for value, _ in found) else sum((value or 0.0) * times for value, times in found)


def make_bill(seen: Observation) -> Bill:
    """The bill of the whole run."""
    recipe, costs = seen.recipe, seen.costs
    plan = _Plan.of(seen, _steps(seen))
    trained = _Tokens.count(member for group in seen.groups for member in group.members)
    checked = _Tokens.count(seen.validation)
    rollouts = round(plan.groups * recipe.loop.group_size + plan.validations * len(seen.tasks.validation))
    tried = max(1, len(seen.rollouts) + len(seen.validation))
    kept = min(recipe.loop.keep_checkpoints + 1, plan.checkpoints)  # one more while it is written
    wall, cpu = plan.seconds(costs, lambda cost: cost.seconds), plan.seconds(costs, lambda cost: cost.cpu_seconds)
    start_cpu = costs.start.cpu_seconds
    bill = Bill(
        steps=plan.steps,
        rollouts=rollouts,
        prompt_tokens=plan.collect * trained.prompt + plan.validate * checked.prompt,
        completion_tokens=plan.collect * trained.completion + plan.validate * checked.completion,
        trained_tokens=plan.collect * costs.trained_tokens,
        judge_calls=plan.collect * trained.judged,
        minutes=((wall or 0.0) + costs.start.seconds) / 60,
        cpu_minutes=None if cpu is None or start_cpu is None else (cpu + start_cpu) / 60,
        memory_bytes=None if seen.machine is None else seen.machine.memory_used,
        disk_bytes=rollouts * costs.store_bytes / tried + kept * costs.checkpoint_bytes,
    )
    return replace(bill, lines=tuple(_lines(bill, plan, seen, kept)))


def _groups_per_step(seen: Observation) -> float:
    """With dynamic sampling, those that it takes until enough of them teach."""
    loop = seen.recipe.loop
    if not loop.dynamic_sampling or not seen.signals:
        return loop.tasks_per_step
    return loop.tasks_per_step * min(1 + loop.dynamic_sampling, len(seen.signals) / max(0.5, sum(seen.signals)))


def _steps(seen: Observation) -> int:
    """Those of the recipe, or those that loop.minutes leaves time for."""
    loop = seen.recipe.loop
    if loop.minutes is None or not loop.steps:
        return loop.steps

    def seconds(steps: int) -> float:
        return _Plan.of(seen, steps).seconds(seen.costs, lambda cost: cost.seconds) or 0.0

    one = (seconds(loop.steps) - seconds(0)) / loop.steps
    return min(loop.steps, max(1, math.ceil((60 * loop.minutes - seconds(0)) / max(one, 1e-9))))


def _lines(bill: Bill, plan: _Plan, seen: Observation, kept: int) -> Iterator[BillLine]:
    loop, costs = seen.recipe.loop, seen.costs
    here = f"{len(seen.rollouts)} rollouts tried of {len(seen.groups)} tasks"
    per_step = plan.groups / max(1, plan.steps)
    early = f", of {loop.steps}: loop.minutes = {loop.minutes:g} ends it" if plan.steps < loop.steps and loop.minutes else ""
    validated = f" + {plan.validations} validations of {len(seen.tasks.validation)}" if plan.validations else ""
    yield BillLine(what="steps", amount=bill.steps, unit="", how=f"loop.steps{early}")
    yield BillLine(
        what="rollouts", amount=bill.rollouts, unit="", how=f"{plan.steps} steps × {per_step:.3g} tasks × {loop.group_size}{validated}"
    )
    prompts, completions = (forecast(seen.groups, tokens, plan.groups) for tokens in (prompt_tokens, completion_tokens))
    yield _ranged(
        BillLine(what="prompt tokens", amount=bill.prompt_tokens, unit="", how=f"as many each as the {here}; {_learned(prompts)}"), prompts
    )
    yield _ranged(BillLine(what="completion tokens", amount=bill.completion_tokens, unit="", how=_learned(completions)), completions)
    signal = f"{sum(seen.signals)} of {len(seen.signals)} groups had an advantage; from half, as groups fall silent, to all of them"
    trained = forecast_trained(seen.groups, seen.signals, plan.groups)
    yield _ranged(BillLine(what="trained tokens", amount=bill.trained_tokens, unit="", how=signal), trained)
    if bill.judge_calls:
        yield BillLine(what="judge calls", amount=bill.judge_calls, unit="", how="as many each as those")
    collect, learn, validate = (
        cost.seconds * times / max(1, count)
        for cost, times, count in (
            (costs.collect, plan.collect, plan.steps),
            (costs.learn, plan.learn, plan.steps),
            (costs.validate, plan.validate, plan.validations),
        )
    )
    has_failed = any(lesson.error for lesson in seen.lessons.values())
    learning = "learning, which failed and is not in it" if has_failed else f"{learn:.1f} s learning"
    how = f"start {costs.start.seconds:.0f} s + {plan.steps} × ({collect:.1f} s collecting + {learning})"
    how += f" + {plan.validations} × {validate:.1f} s validating" if plan.validations else ""
    how += f" + {plan.checkpoints} checkpoints × {costs.save.seconds:.2f} s"
    longer = forecast(seen.groups, lambda one: prompt_tokens(one) + completion_tokens(one), plan.groups)
    yield _ranged(BillLine(what="minutes", amount=bill.minutes, unit="", how=how), longer, costs.start.seconds / 60)
    if bill.cpu_minutes is not None:
        line = BillLine(what="CPU minutes", amount=bill.cpu_minutes, unit="", how="the same, in CPU time of all processes")
        yield _ranged(line, longer, (costs.start.cpu_seconds or 0.0) / 60)
    if bill.memory_bytes is not None:
        yield BillLine(what="memory", amount=bill.memory_bytes, unit="bytes", how="the most that all processes had; longer rows need more")
    each = costs.store_bytes / max(1, len(seen.rollouts) + len(seen.validation))
    disk = f"{bill.rollouts} rollouts × {each / 1e3:.1f} kB + {kept} checkpoints × {costs.checkpoint_bytes / 1e6:.1f} MB"
    yield BillLine(what="disk", amount=bill.disk_bytes, unit="bytes", how=disk)


def _ranged(line: BillLine, spread: Spread, fixed: float = 0.0) -> BillLine:
    """`fixed`: what of it does not depend on the rollouts."""
    moves = line.amount - fixed
    return replace(line, low=fixed + spread.low * moves, high=fixed + spread.high * moves)


def _learned(spread: Spread) -> str:
    return f"the best of each group have {100 * spread.learned:.0f} % of that"
