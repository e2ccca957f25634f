"""The training loop: collect → reward → credit → learn → new weights; on-policy, or collecting ahead where the backend can.

    Server ◄─ rollouts ─ Trainer ─ samples ─► Policies.learn ─ version ─► engine links ─► Server
       └── trajectories ──►┘  └─ every step: ledger (mark_trained), metrics, now and then validation and a checkpoint

Exactly once: a checkpoint holds the weights after step k. On resume the ledger is rolled back to k; rollouts of later steps are still in
the store under the same ids, so they are replayed, not sampled again, and each counts once in the weights' history.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lightningrl.config import Recipe
from lightningrl.credit.scoring import CreditedGroup, Scored, Scorer, describe_rollouts, score_of
from lightningrl.errors import LightningError, RewardError, RunFolderError
from lightningrl.plugins import PluginManager
from lightningrl.protocols import StepReport
from lightningrl.store.protocol import Score
from lightningrl.training.policies import Policies
from lightningrl.training.reasons import explain_failed_rewards, explain_failures, explain_silence, explain_timeouts
from lightningrl.training.run_folder import LoopState, RunFolder
from lightningrl.training.tasks import TaskSets, plan_more, plan_step, plan_validation
from lightningrl.types import Outcome, RolloutSpec, Trajectory

__all__ = ["ControlPlane", "Progress", "Trainer"]

logger = logging.getLogger(__name__)

POLL_S = 10.0
FETCH = 64
"""Trajectories per request."""


class ControlPlane(Protocol):
    """What the loop asks of the server; `lightningrl.control.client.ServerClient` is one."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int: ...
    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> Sequence[str]: ...
    async def trajectories(self, rollout_ids: Sequence[str]) -> Sequence[Trajectory]: ...
    async def set_scores(self, scores: Sequence[Score]) -> None: ...
    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None: ...
    async def rollback_steps(self, after: int) -> int: ...
    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int: ...


