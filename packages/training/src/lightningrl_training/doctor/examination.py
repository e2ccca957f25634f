"""The examination: the real agent, server, workers, engine and learner for one validation, a step or a few, and one
lesson.

serve ─► first rollouts ─► validation ─► groups of training tasks ─► some again, answered as before
      ─► one step, a lesson ─► more steps ─► one checkpoint
lesson: log π(tokens) ─► learn(rows) ─► log π(tokens)   gain = mean of sign(A) · Δ log π, of tokens with an advantage

All of it happens in a scratch folder; the weights are a copy and go with it. A learner that raises gives a lesson, too:
what the rollouts have shown stays. Credit of a group whose rollouts all earn the same is tried by changing their
rewards: most methods give it none.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from lightningrl.advantages import teaching_rows
from lightningrl.backends import Backend, Continuation, Engine, LearnReport, TokenScorer
from lightningrl.errors import ConfigError, LightningError
from lightningrl.machine import MemoryGrowth, count_gpus, cpu_seconds, free_disk, memory_now, memory_total, memory_used
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Array, BranchPoint, RolloutSpec, Sample, Task, Trajectory, TrajectoryGroup
from lightningrl_credit.scoring import CreditedGroup, Scorer, unread_rewards
from lightningrl_training.build import Parts
from lightningrl_training.collector import fetch_ended
from lightningrl_training.doctor.observation import (
    NO_COST,
    Cost,
    Costs,
    GpuMemory,
    Lesson,
    Machine,
    Observation,
    Repeat,
    TriedStep,
)
from lightningrl_training.doctor.reward_attack import attack_rewards
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.loggers import JsonlLogger, draw_curve
from lightningrl_training.memory_check import plan_policies
from lightningrl_training.tasks import plan_branches, plan_group, plan_validation

if TYPE_CHECKING:
    from lightningrl_training.serving import RunningServices

__all__ = ["Clock", "WeightHolder", "falls_silent", "forget_prompts", "observe", "reward", "teach"]

ENOUGH_S = 20.0
"""Seconds of collecting after which no further step is begun."""
MOST_STEPS = 4
"""Steps that are collected before the first is learned."""
FIRST = 2
"""Rollouts before all others, by worker."""
REPEATS = 8
"""Rollouts that are run again, each of another task."""
REHEARSED: Final = 1 / 3
"""Share of the run's steps that are rehearsed, at most; of a shorter run its second."""
MOST_ROWS = 64
"""Rows of a lesson that are scored; all are learned from."""


async def observe(
    recipe: Recipe,
    parts: Parts,
    scratch: Path,
    runs: Path,
    starting: Callable[[str], None] = lambda what: None,
    *,
    rehearse: float = 0.0,
    clock: Clock | None = None,
) -> Observation:
    """Try the recipe in the folder `scratch`. `runs`: the folder that its runs will be written to; `rehearse`: seconds
    for steps beyond the first; `clock`: began when the recipe's parts were built, which a run does, too. Raises
    LightningError where it cannot be started."""
    from lightningrl_training.serving import serve_recipe

    clock = clock or Clock()
    async with serve_recipe(recipe, parts, scratch, starting=starting) as (recipe, served):
        start = clock.lap()
        examination = _Examination(recipe=recipe, parts=parts, served=served, starting=starting, rehearse=rehearse)
        seen = await examination.run(scratch, runs)
    return replace(seen, costs=replace(seen.costs, start=start + seen.costs.start))


