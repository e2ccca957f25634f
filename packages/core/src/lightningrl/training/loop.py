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
from dataclasses import dataclass, field
from typing import Protocol

from lightningrl.config import Recipe
from lightningrl.errors import LightningError
from lightningrl.plugins import PluginManager
from lightningrl.protocols import StepReport
from lightningrl.store.protocol import Score
from lightningrl.training.policies import Policies
from lightningrl.training.run_folder import LoopState, RunFolder
from lightningrl.training.scoring import Scored, Scorer, describe_rollouts
from lightningrl.training.tasks import TaskSets, plan_more, plan_step, plan_validation
from lightningrl.types import Outcome, RolloutSpec, Trajectory

__all__ = ["ControlPlane", "Progress", "Trainer"]

logger = logging.getLogger(__name__)

POLL_S = 10.0
FETCH = 64
"""Trajectories per request."""


class ControlPlane(Protocol):
    """What the loop asks of the server; `lightningrl.server.client.ServerClient` is one."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int: ...
    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> Sequence[str]: ...
    async def trajectories(self, rollout_ids: Sequence[str]) -> Sequence[Trajectory]: ...
    async def set_scores(self, scores: Sequence[Score]) -> None: ...
    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None: ...
    async def rollback_steps(self, after: int) -> int: ...


class Progress(Protocol):
    """Where a person looks on; `lightningrl.training.progress` has two."""

    def phase(self, name: str, done: int, total: int) -> None: ...
    def step(self, step: int, steps: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...
    def validated(self, step: int, metrics: Mapping[str, float], outcomes: Mapping[str, int]) -> None: ...


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
    _collecting: dict[int, asyncio.Task[list[Trajectory]]] = field(default_factory=dict[int, asyncio.Task[list[Trajectory]]])
    """Rewarded rollouts by step: the current one's, and those that are collected while it is learned."""

    async def run(self) -> LoopState:
        """Train to the end of the recipe. Returns where the loop stands; the last state is in a checkpoint."""
        self._started = time.monotonic() - self.state.seconds
        await self.control.rollback_steps(self.state.step)
        if not self.folder.checkpoints():
            await self._validate()
            self._checkpoint()
        try:
            while not self._is_done():
                await self._step()
                every = self.recipe.validation.every
                if self._is_done() or (every and self.state.step % every == 0):
                    await self._validate()
                if self._is_done() or self.state.step % self.recipe.loop.checkpoint_every == 0:
                    self._checkpoint()
        finally:
            for task in self._collecting.values():
                task.cancel()
            await asyncio.gather(*self._collecting.values(), return_exceptions=True)
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
        trajectories = await self._collecting[step]
        collected = time.monotonic()
        scored = self.scorer.credit(trajectories)
        credited = time.monotonic()
        self._refuse_all_failed(scored, trajectories)
        self._collect_until(step + self.policies.ahead)
        if step == 0 and (missing := self.scorer.missing_roles(trajectories)):
            logger.warning("step 1: %s", missing)
        if not scored.samples:
            logger.warning("step %d: no row carries a signal; weights stay as they are", step + 1)
        reports = await self.policies.learn(scored.samples)
        ids = [trajectory.rollout_id for trajectory in trajectories]
        seconds = {
            "seconds": time.monotonic() - began,
            "seconds_collect": collected - began,
            "seconds_credit": credited - collected,
            "seconds_learn": sum(report.seconds for report in reports.values()),
            "tokens_per_second": scored.metrics["completion_tokens"] / max(1e-9, collected - began),
        }
        metrics = {**scored.metrics, **seconds, **self.policies.describe(reports), "minutes": self._seconds() / 60}
        await self.control.set_scores(scored.scores)
        await self.control.mark_trained(step + 1, ids, metrics)
        del self._collecting[step]
        self.state = LoopState(step=step + 1, seconds=self._seconds(), rollouts=self.state.rollouts + len(ids))
        self.log(self.state.step, {**metrics, **{f"outcome/{name}": float(count) for name, count in scored.outcomes.items()}})
        self.progress.step(self.state.step, self.recipe.loop.steps, metrics, scored.outcomes)
        self.plugins.hook.lightningrl_step_finished(report=StepReport(step=self.state.step, metrics=metrics, outcomes=scored.outcomes))

    async def _validate(self) -> None:
        if not self.tasks.validation:
            return
        specs = plan_validation(self.tasks.validation, self.recipe, self.state.step)
        trajectories = await self.scorer.reward(await self._collect("validation", specs))
        metrics = describe_rollouts(trajectories)
        outcomes = Counter(trajectory.outcome.value for trajectory in trajectories)
        await self.control.set_scores(
            [Score(rollout_id=one.rollout_id, attempt=one.attempt, rewards=one.rewards, reward=one.reward) for one in trajectories]
        )
        names = {f"validation/{name}": value for name, value in metrics.items()}
        self.log(self.state.step, {**names, "minutes": self._seconds() / 60})
        self.progress.validated(self.state.step, metrics, outcomes)

    def _collect_until(self, last: int) -> None:
        """Have the rollouts of all steps from the current to `last` collected."""
        for step in range(self.state.step, min(last, self.recipe.loop.steps - 1) + 1):
            if step not in self._collecting:
                self._collecting[step] = asyncio.create_task(self._rewarded(step), name=f"collect-{step}")

    async def _rewarded(self, step: int) -> list[Trajectory]:
        """The step's rollouts with their rewards; with dynamic sampling, also those of other tasks in place of groups without signal."""
        trajectories = await self._collect_rewarded(plan_step(self.tasks.train, self.recipe, step), step)
        for number in range(1, self.recipe.loop.dynamic_sampling + 1):
            missing = self.recipe.loop.tasks_per_step - self.scorer.count_groups_with_signal(trajectories)
            if not missing or all(one.reward is None for one in trajectories):
                break
            trajectories += await self._collect_rewarded(plan_more(self.tasks.train, self.recipe, step, number, missing), step)
        return trajectories

    async def _collect_rewarded(self, specs: Sequence[RolloutSpec], step: int) -> list[Trajectory]:
        return await self.scorer.reward(await self._collect("rollouts", specs, step))

    async def _collect(self, phase: str, specs: Sequence[RolloutSpec], step: int | None = None) -> list[Trajectory]:
        """Order the rollouts and fetch them as they finish, in the order of `specs`. What is collected ahead shows no progress."""
        await self.control.create_rollouts(specs)
        waiting = {spec.id for spec in specs}
        found: dict[str, Trajectory] = {}
        self._show(phase, 0, len(specs), step)
        if len(await self.control.wait(sorted(waiting), 0.0)) < len(waiting):
            await self.start_workers()
        while waiting:
            wanted = min(len(waiting), FETCH)
            finished = list(await self.control.wait(sorted(waiting), POLL_S, wanted))
            for start in range(0, len(finished), FETCH):
                for trajectory in await self.control.trajectories(finished[start : start + FETCH]):
                    found[trajectory.rollout_id] = trajectory
            waiting.difference_update(finished)
            self._show(phase, len(found), len(specs), step)
        return [found[spec.id] for spec in specs]

    def _show(self, phase: str, done: int, total: int, step: int | None) -> None:
        if step is None or step == self.state.step:
            self.progress.phase(phase, done, total)

    def _checkpoint(self) -> None:
        scratch = self.folder.new_checkpoint(self.state.step)
        self.policies.save(scratch / "policies")
        self.folder.commit_checkpoint(scratch, self.state, self.recipe.loop.keep_checkpoints)

    def _refuse_all_failed(self, scored: Scored, trajectories: Sequence[Trajectory]) -> None:
        """A step in which nothing succeeded is a defect to mend, not data to train on."""
        if any(trajectory.reward is not None for trajectory in trajectories):
            return
        worst = next((one for one in trajectories if one.outcome is not Outcome.SUCCEEDED), None)
        if worst is None:
            raise LightningError(
                f"step {self.state.step + 1}: no rollout of {len(trajectories)} has a reward; check that the rewards return numbers"
            )
        outcomes = ", ".join(f"{count} {name}" for name, count in scored.outcomes.items())
        message = " ".join((worst.error or "no message").split())[:400]
        raise LightningError(
            f"step {self.state.step + 1}: every rollout failed ({outcomes}); first, {worst.rollout_id!r}: {message}; "
            f"mend the agent and go on with `lightningrl train --resume --run {self.folder.path}`"
        )
