"""The training loop: collect → reward → credit → learn → new weights.

    Server ◄─ rollouts ─ Trainer ─ samples ─► Policies.learn ─ version ─► engine links ─► Server
       └─ groups, rewarded ─►┘  └─ every step: ledger (mark_trained), metrics, now and then validation and a checkpoint

Tasks are a stream. What may be out is a capacity: on-policy, what the step still wants; else the tasks of `max_staleness` more steps,
too. A step takes groups in the order of their tasks, or as they finish.

Exactly once: a checkpoint holds the weights after step k, and which positions of the stream they are done with. On resume the ledger is
rolled back to k; rollouts of later steps are still in the store under the same ids, so they are replayed, not sampled again, and each
counts once in the weights' history.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightningrl.errors import LightningError, PluginError, RewardError, RunFolderError
from lightningrl.plugins import PluginManager
from lightningrl.protocols import StepReport
from lightningrl.recipe import Recipe
from lightningrl.types import RolloutMode, RolloutSpec, Trajectory
from lightningrl_credit.metrics import describe_rollouts, judge_failures
from lightningrl_credit.scoring import CreditedGroup, ScoredStep, Scorer, score_of
from lightningrl_credit.unread import unread_rewards
from lightningrl_training.collector import Collector, RewardedGroup, Rollouts
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.explanations import (
    explain_cache,
    explain_failed_rewards,
    explain_failures,
    explain_left_threads,
    explain_no_rewards,
    explain_silence,
    explain_timeouts,
)
from lightningrl_training.policies import Policies
from lightningrl_training.run_folder import LoopState, RunFolder
from lightningrl_training.standstill import explain_standstill, has_stood_still, last_validation
from lightningrl_training.step_forecast import forecast_step
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans, note
from lightningrl_training.tasks import TaskSets, plan_branches, plan_group, plan_validation
from lightningrl_viewer.reading.metrics import read_metrics

__all__ = ["ControlPlane", "Progress", "Trainer"]

logger = logging.getLogger(__name__)


class ControlPlane(Rollouts, Protocol):
    """The server as the loop asks it; `lightningrl_client.control.client.ServerClient` is one."""

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None: ...
    async def rollback_steps(self, after: int) -> int: ...
    async def forget_rollouts(self, through: int, slack: int = 0) -> int: ...


class Progress(Protocol):
    """Where a person looks on; `lightningrl_training.progress` has two."""

    def phase(self, name: str, done: int, total: int) -> None: ...
    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def forecast(self, parts: Sequence[str]) -> None: ...
    def say(self, sentence: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """The phase that is collected, for whoever looks on."""

    name: str
    where: str
    """`step 3`, in sentences."""
    group_size: int


@dataclass(kw_only=True, slots=True)
class _StepBatch:
    """The groups that a step learns from."""

    groups: list[RewardedGroup] = field(default_factory=list[RewardedGroup])
    credited: list[CreditedGroup] = field(default_factory=list[CreditedGroup])
    stale: int = 0
    """Groups left out for their age."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(kw_only=True, slots=True)
