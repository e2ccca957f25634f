"""The training loop: collect → reward → credit → learn → new weights.

    Server ◄─ rollouts ─ Trainer ─ samples ─► Policies.learn ─ version ─► engine links ─► Server
       └─ groups, rewarded ─►┘  └─ every step: ledger (mark_trained), metrics, now and then validation and a checkpoint

Tasks are a stream. What may be out is a capacity: on-policy, what the step still wants; else the tasks of
`max_staleness` more steps, too. A step takes groups in the order of their tasks, or as they finish, but waits for one
that would become too old (`lightningrl_training.pacing`): no group is left out for its age.

Exactly once: a checkpoint holds the weights after step k, and which positions of the stream they are done with. On
resume the ledger is rolled back to k; rollouts of later steps are still in the store under the same ids, so they are
replayed, not sampled again, and each counts once in the weights' history.
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
from statistics import fmean
from typing import Final, Protocol

from lightningrl.errors import LightningError, PluginError, RunFolderError
from lightningrl.plugins import PluginManager
from lightningrl.protocols import StepReport
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, Trajectory
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_credit.scoring import CreditedGroup, ScoredStep, Scorer, score_of
from lightningrl_runs.metrics import read_metrics
from lightningrl_training import step_warnings
from lightningrl_training.checkpoints import LoopState, best_checkpoint
from lightningrl_training.collector import Collector, Phase, RewardedGroup, Rollouts, measure_phases
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.explanations import (
    explain_early_stop,
    explain_failures,
    explain_no_rewards,
    explain_shared_failure,
    explain_target,
)
from lightningrl_training.pacing import Pacing
from lightningrl_training.policies import Policies
from lightningrl_training.progress import Progress, forecast_step, step_seconds
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans, note
from lightningrl_training.tasks import TaskSets, TaskStream, plan_branches, plan_group, plan_validation

__all__ = ["ControlPlane", "Trainer"]

logger = logging.getLogger(__name__)

SLOWER: Final = 0.5
"""Part of the learning rate that is left when a policy goes back to its best weights."""


class ControlPlane(Rollouts, Protocol):
    """The server as the loop asks it; `lightningrl_client.control.client.ServerClient` is one."""

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None: ...
    async def rollback_steps(self, after: int) -> int: ...
    async def forget_rollouts(self, through: int, slack: int = 0) -> int: ...


@dataclass(kw_only=True, slots=True)
class _StepBatch:
    """The groups that a step learns from."""

    groups: list[RewardedGroup] = field(default_factory=list[RewardedGroup])
    credited: list[CreditedGroup] = field(default_factory=list[CreditedGroup])

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
    """The state that an earlier process left; all zero for a new run."""
    start_workers: Callable[[], Awaitable[None]]
    """Called where rollouts are wanted that the store does not have yet."""
    spans: StepSpans = NO_SPANS
    read_memory: Callable[[], Mapping[str, float]] = dict
    """Reads what the run's processes hold, as metrics of a step."""
    _started: float = 0.0
    _stream: TaskStream = field(init=False)
    _warnings: step_warnings.StepWarnings = field(init=False)
    _earned: float | None = None
    """The highest reward of a trained rollout since this process started."""
    _has_succeeded: bool = False
    """True once a rollout of this process ended well."""
    _failed_alike: bool = False
    """True where all rollouts of the last step failed in one way."""
    _has_fallen: bool = False
    """True where the last validation was below the best, by more than its interval."""

    def __post_init__(self) -> None:
        self._warnings = step_warnings.StepWarnings(self.recipe, self.scorer, lambda: self.policies.call_speed)

    async def run(self) -> LoopState:
        """Train to the end of the recipe. Returns where the loop stands; the last state is in a checkpoint. Raises
        LightningError where a step has no rollout to learn from, and at the end where no step taught anything."""
        self._started = time.monotonic() - self.state.seconds
        self._stream = TaskStream(self.state.position, self.state.done_beyond)
        await self.control.rollback_steps(self.state.step)
        if not self.folder.checkpoints():
            self._forecast(())
            await self._validate()
            await self._checkpoint()
        async with aclosing(self._make_collector(self._pacing())) as collector:
            while not self._is_done():
                await self._step(collector)
                every, is_new = self.recipe.validation.every, False
                if every and (self._is_done() or self.state.step % every == 0):
                    is_new = await self._validate() or await self._go_back()
                if is_new or self._is_done() or self.state.step % self.recipe.loop.checkpoint_every == 0:
                    await self._checkpoint()
        if self.state.has_reached(self.recipe.loop):
            self.progress.say(explain_target(self.state, self.recipe.loop, self.folder.path))
        elif self.state.has_lost_patience(self.recipe.loop) and self.state.step < self.recipe.loop.steps:
            logger.warning("%s", explain_early_stop(self.state, self.folder.path))
        if still := await self._explain_standstill():
            logger.warning("%s", still)
        if self.state.step and self.state.steps_with_signal == 0:
            why = self._warnings.silence or "no group of rollouts had a signal"
            raise LightningError(
                f"nothing was learned in {self.state.step} steps: {why} (run {str(self.folder.path)!r})"
            )
        return self.state

    def _is_done(self) -> bool:
        minutes = self.recipe.loop.minutes
        is_late = minutes is not None and self._seconds() > minutes * 60
        state, loop = self.state, self.recipe.loop
        return state.step >= loop.steps or is_late or state.has_reached(loop) or state.has_lost_patience(loop)

    async def _explain_standstill(self) -> str | None:
        """The likely reason why validation is no better than before the first step; None where it is better."""
        rows = read_metrics(self.folder.metrics) if self.folder.metrics.is_file() else []
        if not step_warnings.has_stood_still(rows, self.recipe.reward_bounds[1]):
            return None
        answers = await step_warnings.count_repeated_answers(
            self.control, self.tasks, self.recipe, step_warnings.last_validation(rows)
        )
        return step_warnings.explain_standstill(rows, self.recipe, answers=answers, earned=self._earned)

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    async def _step(self, collector: Collector) -> None:
        with self.spans.span("step", step=self.state.step + 1) as span:
            try:
                note(span, await self._learn_step(collector))
            except PluginError as error:  # of the credit assigner, as a rule
                raise PluginError(f"step {self.state.step + 1}: {error}; {self._resume_remedy()}") from error

    async def _learn_step(self, collector: Collector) -> Mapping[str, float]:
        """Run one step; return its span's attributes."""
        began, step = time.monotonic(), self.state.step + 1
        with self.spans.span("collect") as span:
            batch = await self._take_step(collector)
            if self._is_old_failure(batch.groups):
                self._stream.reopen(group.position for group in batch.groups)
                await self._run_again(collector, batch.groups)
                batch = await self._take_step(collector)
            trajectories = batch.trajectories
            note(span, {"rollouts": len(trajectories)})
        self._refuse_defect(trajectories)
        with self.spans.span("score"):
            scored = await asyncio.to_thread(self.scorer.build, batch.credited)
        for group, advantages in zip(scored.groups, scored.advantages, strict=True):
            self.plugins.notify("lightningrl_group_credited", group=group, advantages=advantages)
        ready = time.monotonic()
        self._warnings.rollouts(step, batch.credited, scored, trajectories)
        staleness = self._measure_staleness(trajectories)
        reports = await self.policies.learn(scored.samples, say=self.progress.say)
        self._warnings.learned(step, scored, has_learned=any(report.tokens for report in reports.values()))
        sampled_s, seconds = measure_phases(batch.groups, began, ready)
        metrics = {
            **scored.metrics,
            **staleness,
            **seconds,
            "seconds_learn": sum(report.seconds for report in reports.values()),
            "tokens_per_second": scored.metrics["completion_tokens"] / max(1e-9, sampled_s),
            **self.policies.describe(reports),
            "hooks_failed": float(self.plugins.take_failures()),
            "minutes": self._seconds() / 60,
            **self.read_memory(),
        }
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        self._earned = max((*rewards, *(() if self._earned is None else (self._earned,))), default=None)
        await self._finish_step(scored.rollout_ids, scored, metrics)
        return {name: metrics[name] for name in ("reward", "rollouts", "completion_tokens") if name in metrics}

    def _measure_staleness(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """The metric `staleness_slow`: mean staleness of the quarter of the rollouts that took the longest."""
        if not self.recipe.loop.max_staleness:
            return {}
        slowest = sorted(trajectories, key=lambda trajectory: trajectory.duration_s)[-max(1, len(trajectories) // 4) :]
        return {"staleness_slow": fmean(self.policies.staleness([trajectory]) for trajectory in slowest)}

    async def _finish_step(self, ids: Sequence[str], scored: ScoredStep, metrics: Mapping[str, float]) -> None:
        """Enter the step into the ledger, then show it."""
        await self.control.set_scores(scored.scores)
        await self.control.mark_trained(self.state.step + 1, ids, metrics)
        position, done_beyond = self._stream.advance()
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            seconds=self._seconds(),
            rollouts=self.state.rollouts + len(ids),
            steps_with_signal=self.state.steps_with_signal + scored.has_signal,
            position=position,
            done_beyond=done_beyond,
            credit=self.scorer.state(),
            score=None,
        )
        outcomes = {f"outcome/{name}": float(count) for name, count in scored.outcomes.items()}
        self.log(self.state.step, {**metrics, **outcomes})
        self.progress.step(self.state.step, self.recipe.loop.steps, metrics, scored.outcomes)
        report = StepReport(step=self.state.step, metrics=metrics, outcomes=scored.outcomes)
        self.plugins.notify("lightningrl_step_finished", report=report)

    async def _validate(self) -> bool:
        """Validate where the recipe asks for it; returns true where the weights are the best so far."""
        if not self.tasks.validation or not self.recipe.validation.every:
            return False
        with self.spans.span("validate", step=self.state.step) as span:
            metrics = await self._run_validation()
            note(span, {name: metrics[name] for name in ("reward", "rollouts") if name in metrics})
        return self._note_score(metrics.get("reward"))

    async def _go_back(self) -> bool:
        """Return to the best weights, and learn on more slowly, where the last validation fell and the recipe asks for
        it; returns true where that was done."""
        best = best_checkpoint(self.folder.path)
        if not self._has_fallen or best is None or self._is_done() or not self.recipe.validation.go_back:
            return False
        if not self.policies.can_go_back:
            return False
        rates = await self.policies.go_back(best.folder, slower=SLOWER)
        self.scorer.load(best.state.credit)
        self.state = replace(self.state, rollouts=best.state.rollouts, credit=best.state.credit, score=best.state.score)
        shown = ", ".join(f"{name}: {rate:.3g}" for name, rate in rates.items())
        logger.warning(
            "after step %d the policy goes back to its weights after step %d, and learns on at half the rate (%s); "
            "validation.go_back = false leaves it where it is",
            self.state.step,
            best.state.step,
            shown,
        )
        self.log(self.state.step, {"went_back_to": float(best.state.step)})
        return True

    async def _run_validation(self) -> Mapping[str, float]:
        """Run a validation's rollouts; returns its metrics."""
        where = f"validation after step {self.state.step}"
        specs = plan_validation(self.tasks.validation, self.recipe, self.state.step)
        async with aclosing(self._make_collector()) as collector:
            await collector.order({position: [spec] for position, spec in enumerate(specs)})
            phase = self._make_phase(collector, "validation", where, group_size=1)
            groups = await phase.take_all(len(specs))
            if self._is_old_failure(groups):
                await self._run_again(collector, groups)
                groups = await phase.take_all(len(specs))
        trajectories = [rollout for group in groups for rollout in group.trajectories]
        metrics = describe_rollouts(trajectories)
        if self._note_endings(trajectories) and not self._has_succeeded:  # the agent's own bug says nothing of a policy
            metrics = {name: value for name, value in metrics.items() if name.partition("/")[0] != "reward"}
        outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
        await self.control.set_scores([score_of(trajectory) for trajectory in trajectories])
        self._has_fallen = self._warnings.validation(where, trajectories, metrics, best=self.state.best_score)
        forecast = self._forecast(trajectories) if self.state.step == 0 else {}
        names = {f"validation/{name}": value for name, value in metrics.items()}
        self.log(self.state.step, {**names, **forecast, "minutes": self._seconds() / 60})
        self.progress.validated(self.state.step, metrics, outcomes)
        return metrics

    def _forecast(self, seen: Sequence[Trajectory]) -> Mapping[str, float]:
        """Show, before the first step, what one will take, where a policy was measured; return it as a metric."""
        if (speed := self.policies.speed) is None:
            return {}
        self.progress.forecast(forecast_step(self.recipe, speed, seen))
        return {"forecast_step_seconds": step_seconds(self.recipe, speed, seen)}

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

    def _pacing(self) -> Pacing | None:
        """Pacing of groups that need not be taken in order; None = they are."""
        loop = self.recipe.loop
        if not loop.asynchronous:
            return None
        return Pacing(
            tasks_per_step=loop.tasks_per_step,
            max_staleness=loop.max_staleness,
            versions=lambda: self.policies.versions,
        )

    def _make_collector(self, pacing: Pacing | None = None) -> Collector:
        return Collector(
            rollouts=self.control,
            evaluator=self.evaluator,
            start_workers=self.start_workers,
            pacing=pacing,
            plan_branches=self._plan_branches,
        )

    def _make_phase(self, collector: Collector, name: str, where: str, *, group_size: int) -> Phase:
        return Phase(
            name=name,
            where=where,
            group_size=group_size,
            collector=collector,
            show=self.progress.phase,
            remedy=self._resume_remedy(),
        )

    def _plan_branches(self, rewarded: Sequence[Trajectory]) -> list[RolloutSpec]:
        sources = {trajectory.rollout_id: trajectory for trajectory in rewarded}
        points = self.scorer.branch_points([source for source in rewarded if source.mode is RolloutMode.TRAIN])
        return [
            spec
            for point, samples in points.items()
            for spec in plan_branches(self.recipe, sources[point.rollout_id], point, samples)
        ]

    async def _take_step(self, collector: Collector) -> _StepBatch:
        """The step's groups in the order of their tasks, credited: as many as it has tasks, or, with dynamic sampling,
        as many that teach."""
        loop, batch = self.recipe.loop, _StepBatch()
        phase = self._make_phase(collector, "rollouts", f"step {self.state.step + 1}", group_size=loop.group_size)
        while missing := self._missing(batch):
            await self._fill(collector, missing)
            group = await phase.take(batch.groups, missing)
            self._stream.finish(group.position)
            batch.groups.append(group)
            batch.credited += await asyncio.to_thread(self.scorer.credit, group.trajectories, group.branches)
        await self._fill(collector, 0)
        pairs = sorted(zip(batch.groups, batch.credited, strict=True), key=lambda pair: pair[0].position)
        return replace(batch, groups=[group for group, _ in pairs], credited=[credited for _, credited in pairs])

    def _missing(self, batch: _StepBatch) -> int:
        """Groups that the step still wants."""
        # tasks_per_step = 4, dynamic_sampling = 1: groups are taken until 4 teach, 4 * (1 + 1) = 8 at most
        #   4 taken, 1 teaches     min(4 - 1, 8 - 4) = 3
        #   7 taken, 2 teach       min(4 - 2, 8 - 7) = 1
        # without dynamic sampling, and where a defect has all rollouts fail, every group counts as one that teaches
        loop, count = self.recipe.loop, len(batch.groups)
        is_choosing = loop.dynamic_sampling and not self._is_defect(batch.trajectories)
        teaching = sum(credited.has_signal for credited in batch.credited) if is_choosing else count
        return min(loop.tasks_per_step - teaching, loop.tasks_per_step * (1 + loop.dynamic_sampling) - count)

    async def _fill(self, collector: Collector, missing: int) -> None:
        """Order groups up to the capacity: what the step still wants, and the steps that may be collected ahead."""
        # step 3 of 10 wants 2 more groups, 4 tasks a step, max_staleness = 2: 2 + 2 * 4 = 10 groups are out
        # step 10 of 10 is the last, so nothing is ordered ahead: 2 are out
        loop = self.recipe.loop
        ahead = min(loop.max_staleness, loop.steps - 1 - self.state.step)
        count = missing + ahead * loop.tasks_per_step - collector.out
        positions = [self._stream.take_next() for _ in range(count)]
        await collector.order({place: plan_group(self.tasks.train, self.recipe, place) for place in positions})

    def _is_old_failure(self, groups: Sequence[RewardedGroup]) -> bool:
        """True where all failed under an earlier process: it ended for that, and the cause has been mended since."""
        is_of_groups = self._is_defect([trajectory for group in groups for trajectory in group.trajectories])
        return is_of_groups and all(group.is_replay for group in groups)

    def _is_defect(self, trajectories: Sequence[Trajectory]) -> bool:
        """True where no rollout ended in a way that is trained, or all failed in the one same way."""
        is_trained = any(self.recipe.outcomes.is_trained(trajectory.outcome) for trajectory in trajectories)
        return not is_trained or explain_shared_failure(trajectories) is not None

    async def _run_again(self, collector: Collector, groups: Sequence[RewardedGroup]) -> None:
        failed = [trajectory for group in groups for trajectory in group.trajectories]
        logger.warning("%s; that was before this start, so they are run again", explain_failures(failed))
        await collector.run_again(groups, self.recipe.runtime.limit_s)

    # ------------------------------------------------------------------ what a step leaves

    async def _checkpoint(self) -> None:
        """Write a checkpoint in a thread: the engine link goes on, but no learning. A stop waits until it is written;
        backends are closed then."""
        with self.spans.span("checkpoint", step=self.state.step):
            writing = asyncio.create_task(asyncio.to_thread(self._write_checkpoint))
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})
        await self._forget_rollouts()

    async def _forget_rollouts(self) -> None:
        """Forget rollouts that no kept checkpoint goes on from. A kill in between leaves some for the next."""
        # step 40, keep_rollouts = 5, kept checkpoints of steps 30 and 40: rollouts of steps up to 30 may go
        # tasks_per_step = 4, but checkpoint 30 is done with positions below 112 alone (28 steps' worth): groups of the
        # last 30 - 28 = 2 steps stay, for a straggler's position belongs to a step long past, and is ordered again
        loop = self.recipe.loop
        if loop.keep_rollouts is None:
            return
        oldest = self.folder.checkpoints()[-loop.keep_checkpoints :][0].state
        through = min(self.state.step - loop.keep_rollouts, oldest.step)
        if through > 0:
            await self.control.forget_rollouts(through, max(0, through - oldest.position // loop.tasks_per_step))

    def _write_checkpoint(self) -> None:
        try:
            scratch = self.folder.new_checkpoint(self.state.step)
            self.policies.save(scratch / "policies")
            self.folder.commit_checkpoint(scratch, self.state, self.recipe.loop.keep_checkpoints)
        except OSError as error:
            where = str(self.folder.path / "checkpoints")
            raise RunFolderError(
                f"no checkpoint can be written to {where!r}: {error}; mend that, then run again with --resume"
            ) from error

    def _refuse_defect(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise LightningError where nothing has a reward, or every rollout failed in one way: a defect to mend, not
        data to train on. Once rollouts have ended well, a policy may break one step by itself; two in a row stop."""
        failed_before = self._failed_alike
        self._failed_alike = self._note_endings(trajectories)
        has_rewards = any(trajectory.reward is not None for trajectory in trajectories)
        if has_rewards and not (self._failed_alike and (failed_before or not self._has_succeeded)):
            return
        why = explain_no_rewards(trajectories, self._warnings.explain_timeouts(trajectories))
        if failed_before and self._has_succeeded:
            why += ", or go on from an earlier checkpoint with a lower learner.learning_rate: the step before ended so"
        raise LightningError(f"step {self.state.step + 1}: {why}; {self._resume_remedy()}")

    def _note_endings(self, trajectories: Sequence[Trajectory]) -> bool:
        """Remember whether any rollout ended well; returns true where all failed in one way."""
        self._has_succeeded |= any(trajectory.outcome is Outcome.SUCCEEDED for trajectory in trajectories)
        return explain_shared_failure(trajectories) is not None

    def _resume_remedy(self) -> str:
        return f"then go on with `lightningrl train --resume --run {shlex.quote(str(self.folder.path))}`"