class Clock:
    """Wall and CPU time since the last lap."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), cpu_seconds() or 0.0

    def lap(self) -> Cost:
        wall, cpu = time.monotonic(), cpu_seconds() or 0.0
        cost = Cost(seconds=wall - self._wall, cpu_seconds=max(0.0, cpu - self._cpu))
        self._wall, self._cpu = wall, cpu
        return cost


@runtime_checkable
class WeightHolder(Protocol):
    """An engine of this process whose weights change under it."""

    def held(self) -> AbstractContextManager[None]: ...
    def set_version(self, version: int) -> None: ...


def forget_prompts(engine: Engine) -> None:
    """Have an engine drop what it remembers of prompts, as each step of a run finds it: with new weights."""
    if isinstance(engine, WeightHolder):
        with engine.held():
            engine.set_version(engine.info.version)


@dataclass(kw_only=True, slots=True)
class _Examination:
    """The trials of a recipe that is being served."""

    recipe: Recipe
    parts: Parts
    served: RunningServices
    starting: Callable[[str], None]
    rehearse: float
    reward_error: str | None = None
    memory_used: int | None = None

    async def run(self, scratch: Path, runs: Path) -> Observation:
        recipe, scorer, idle = self.recipe, self.parts.scorer, self._look_at_idle()
        first, warm_up = await self._warm_up()
        validation, validate = await self._validate()
        credited, steps, collect = await self._collect_steps()
        rollouts = [one for group in credited for one in group.group.members]
        status, sampled = await self.served.client.status(), sum(link.tokens for link in self.served.links.values())
        stored = await asyncio.to_thread(_store_bytes, scratch / "store.sqlite")
        repeats = await self._repeat(rollouts)
        rollouts_peak = self._look_at_memory()
        step = credited[: recipe.loop.tasks_per_step]
        lessons, learn, planted, trained_tokens = await self._learn(step, credited)
        rehearsed, collected, learned = await self._rehearse(lessons, steps, collect.seconds / steps + learn.seconds)
        size, save = await self._checkpoint(scratch, lessons)
        first_curve, draw = await asyncio.to_thread(_draw, scratch)
        self._look_at_memory()
        costs = Costs(
            start=first_curve + warm_up.beyond(fmean(one.duration_s for one in rollouts)),
            draw=draw,
            collect=collect + collected,
            learn=learn + learned,
            planted=planted,
            validate=validate,
            save=save,
            checkpoint_bytes=size,
            store_bytes=stored,
            trained_tokens=trained_tokens,
            learned_groups=len(step),
        )
        attack = await attack_rewards(recipe, self.parts.evaluator.rewards, self.parts.tasks.train, rollouts)
        return Observation(
            recipe=recipe,
            tasks=self.parts.tasks,
            groups=tuple(one.group for one in credited),
            signals=tuple(one.has_signal for one in credited),
            first=tuple(first),
            falls_silent=falls_silent(scorer, [one.group for one in credited if one.has_signal]),
            rehearsed=tuple(rehearsed),
            requires=scorer.requires,
            missing_roles=scorer.missing_roles(rollouts) if any(one.transitions for one in rollouts) else None,
            reward_error=self.reward_error,
            attack=attack,
            unread_rewards=unread_rewards(recipe, scorer, credited),
            validation=tuple(validation),
            repeats=tuple(repeats),
            contexts={name: backend.engine.info.context_length for name, backend in self.served.backends.items()},
            overridden=sum((Counter(policy.overridden) for policy in status.policies), Counter[str]()),
            ignored=sum((Counter(policy.ignored) for policy in status.policies), Counter[str]()),
            without_tools=self.parts.without_tools,
            sampled_tokens=sampled,
            attempts=status.counts.attempts,
            lessons=lessons,
            speed=self.served.policies.speed,
            costs=costs,
            machine=self._look_at_machine(runs),
            plans=plan_policies(recipe, self.parts.models, load_plugins()),
            memory_idle=idle,
            memory_rollouts=rollouts_peak,
        )

    async def _warm_up(self) -> tuple[list[Trajectory], Cost]:
        """Run a few rollouts for each worker, so that what it imports for the first of them is billed once."""
        clock = Clock()
        self.starting("the first rollouts")
        specs = plan_group(self.parts.tasks.train, self.recipe, 0)[: FIRST * self.recipe.runtime.workers]
        rollouts = await self._try([replace(spec, id=f"{spec.id}-first") for spec in specs])
        return rollouts, clock.lap()

    async def _validate(self) -> tuple[list[Trajectory], Cost]:
        clock = Clock()
        self.starting("a validation")
        wave = self.recipe.loop.tasks_per_step * self.recipe.loop.group_size
        tasks = _some(self.parts.tasks.validation, wave) if self.recipe.validation.every else []
        return await self._try(plan_validation(tasks, self.recipe, 0)), clock.lap()

    async def _collect_steps(self) -> tuple[list[CreditedGroup], int, Cost]:
        """Collect as many steps as there is time for, at least one. Returns their groups, their number and cost."""
        clock = Clock()
        credited: list[CreditedGroup] = []
        collect, steps = NO_COST, 0
        while steps < MOST_STEPS and (not steps or collect.seconds * (steps + 1) / steps < ENOUGH_S):
            self.starting(f"the agent on the tasks of step {steps + 1}")
            for name in self._trained:
                await asyncio.to_thread(forget_prompts, self.served.backends[name].engine)
            credited += await self._collect(steps)
            collect, steps = collect + clock.lap(), steps + 1
        return credited, steps, collect

    async def _learn(
        self, step: Sequence[CreditedGroup], credited: Sequence[CreditedGroup]
    ) -> tuple[dict[str, Lesson], Cost, Cost, int]:
        """Learn from one step's groups, each trained policy by itself. Returns lessons, the steps' cost without the
        measuring (own advantages, planted ones), and the tokens that all collected groups would train."""
        self.starting("one step of the learner")
        took: dict[str, Cost] = {}

        async def learn(rows: Sequence[Sample]) -> LearnReport:
            self._look_at_memory()  # the step's own counts anew
            clock = Clock()
            reports = await self.served.policies.learn(rows)
            took[rows[0].policy] = clock.lap()
            return reports[rows[0].policy]

        build = self.parts.scorer.build
        scored = await asyncio.to_thread(build, step)
        everything = scored if len(step) == len(credited) else await asyncio.to_thread(build, credited)
        lessons = {
            name: await teach(self.served.backends[name], [row for row in scored.samples if row.policy == name], learn)
            for name in self._trained
        }
        own, planted = (
            sum((cost for name, cost in took.items() if lessons[name].is_planted == is_planted), NO_COST)
            for is_planted in (False, True)
        )
        return lessons, own, planted, int(everything.metrics["trained_tokens"])

    async def _rehearse(
        self, lessons: dict[str, Lesson], begun: int, expected: float
    ) -> tuple[list[TriedStep], Cost, Cost]:
        """Take further steps while there is time; return them, and what collecting and learning cost. A learner that
        fails ends it, and its lesson is put into `lessons`. `expected`: seconds of the first of them; `begun`: steps
        whose tasks were tried."""
        tried: list[TriedStep] = []
        collect, learn, clock = NO_COST, NO_COST, Clock()
        is_taught = bool(lessons) and not any(lesson.error or lesson.is_planted for lesson in lessons.values())
        steps = self.recipe.loop.steps
        most = max(math.ceil(REHEARSED * steps), min(2, steps)) - 1 if is_taught and self.reward_error is None else 0
        while len(tried) < most and (collect + learn).seconds + expected < self.rehearse:
            self.starting(f"step {len(tried) + 2} of {most + 1}, as the run will take them")
            credited = await self._collect(begun + len(tried))
            collected = clock.lap()
            failed = await self._learn_further(credited)
            lessons |= failed
            if failed or self.reward_error:
                break
            collect, learn = collect + collected, learn + clock.lap()
            groups, signals = tuple(one.group for one in credited), tuple(one.has_signal for one in credited)
            tried.append(TriedStep(groups=groups, signals=signals))
            expected = (collect + learn).seconds / len(tried)
        return tried, collect, learn

    async def _learn_further(self, credited: Sequence[CreditedGroup]) -> dict[str, Lesson]:
        """Learn from a further step. Returns the lessons of policies whose learner failed."""
        scored = await asyncio.to_thread(self.parts.scorer.build, credited)
        failed: dict[str, Lesson] = {}
        for name in self._trained:
            rows = [row for row in scored.samples if row.policy == name]
            try:
                self._look_at_memory()
                await self.served.policies.learn(rows)
            except Exception as error:  # noqa: BLE001  the boundary to a backend and to a loss of the user's
                failed[name] = _failed_lesson(error, rows=len(rows))
        return failed

    async def _collect(self, step: int) -> list[CreditedGroup]:
        """Run the rollouts of a step, and the branches that credit wants of them."""
        recipe, scorer = self.recipe, self.parts.scorer
        first = step * recipe.loop.tasks_per_step
        specs = [
            spec
            for position in range(first, first + recipe.loop.tasks_per_step)
            for spec in plan_group(self.parts.tasks.train, recipe, position)
        ]
        rollouts = await self._try(specs)
        sources = {one.rollout_id: one for one in rollouts}
        branches = [
            spec
            for point, count in scorer.branch_points(rollouts).items()
            for spec in plan_branches(recipe, sources[point.rollout_id], point, count)
        ]
        left = await self._try(branches)
        try:
            return await asyncio.to_thread(scorer.credit, rollouts, left)
        except LightningError as error:
            self.reward_error = self.reward_error or str(error)
            return await asyncio.to_thread(scorer.credit, _unrewarded(rollouts), _unrewarded(left))

    async def _repeat(self, rollouts: Sequence[Trajectory]) -> list[Repeat]:
        """Run rollouts of different tasks again, those with the most calls first, answered as they were to their last
        call."""
        longest: dict[str, Trajectory] = {}
        for rollout in sorted(rollouts, key=lambda rollout: len(rollout.transitions)):
            if rollout.transitions and rollout.branch is None and self.recipe.outcomes.is_trained(rollout.outcome):
                longest[rollout.task.id] = rollout
        chosen = sorted(longest.values(), key=lambda rollout: -len(rollout.transitions))[:REPEATS]
        specs: list[RolloutSpec] = []
        for rollout in chosen:
            point = BranchPoint(rollout_id=rollout.rollout_id, attempt=rollout.attempt, calls=len(rollout.transitions))
            specs += [replace(spec, id=f"{spec.id}-again") for spec in plan_branches(self.recipe, rollout, point, 1)]
        again = await self._run(specs)
        return [Repeat(recorded=rollout, again=other) for rollout, other in zip(chosen, again, strict=True)]

    async def _try(self, specs: Sequence[RolloutSpec]) -> list[Trajectory]:
        """Run rollouts and reward them."""
        rewarded, error = await reward(self.parts.evaluator, await self._run(specs))
        self.reward_error = self.reward_error or error
        return rewarded

    async def _run(self, specs: Sequence[RolloutSpec]) -> list[Trajectory]:
        if not specs:
            return []
        await self.served.client.create_rollouts(specs)
        return await fetch_ended(self.served.client, [spec.id for spec in specs])

    @property
    def _trained(self) -> list[str]:
        return [name for name, policy in self.recipe.all_policies.items() if policy.trainable]

    def _look_at_memory(self) -> int | None:
        used = memory_used()
        self.memory_used = max((most for most in (self.memory_used, used) if most is not None), default=None)
        return used

    def _look_at_machine(self, runs: Path) -> Machine:
        used, free = self.memory_used, free_disk(runs)
        return Machine(memory=memory_total(), memory_used=used, disk_free=free, gpus=count_gpus())

    def _look_at_idle(self) -> int | None:
        """Bytes before the first rollout; peaks are of rollouts from here on."""
        self._look_at_memory()
        MemoryGrowth()
        return memory_now()

    async def _checkpoint(self, scratch: Path, lessons: Mapping[str, Lesson]) -> tuple[int, Cost]:
        self.starting("a checkpoint")
        clock, has_failed = Clock(), any(lesson.error for lesson in lessons.values())
        return await asyncio.to_thread(self._save, scratch, is_written=not has_failed), clock.lap()

    def _save(self, scratch: Path, *, is_written: bool) -> int:
        """Size of a checkpoint. It is written where no learner failed and there is surely room for it, else guessed:
        weights and two moments."""
        models = [Path(self.parts.models[name]) for name in self._trained]
        guess = 6 * sum(_folder_bytes(model) for model in models if model.is_dir())
        if not is_written or guess > free_disk(scratch) / 2:
            return guess
        self.served.policies.save(scratch / "checkpoint")
        return _folder_bytes(scratch / "checkpoint")


async def teach(
    backend: Backend, samples: Sequence[Sample], learn: Callable[[Sequence[Sample]], Awaitable[LearnReport]]
) -> Lesson:
    """Take one step on a policy's rows and measure its effect. Where no row has an advantage, +1 is planted on all of
    them.

    `learn` makes the step; it is awaited once, if there is a row. What backend or step raise is in the lesson.
    """
    rows, is_planted = list(samples), not teaching_rows(samples)
    if is_planted:
        rows = [replace(row, advantages=row.mask.astype(np.float32)) for row in rows if row.mask.any()]
    if not rows:
        return Lesson(rows=0)
    teaching = teaching_rows(rows)
    looked_at = teaching[:MOST_ROWS]
    try:
        before = await asyncio.to_thread(_logprobs, backend, looked_at)
        growth = MemoryGrowth()
        report = await learn(rows)
        grown = growth.most()
        after = await asyncio.to_thread(_logprobs, backend, looked_at)
    except Exception as error:  # noqa: BLE001  the boundary to a backend and to a loss of the user's
        return _failed_lesson(error, rows=len(teaching), is_planted=is_planted)
    return Lesson(
        rows=len(teaching),
        is_planted=is_planted,
        gain=None if before is None or after is None else _gain(looked_at, before, after),
        gradient=report.metrics.get("grad_norm"),
        learning_rate=report.metrics.get("lr"),
        grown=grown,
        gpu=_gpu(report.metrics),
    )


def _failed_lesson(error: Exception, *, rows: int, is_planted: bool = False) -> Lesson:
    """Make a lesson of what backend or step raised."""
    return Lesson(
        rows=rows,
        is_planted=is_planted,
        error=str(error) if isinstance(error, LightningError) else f"{type(error).__name__}: {error}",
        is_out_of_memory=_is_out_of_memory(error),
    )


def falls_silent(scorer: Scorer, groups: Sequence[TrajectoryGroup]) -> bool:
    """True if no group has an advantage once all its rollouts earn what its best one does. `groups`: some that have
    one now."""
    return bool(groups) and not any(scorer.credit_group(_alike(group)).has_signal for group in groups)


def _alike(group: TrajectoryGroup) -> TrajectoryGroup:
    rewarded = [member for member in group.members if member.reward is not None]
    if not rewarded:
        return group
    best = max(rewarded, key=lambda member: member.reward or 0.0)

    def earn(members: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        return tuple(replace(member, reward=best.reward, rewards=best.rewards) for member in members)

    return replace(group, trajectories=earn(group.trajectories), branches=earn(group.branches))


def _is_out_of_memory(error: Exception) -> bool:
    """Tell out-of-memory errors by type, else by their words: torch has a type of its own for a GPU and a plain
    RuntimeError for a CPU, and another process's error reaches us as a sentence."""
    message = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in message or "allocate memory" in message