class Progress(Protocol):
    """Where a person looks on; `lightningrl.training.progress` has two."""

    def phase(self, name: str, done: int, total: int) -> None: ...
    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Rollouts that have ended, been rewarded and, but for validation, been credited."""

    trajectories: list[Trajectory]
    seconds: float
    """Until the last one had ended, rewards left out."""
    seconds_reward: float
    groups: list[CreditedGroup] = field(default_factory=list[CreditedGroup])
    seconds_credit: float = 0.0

    def __add__(self, other: Collected) -> Collected:
        return Collected(
            trajectories=self.trajectories + other.trajectories,
            seconds=self.seconds + other.seconds,
            seconds_reward=self.seconds_reward + other.seconds_reward,
            groups=self.groups + other.groups,
            seconds_credit=self.seconds_credit + other.seconds_credit,
        )


@dataclass(kw_only=True, slots=True)
class Trainer:
    """Owns the loop. Everything it touches is handed in."""

    recipe: Recipe
    tasks: TaskSets
    folder: RunFolder
    control: ControlPlane
    policies: Policies
    scorer: Scorer
    plugins: PluginManager
    progress: Progress
    log: Callable[[int, Mapping[str, float]], None]
    state: LoopState
    """Where an earlier process left off; all zero for a new run."""
    start_workers: Callable[[], Awaitable[None]]
    """Called where rollouts are wanted that the store does not have yet."""
    _started: float = 0.0
    _collecting: dict[int, asyncio.Task[Collected]] = field(default_factory=dict[int, asyncio.Task[Collected]])
    """Rewarded rollouts by step: the current one's, and those that are collected while it is learned."""
    _crediting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A credit assigner is asked by one thread at a time."""
    _warned: str | None = None
    """Why the last step without a signal had none."""
    _warned_of_rewards: bool = False

    async def run(self) -> LoopState:
        """Train to the end of the recipe. Returns where the loop stands; the last state is in a checkpoint.

        Raises LightningError where a step has no rollout to learn from, and at the end where no step taught anything.
        """
        self._started = time.monotonic() - self.state.seconds
        await self.control.rollback_steps(self.state.step)
        if not self.folder.checkpoints():
            await self._validate()
            await self._checkpoint()
        try:
            while not self._is_done():
                await self._step()
                every = self.recipe.validation.every
                if every and (self._is_done() or self.state.step % every == 0):
                    await self._validate()
                if self._is_done() or self.state.step % self.recipe.loop.checkpoint_every == 0:
                    await self._checkpoint()
        finally:
            for task in self._collecting.values():
                task.cancel()
            await asyncio.gather(*self._collecting.values(), return_exceptions=True)
        if self.state.step and self.state.steps_with_signal == 0:
            why = self._warned or "no group of rollouts had a signal"
            raise LightningError(f"nothing was learned in {self.state.step} steps: {why} (run {str(self.folder.path)!r})")
        return self.state

    def _is_done(self) -> bool:
        minutes = self.recipe.loop.minutes
        return self.state.step >= self.recipe.loop.steps or (minutes is not None and self._seconds() > minutes * 60)

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    async def _step(self) -> None:
        step = self.state.step
        began = time.monotonic()
        self._collect_until(step)
        collected = await self._collecting[step]
        trajectories = collected.trajectories
        waited = time.monotonic() - began
        scored = await asyncio.to_thread(self.scorer.build, collected.groups)
        seconds_credit = collected.seconds_credit + time.monotonic() - began - waited
        for group, advantages in zip(scored.groups, scored.advantages, strict=True):
            self.plugins.notify("lightningrl_group_credited", group=group, advantages=advantages)
        self._refuse_all_failed(trajectories)
        self._collect_until(step + self.policies.ahead)
        if step == 0 and (missing := self.scorer.missing_roles(trajectories)):
            logger.warning("step 1: %s", missing)
        if timeouts := self._explain_timeouts(trajectories):
            logger.warning("step %d: %s", step + 1, timeouts)
        self._warn_of_failed_rewards(f"step {step + 1}", trajectories)
        reports = await self.policies.learn(scored.samples)
        if scored.has_signal:
            self._warned = None
        else:
            self._warn_of_silence(scored, has_learned=any(report.tokens for report in reports.values()))
        metrics = {
            **scored.metrics,
            "seconds": time.monotonic() - began,
            "seconds_collect": max(0.0, waited - collected.seconds_reward - collected.seconds_credit),
            "seconds_reward": collected.seconds_reward,
            "seconds_credit": seconds_credit,
            "seconds_learn": sum(report.seconds for report in reports.values()),
            "tokens_per_second": scored.metrics["completion_tokens"] / max(1e-9, collected.seconds),
            **self.policies.describe(reports),
            "hooks_failed": float(self.plugins.take_failures()),
            "minutes": self._seconds() / 60,
        }
        del self._collecting[step]
        await self._finish_step([trajectory.rollout_id for trajectory in trajectories], scored, metrics)

    async def _finish_step(self, ids: Sequence[str], scored: Scored, metrics: Mapping[str, float]) -> None:
        """Into the ledger, and before whoever looks on."""
        step = self.state.step
        await self.control.set_scores(scored.scores)
        await self.control.mark_trained(step + 1, ids, metrics)
        signals = self.state.steps_with_signal
        self.state = LoopState(
            step=step + 1,
            seconds=self._seconds(),
            rollouts=self.state.rollouts + len(ids),
            steps_with_signal=None if signals is None else signals + scored.has_signal,
        )
        self.log(self.state.step, {**metrics, **{f"outcome/{name}": float(count) for name, count in scored.outcomes.items()}})
        self.progress.step(self.state.step, self.recipe.loop.steps, metrics, scored.outcomes)
        report = StepReport(step=self.state.step, metrics=metrics, outcomes=scored.outcomes)
        self.plugins.notify("lightningrl_step_finished", report=report)

    async def _credited(self, collected: Collected) -> Collected:
        """In a thread: this one's loop carries the engine link, too."""
        began = time.monotonic()
        async with self._crediting:
            groups = await asyncio.to_thread(self.scorer.credit, collected.trajectories)
        return replace(collected, groups=groups, seconds_credit=time.monotonic() - began)

    def _warn_of_silence(self, scored: Scored, *, has_learned: bool) -> None:
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

    def _explain_timeouts(self, trajectories: Sequence[Trajectory]) -> str | None:
        sampling, runtime = self.recipe.sampling, self.recipe.runtime
        return explain_timeouts(trajectories, self.policies.call_speed, max_tokens=sampling.max_tokens, timeout_s=runtime.timeout_s)

    async def _validate(self) -> None:
        if not self.tasks.validation or not self.recipe.validation.every:
            return
        specs = plan_validation(self.tasks.validation, self.recipe, self.state.step)
        trajectories = (await self._collect_rewarded("validation", specs)).trajectories
        metrics = describe_rollouts(trajectories)
        outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
        await self.control.set_scores([score_of(trajectory) for trajectory in trajectories])
        if "reward" not in metrics:
            why = self._explain_no_rewards(trajectories)
            logger.warning("validation after step %d has no score: %s", self.state.step, why)
        elif timeouts := self._explain_timeouts(trajectories):
            logger.warning("validation after step %d: %s", self.state.step, timeouts)
        self._warn_of_failed_rewards(f"validation after step {self.state.step}", trajectories)
        names = {f"validation/{name}": value for name, value in metrics.items()}
        self.log(self.state.step, {**names, "minutes": self._seconds() / 60})
        self.progress.validated(self.state.step, metrics, outcomes)

    def _collect_until(self, last: int) -> None:
        """Have the rollouts of all steps from the current to `last` collected."""
        for step in range(self.state.step, min(last, self.recipe.loop.steps - 1) + 1):
            if step not in self._collecting:
                self._collecting[step] = asyncio.create_task(self._rewarded(step), name=f"collect-{step}")

    async def _rewarded(self, step: int) -> Collected:
        """The step's rollouts with their rewards; with dynamic sampling, also those of other tasks in place of groups without signal."""
        collected = await self._credited(await self._collect_rewarded("rollouts", plan_step(self.tasks.train, self.recipe, step), step))
        for number in range(1, self.recipe.loop.dynamic_sampling + 1):
            missing = self.recipe.loop.tasks_per_step - sum(one.has_signal for one in collected.groups)
            if not missing or all(trajectory.reward is None for trajectory in collected.trajectories):
                break
            more = plan_more(self.tasks.train, self.recipe, step, number, missing)
            collected += await self._credited(await self._collect_rewarded("rollouts", more, step, is_whole=False))
        return collected

    async def _collect_rewarded(
        self, phase: str, specs: Sequence[RolloutSpec], step: int | None = None, *, is_whole: bool = True
    ) -> Collected:
        began = time.monotonic()
        found = await self._collect(phase, specs, step, is_whole=is_whole)
        ended = time.monotonic()
        try:
            rewarded = await self.scorer.reward(found, self.control.set_scores)
        except RewardError as error:
            where = f"validation after step {self.state.step}" if step is None else f"step {step + 1}"
            raise RewardError(f"{where}: {error}; {self._resume_remedy()}") from None
        return Collected(trajectories=rewarded, seconds=ended - began, seconds_reward=time.monotonic() - ended)

    async def _collect(self, phase: str, specs: Sequence[RolloutSpec], step: int | None, *, is_whole: bool) -> list[Trajectory]:
        """Order the rollouts and fetch them as they finish, in the order of `specs`.

        Where all of a step (`is_whole`) failed under an earlier process, it ended for that, and the cause has been mended
        since: they are run again.
        """
        ids = [spec.id for spec in specs]
        is_new = bool(await self.control.create_rollouts(specs))
        is_replay = not is_new and len(await self.control.wait(ids, 0.0)) == len(ids)
        found = await self._fetch(phase, ids, step)
        if is_whole and is_replay and not any(self.recipe.outcomes.is_trained(trajectory.outcome) for trajectory in found):
            logger.warning("%s; that was before this start, so they are run again", explain_failures(found))
            await self.control.retry(ids, self.recipe.runtime.timeout_s)
            found = await self._fetch(phase, ids, step)
        return found

    async def _fetch(self, phase: str, ids: Sequence[str], step: int | None) -> list[Trajectory]:
        """What is collected ahead shows no progress."""
        waiting = set(ids)
        found: dict[str, Trajectory] = {}
        self._show(phase, 0, len(ids), step)
        if len(await self.control.wait(sorted(waiting), 0.0)) < len(waiting):
            await self.start_workers()
        while waiting:
            wanted = min(len(waiting), FETCH)
            finished = list(await self.control.wait(sorted(waiting), POLL_S, wanted))
            for start in range(0, len(finished), FETCH):
                for trajectory in await self.control.trajectories(finished[start : start + FETCH]):
                    found[trajectory.rollout_id] = trajectory
            waiting.difference_update(finished)
            self._show(phase, len(found), len(ids), step)
        return [found[rollout_id] for rollout_id in ids]

    def _show(self, phase: str, done: int, total: int, step: int | None) -> None:
        if step is None or step == self.state.step:
            self.progress.phase(phase, done, total)

    async def _checkpoint(self) -> None:
        """In a thread: the engine link goes on, but no learning. A stop waits until it is written; backends are closed then."""
        writing = asyncio.create_task(asyncio.to_thread(self._write_checkpoint))
        try:
            await asyncio.shield(writing)
        finally:
            await asyncio.wait({writing})

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
            why = self._explain_no_rewards(trajectories)
            raise LightningError(f"step {self.state.step + 1}: {why}; {self._resume_remedy()}")

    def _resume_remedy(self) -> str:
        return f"then go on with `lightningrl train --resume --run {self.folder.path}`"

    def _explain_no_rewards(self, trajectories: Sequence[Trajectory]) -> str:
        if failed := [trajectory for trajectory in trajectories if trajectory.unrewarded is not None]:
            return f"no rollout of {len(trajectories)} has a reward; {explain_failed_rewards(failed)}; mend that"
        if any(trajectory.outcome is Outcome.SUCCEEDED for trajectory in trajectories):
            return f"no rollout of {len(trajectories)} has a reward; check that the rewards return numbers"
        return f"{explain_failures(trajectories)}; {self._explain_timeouts(trajectories) or 'mend the agent'}"