class Trainer:
    """Owns the loop. Everything it touches is handed in."""

    recipe: Recipe
    tasks: TaskSets
    folder: RunFolder
    control: ControlPlane
    policies: Policies
    evaluator: Evaluator
    scorer: Scorer
    plugins: PluginManager
    progress: Progress
    log: Callable[[int, Mapping[str, float]], None]
    state: LoopState
    """Where an earlier process left off; all zero for a new run."""
    start_workers: Callable[[], Awaitable[None]]
    """Called where rollouts are wanted that the store does not have yet."""
    spans: StepSpans = NO_SPANS
    _started: float = 0.0
    _next: int = 0
    """Position of the first task that has not been ordered."""
    _done: set[int] = field(default_factory=set[int])
    """Positions from `state.position` on that are done with."""
    _warned: str | None = None
    """Why the last step without a signal had none."""
    _earned: float | None = None
    """The highest reward of a trained rollout since this process started."""
    _warned_of_rewards: bool = False
    _warned_of_threads: bool = False
    _warned_of_caches: set[bool] = field(default_factory=set[bool])
    """Of validation, of training."""
    _asked: set[str] = field(default_factory=set[str])
    """Tasks of which a rollout has called a model since this start."""

    async def run(self) -> LoopState:
        """Train to the end of the recipe. Returns where the loop stands; the last state is in a checkpoint.

        Raises LightningError where a step has no rollout to learn from, and at the end where no step taught anything.
        """
        self._started = time.monotonic() - self.state.seconds
        if self.state.position is None:
            self.state = replace(self.state, position=self.state.step * self.recipe.loop.tasks_per_step)
        self._next, self._done = self._position, set(self.state.done_beyond)
        await self.control.rollback_steps(self.state.step)
        if not self.folder.checkpoints():
            self._forecast(())
            await self._validate()
            await self._checkpoint()
        async with aclosing(self._make_collector(in_order=not self.recipe.loop.asynchronous)) as collector:
            while not self._is_done():
                await self._step(collector)
                every, is_best = self.recipe.validation.every, False
                if every and (self._is_done() or self.state.step % every == 0):
                    is_best = await self._validate()
                if is_best or self._is_done() or self.state.step % self.recipe.loop.checkpoint_every == 0:
                    await self._checkpoint()
        if early := self._explain_early_stop():
            logger.warning("%s", early)
        if still := await self._explain_standstill():
            logger.warning("%s", still)
        if self.state.step and self.state.steps_with_signal == 0:
            why = self._warned or "no group of rollouts had a signal"
            raise LightningError(f"nothing was learned in {self.state.step} steps: {why} (run {str(self.folder.path)!r})")
        return self.state

    def _is_done(self) -> bool:
        minutes = self.recipe.loop.minutes
        is_late = minutes is not None and self._seconds() > minutes * 60
        return self.state.step >= self.recipe.loop.steps or is_late or self._has_lost_patience()

    def _has_lost_patience(self) -> bool:
        patience = self.recipe.loop.patience
        return patience is not None and self.state.validations_since_best >= patience

    def _explain_early_stop(self) -> str | None:
        if not self._has_lost_patience() or self.state.step >= self.recipe.loop.steps:
            return None
        return (
            f"stopped early after step {self.state.step}: {self.state.validations_since_best} validations were no better than the best, "
            f"{self.state.best_score:.3f}; to go on, raise loop.patience: lightningrl train --resume "
            f"--run {shlex.quote(str(self.folder.path))} --set loop.patience={2 * self.state.validations_since_best}"
        )

    async def _explain_standstill(self) -> str | None:
        """The likely reason why validation is no better than before the first step; None where it is."""
        rows = read_metrics(self.folder.metrics) if self.folder.metrics.is_file() else []
        if not has_stood_still(rows, self.recipe.reward_bounds[1]):
            return None
        return explain_standstill(rows, self.recipe, answers=await self._answers(last_validation(rows)), earned=self._earned)

    async def _answers(self, step: int) -> tuple[int, int] | None:
        """Validation tasks that are answered after this step in the tokens of before the first, and all of them; None
        where answers differ by chance, or are no longer there."""
        if self.recipe.validation_sampling.temperature > 0:
            return None
        plans = (plan_validation(self.tasks.validation, self.recipe, each) for each in (0, step))
        try:
            before, after = [await self.control.trajectories([spec.id for spec in plan]) for plan in plans]
        except LightningError:  # forgotten (loop.keep_rollouts), or lost, which was said at the start
            return None
        answers = [[[call.completion_ids.tolist() for call in rollout.transitions] for rollout in rollouts] for rollouts in (before, after)]
        return sum(first == last for first, last in zip(*answers, strict=True)), len(before)

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    async def _step(self, collector: Collector) -> None:
        with self.spans.span("step", step=self.state.step + 1) as span:
            try:
                note(span, await self._learn_step(collector))
            except PluginError as error:  # of the credit assigner, as a rule
                raise PluginError(f"step {self.state.step + 1}: {error}; {self._resume_remedy()}") from error

    async def _learn_step(self, collector: Collector) -> Mapping[str, float]:
        """What a span says of it."""
        began = time.monotonic()
        with self.spans.span("collect") as span:
            taken = await self._take_step(collector)
            if self._is_old_failure(taken.groups):
                self._done.difference_update(group.position for group in taken.groups)
                await self._run_again(collector, taken.groups)
                taken = await self._take_step(collector)
            trajectories = taken.trajectories
            note(span, {"rollouts": len(trajectories)})
        self._refuse_all_failed(trajectories)
        with self.spans.span("score"):
            scored = await asyncio.to_thread(self.scorer.build, taken.credited)
        for group, advantages in zip(scored.groups, scored.advantages, strict=True):
            self.plugins.notify("lightningrl_group_credited", group=group, advantages=advantages)
        ready = time.monotonic()
        if self.state.step == 0 and (missing := self.scorer.missing_roles(trajectories)):
            logger.warning("step 1: %s", missing)
        if self.state.step == 0 and not self.scorer.remembers and (unread := unread_rewards(self.recipe, self.scorer, taken.credited)):
            logger.warning("step 1: %s", unread)
        if not self._warned_of_threads and (left := explain_left_threads(trajectories)):
            logger.warning("step %d: %s; threads_left counts them", self.state.step + 1, left)
            self._warned_of_threads = True
        cache = self._note_calls(trajectories)
        if cache and scored.has_signal:  # else it is said why there is none
            logger.warning("step %d: %s", self.state.step + 1, cache)
        if timeouts := self._explain_timeouts(trajectories):
            logger.warning("step %d: %s", self.state.step + 1, timeouts)
        self._warn_of_failed_rewards(f"step {self.state.step + 1}", trajectories)
        reports = await self.policies.learn(scored.samples)
        if scored.has_signal:
            self._warned = None
        else:
            self._warn_of_silence(scored, has_learned=any(report.tokens for report in reports.values()))
        ended, rewarded = (max(times) for times in zip(*((group.ended_at, group.rewarded_at) for group in taken.groups), strict=True))
        sampled = ended - min(group.ordered_at for group in taken.groups)
        metrics = {
            **scored.metrics,
            **({"groups_stale": float(taken.stale)} if self.recipe.loop.asynchronous else {}),
            "seconds": time.monotonic() - began,
            "seconds_collect": max(0.0, ended - began),
            "seconds_reward": max(0.0, rewarded - max(began, ended)),
            "seconds_credit": ready - max(began, rewarded),
            "seconds_learn": sum(report.seconds for report in reports.values()),
            "tokens_per_second": scored.metrics["completion_tokens"] / max(1e-9, sampled),
            **self.policies.describe(reports),
            "hooks_failed": float(self.plugins.take_failures()),
            "minutes": self._seconds() / 60,
        }
        earned = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        self._earned = max(earned, default=self._earned) if self._earned is None else max(self._earned, *earned)
        await self._finish_step(scored.rollout_ids, scored, metrics)
        return {name: metrics[name] for name in ("reward", "rollouts", "completion_tokens") if name in metrics}

    async def _finish_step(self, ids: Sequence[str], scored: ScoredStep, metrics: Mapping[str, float]) -> None:
        """Into the ledger, and before whoever looks on."""
        step = self.state.step
        await self.control.set_scores(scored.scores)
        await self.control.mark_trained(step + 1, ids, metrics)
        signals, position = self.state.steps_with_signal, self._position
        while position in self._done:
            self._done.remove(position)
            position += 1
        self.state = replace(
            self.state,
            step=step + 1,
            seconds=self._seconds(),
            rollouts=self.state.rollouts + len(ids),
            steps_with_signal=None if signals is None else signals + scored.has_signal,
            position=position,
            done_beyond=tuple(sorted(self._done)),
            credit=self.scorer.state(),
            score=None,
        )
        self.log(self.state.step, {**metrics, **{f"outcome/{name}": float(count) for name, count in scored.outcomes.items()}})
        self.progress.step(self.state.step, self.recipe.loop.steps, metrics, scored.outcomes)
        report = StepReport(step=self.state.step, metrics=metrics, outcomes=scored.outcomes)
        self.plugins.notify("lightningrl_step_finished", report=report)

    def _warn_of_silence(self, scored: ScoredStep, *, has_learned: bool) -> None:
        """Once for each reason."""
        why = explain_silence([trajectory for group in scored.groups for trajectory in group.trajectories])
        if why != self._warned:
            stays = "" if has_learned else "; weights stay as they are"
            logger.warning("step %d: no row carries a signal%s: %s", self.state.step + 1, stays, why)
        self._warned = why

    def _warn_of_failed_rewards(self, where: str, trajectories: Sequence[Trajectory]) -> None:
        """Once: every step counts them."""
        failed = [trajectory for trajectory in trajectories if trajectory.unrewarded is not None]
        if failed and not self._warned_of_rewards:
            self._warned_of_rewards = True
            logger.warning("%s: %s; such rollouts are left out, rewards_failed counts them", where, explain_failed_rewards(failed))

    def _note_calls(self, trajectories: Sequence[Trajectory], *, is_validation: bool = False) -> str | None:
        """Remember tasks that models were called for. The sentence about a cache that answers in their place, once for training and
        once for validation."""
        cache = explain_cache(trajectories, self._asked, is_validation=is_validation)
        self._asked.update(trajectory.task.id for trajectory in trajectories if trajectory.transitions)
        if cache is None or is_validation in self._warned_of_caches:
            return None
        self._warned_of_caches.add(is_validation)
        return cache

    def _explain_timeouts(self, trajectories: Sequence[Trajectory]) -> str | None:
        sampling, runtime = self.recipe.sampling, self.recipe.runtime
        return explain_timeouts(trajectories, self.policies.call_speed, max_tokens=sampling.max_tokens, timeout_s=runtime.limit_s)

    async def _validate(self) -> bool:
        """Returns whether the weights are the best so far."""
        if not self.tasks.validation or not self.recipe.validation.every:
            return False
        with self.spans.span("validate", step=self.state.step) as span:
            metrics = await self._run_validation()
            note(span, {name: metrics[name] for name in ("reward", "rollouts") if name in metrics})
        return self._note_score(metrics.get("reward"))

    async def _run_validation(self) -> Mapping[str, float]:
        """Its metrics."""
        phase = _Phase(name="validation", where=f"validation after step {self.state.step}", group_size=1)
        specs = plan_validation(self.tasks.validation, self.recipe, self.state.step)
        async with aclosing(self._make_collector(in_order=True)) as collector:
            await collector.order({position: [spec] for position, spec in enumerate(specs)})
            groups = await self._take_all(collector, phase, len(specs))
            if self._is_old_failure(groups):
                await self._run_again(collector, groups)
                groups = await self._take_all(collector, phase, len(specs))
        trajectories = judge_failures([rollout for group in groups for rollout in group.trajectories], self.recipe.reward_bounds[0])
        metrics = describe_rollouts(trajectories)
        outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
        await self.control.set_scores([score_of(trajectory) for trajectory in trajectories])
        if "reward" not in metrics:
            why = explain_no_rewards(trajectories, self._explain_timeouts(trajectories))
            logger.warning("%s has no score: %s", phase.where, why)
        elif timeouts := self._explain_timeouts(trajectories):
            logger.warning("%s: %s", phase.where, timeouts)
        if cache := self._note_calls(trajectories, is_validation=True):
            logger.warning("%s: %s", phase.where, cache)
        self._warn_of_failed_rewards(phase.where, trajectories)
        if self.state.step == 0:
            self._forecast(trajectories)
        names = {f"validation/{name}": value for name, value in metrics.items()}
        self.log(self.state.step, {**names, "minutes": self._seconds() / 60})
        self.progress.validated(self.state.step, metrics, outcomes)
        return metrics

    def _forecast(self, seen: Sequence[Trajectory]) -> None:
        """Before the first step, where a policy is slow."""
        if (speed := self.policies.speed) is not None:
            self.progress.forecast(forecast_step(self.recipe, speed, seen))

    def _note_score(self, score: float | None) -> bool:
        best, since = self.state.best_score, self.state.validations_since_best
        is_best = score is not None and (best is None or score > best)
        if is_best:
            best, since = score, 0
        elif score is not None:
            since += 1
        self.state = replace(self.state, score=score, best_score=best, validations_since_best=since)
        return is_best

    # ------------------------------------------------------------------ collecting

    def _make_collector(self, *, in_order: bool) -> Collector:
        return Collector(self.control, self.evaluator, self.start_workers, in_order=in_order, plan_branches=self._plan_branches)

    def _plan_branches(self, rewarded: Sequence[Trajectory]) -> list[RolloutSpec]:
        sources = {trajectory.rollout_id: trajectory for trajectory in rewarded}
        points = self.scorer.branch_points([one for one in rewarded if one.mode is RolloutMode.TRAIN])
        return [spec for point, samples in points.items() for spec in plan_branches(self.recipe, sources[point.rollout_id], point, samples)]

    @property
    def _position(self) -> int:
        assert self.state.position is not None
        return self.state.position

    async def _take_step(self, collector: Collector) -> _StepBatch:
        """The step's groups in the order of their tasks, credited: as many as it has tasks; with dynamic sampling, as many that teach."""
        loop, taken = self.recipe.loop, _StepBatch()
        phase = _Phase(name="rollouts", where=f"step {self.state.step + 1}", group_size=loop.group_size)
        while missing := self._missing(taken):
            await self._fill(collector, missing)
            group = await self._take(collector, phase, taken.groups, missing)
            self._done.add(group.position)
            if loop.asynchronous and self.policies.staleness(group.trajectories) > loop.max_staleness:
                taken.stale += 1
                continue
            taken.groups.append(group)
            taken.credited += await asyncio.to_thread(self.scorer.credit, group.trajectories, group.branches)
        await self._fill(collector, 0)
        order = sorted(range(len(taken.groups)), key=lambda index: taken.groups[index].position)
        return replace(taken, groups=[taken.groups[index] for index in order], credited=[taken.credited[index] for index in order])

    def _missing(self, taken: _StepBatch) -> int:
        """Groups that the step still wants. That all fail is no reason to want more."""
        loop, count = self.recipe.loop, len(taken.groups)
        is_choosing = loop.dynamic_sampling and any(trajectory.reward is not None for trajectory in taken.trajectories)
        good = sum(one.has_signal for one in taken.credited) if is_choosing else count
        return min(loop.tasks_per_step - good, loop.tasks_per_step * (1 + loop.dynamic_sampling) - count)

    async def _fill(self, collector: Collector, missing: int) -> None:
        """Order groups up to the capacity: what the step still wants, and the steps that may be collected ahead of it."""
        loop = self.recipe.loop
        ahead = min(loop.max_staleness, loop.steps - 1 - self.state.step)
        groups: dict[int, list[RolloutSpec]] = {}
        while collector.out + len(groups) < missing + ahead * loop.tasks_per_step:
            if self._next not in self._done:
                groups[self._next] = plan_group(self.tasks.train, self.recipe, self._next)
            self._next += 1
        await collector.order(groups)

    async def _take_all(self, collector: Collector, phase: _Phase, count: int) -> list[RewardedGroup]:
        groups: list[RewardedGroup] = []
        while len(groups) < count:
            groups.append(await self._take(collector, phase, groups, count - len(groups)))
        return groups

    async def _take(self, collector: Collector, phase: _Phase, taken: Sequence[RewardedGroup], missing: int) -> RewardedGroup:
        """The next group, beside those taken before. Raises RewardError as soon as more rewards failed than may."""
        had, to_come = phase.group_size * len(taken), phase.group_size * missing

        def show() -> None:
            self.progress.phase(phase.name, had + collector.ended(missing), had + to_come)

        show()
        try:
            group = await collector.take(missing, show)
            if any(trajectory.unrewarded is not None for trajectory in group.trajectories):
                rewarded = [trajectory for one in (*taken, group) for trajectory in one.trajectories]
                self.evaluator.check_failures(rewarded, to_come=to_come - phase.group_size)
        except RewardError as error:
            raise RewardError(f"{phase.where}: {error}; {self._resume_remedy()}") from None
        return group

    def _is_old_failure(self, groups: Sequence[RewardedGroup]) -> bool:
        """Whether all failed under an earlier process: it ended for that, and the cause has been mended since."""
        is_trained = self.recipe.outcomes.is_trained
        return all(group.is_replay and not any(is_trained(one.outcome) for one in group.trajectories) for group in groups)

    async def _run_again(self, collector: Collector, groups: Sequence[RewardedGroup]) -> None:
        failed = [trajectory for group in groups for trajectory in group.trajectories]
        logger.warning("%s; that was before this start, so they are run again", explain_failures(failed))
        await collector.run_again(groups, self.recipe.runtime.limit_s)

    # ------------------------------------------------------------------ what a step leaves

    async def _checkpoint(self) -> None:
        """In a thread: the engine link goes on, but no learning. A stop waits until it is written; backends are closed then."""
        with self.spans.span("checkpoint", step=self.state.step):
            writing = asyncio.create_task(asyncio.to_thread(self._write_checkpoint))
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})
        await self._forget_rollouts()

    async def _forget_rollouts(self) -> None:
        """Those that no kept checkpoint goes on from. A kill in between leaves some for the next checkpoint."""
        loop = self.recipe.loop
        if loop.keep_rollouts is None:
            return
        oldest = self.folder.checkpoints()[-loop.keep_checkpoints :][0].state
        through = min(self.state.step - loop.keep_rollouts, oldest.step)
        # a straggler's group is of a step long past; whoever goes on from that checkpoint orders it, too
        done = oldest.step if oldest.position is None else oldest.position // loop.tasks_per_step
        if through > 0:
            await self.control.forget_rollouts(through, max(0, through - done))

    def _write_checkpoint(self) -> None:
        try:
            scratch = self.folder.new_checkpoint(self.state.step)
            self.policies.save(scratch / "policies")
            self.folder.commit_checkpoint(scratch, self.state, self.recipe.loop.keep_checkpoints)
        except OSError as error:
            where = str(self.folder.path / "checkpoints")
            raise RunFolderError(f"no checkpoint can be written to {where!r}: {error}; mend that, then run again with --resume") from error

    def _refuse_all_failed(self, trajectories: Sequence[Trajectory]) -> None:
        """A step in which nothing succeeded is a defect to mend, not data to train on."""
        if all(trajectory.reward is None for trajectory in trajectories):
            why = explain_no_rewards(trajectories, self._explain_timeouts(trajectories))
            raise LightningError(f"step {self.state.step + 1}: {why}; {self._resume_remedy()}")

    def _resume_remedy(self) -> str:
        return f"then go on with `lightningrl train --resume --run {shlex.quote(str(self.folder.path))}`"