def _gpu(metrics: Mapping[str, float]) -> GpuMemory | None:
    if "gpu_memory" not in metrics:
        return None
    before, peak, total = (int(metrics[name]) for name in ("gpu_memory_before", "gpu_memory_peak", "gpu_memory"))
    return GpuMemory(before=before, peak=peak, total=total)


def _logprobs(backend: Backend, rows: Sequence[Sample]) -> list[Array] | None:
    """Log-probabilities of all tokens but the first, by row; None where the backend tells none."""
    if not isinstance(backend, TokenScorer):
        return None
    return list(backend.logprobs([Continuation(context=row.token_ids[:1], tokens=row.token_ids[1:]) for row in rows]))


def _gain(rows: Sequence[Sample], before: Sequence[Array], after: Sequence[Array]) -> float:
    gains = [
        (np.sign(row.advantages[1:]) * (new - old))[row.mask[1:] & (row.advantages[1:] != 0.0)]
        for row, old, new in zip(rows, before, after, strict=True)
    ]
    return float(np.mean(np.concatenate(gains)))


async def reward(evaluator: Evaluator, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], str | None]:
    """Reward the trajectories. Where a reward fails for good, none of them has one, and its error is returned, too."""
    try:
        return await evaluator.evaluate(trajectories), None
    except LightningError as error:
        return _unrewarded(trajectories), str(error)


def _draw(scratch: Path) -> tuple[Cost, Cost]:
    """Draw two curves, since the first imports what draws it, and return the cost of each. They are drawn beside other
    work and take no seconds of a run."""
    logger = JsonlLogger(scratch / "metrics.jsonl")
    logger.log(1, {"reward": 0.5})
    logger.close()
    clock, taken = Clock(), []
    for _ in range(2):
        try:
            draw_curve(scratch / "metrics.jsonl", scratch / "curve.png", title="")
        except ConfigError:  # nothing is installed that draws
            return NO_COST, NO_COST
        taken.append(replace(clock.lap(), seconds=0.0))
    return taken[0], taken[1]


def _some(tasks: Sequence[Task], most: int) -> Sequence[Task]:
    """Choose `most` of the tasks, evenly spaced."""
    count = min(len(tasks), most)
    return [tasks[index * len(tasks) // count] for index in range(count)]


def _unrewarded(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [replace(one, reward=None) for one in trajectories]


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _store_bytes(path: Path) -> int:
    """Bytes of a SQLite database's pages, those in its write-ahead log included."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
        (pages,), (size,) = (database.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    return int(pages * size)
