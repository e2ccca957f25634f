"""Branches a recorded rollout by hand: the worth of each of its states to the policy as it is now.

<run>/branches/step-000040/<rollout>/store.sqlite    the recorded rollout, copied, and its branches

The agent runs anew, its first calls are answered as they were, and from there the newest weights are sampled. The run's
own store stays as it is. A branch that is there is not run again: more samples add to them, what was killed goes on.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.types import BranchPoint, Outcome, RolloutSpec, Trajectory
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.branches import states
from lightningrl_credit.scoring import score_of
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run
from lightningrl_runs.segments import SegmentKind
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import fetch_ended
from lightningrl_training.run_sync import Show
from lightningrl_training.tasks import plan_branches

if TYPE_CHECKING:
    from lightningrl_training.build import Parts
    from lightningrl_training.serving import RunningServices

__all__ = ["BranchedRollout", "BranchedState", "branch_rollout"]

COPY_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BranchedState:
    """A state, and the branches that left there."""

    calls: int
    """Calls made before the state."""
    branches: tuple[Trajectory, ...]

    @property
    def returns(self) -> list[float]:
        """Rewards of the branches that were rewarded."""
        return [branch.reward for branch in self.branches if branch.reward is not None]

    @property
    def value(self) -> float | None:
        """V̂, their mean; None = there are none."""
        return statistics.fmean(self.returns) if self.returns else None

    @property
    def error(self) -> float | None:
        """The standard error of `value`; None with fewer than two."""
        return statistics.stdev(self.returns) / math.sqrt(len(self.returns)) if len(self.returns) > 1 else None

    @property
    def outcomes(self) -> Mapping[Outcome, int]:
        return Counter(branch.outcome for branch in self.branches)

    @property
    def divergences(self) -> list[str]:
        """Why branches did not reach it, each reason once."""
        return list(dict.fromkeys(branch.error or "" for branch in self.branches if branch.outcome is Outcome.DIVERGED))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BranchedRollout:
    """A rollout and the worth of its states."""

    recorded: Trajectory
    states: tuple[BranchedState, ...]
    """In order."""
    step: int
    """Training steps that the sampled weights have."""
    folder: Path
    """A run folder with the branches, for `lightningrl rollouts --run`."""
    answers: tuple[str, ...]
    """The answers of its calls, less markup."""


async def branch_rollout(
    folder: Path, rollout_id: str, *, at: Sequence[int] | None, samples: int, settings: Mapping[str, Any], show: Show
) -> BranchedRollout:
    """Branch a run's rollout after so many calls (`at`; None = everywhere), `samples` times at each. The agent's
    answers are rewarded as in training. Raises LightningError."""
    from lightningrl_training.serving import make_place, serve_recipe

    if samples < 1:
        raise ConfigError(f"samples is {samples}; branch once or more at each state")
    spec, recorded, calls, answers = await _read(folder, rollout_id)
    points = _points(recorded, at)
    origin = RunOrigin.read(folder)
    recipe = with_settings(origin.recipe, {"store_url": None, "runtime.servers": 1, **settings})
    saved = next(reversed(checkpoints(folder)), None)
    step = saved.state.step if saved else 0
    own = folder / "branches" / f"step-{step:06d}" / rollout_id
    show("checking the recipe", 0, 0)
    parts = build_checked(recipe, load_plugins())
    source = await _copy(make_place(own, parts, recipe), spec, recorded, calls)
    weights = saved.folder if saved else None
    async with serve_recipe(recipe, parts, own, weights, starting=lambda what: show(what, 0, 0)) as (recipe, served):
        first = BranchPoint(rollout_id=rollout_id, attempt=source.attempt, calls=0)
        specs = {calls: plan_branches(recipe, source, replace(first, calls=calls), samples) for calls in points}
        every = [spec for group in specs.values() for spec in group]
        await served.client.create_rollouts(every)
        await served.start_workers()
        branches = await _collect(served, parts, [spec.id for spec in every], show)
    states = tuple(
        BranchedState(calls=calls, branches=tuple(branches[spec.id] for spec in group))
        for calls, group in specs.items()
    )
    return BranchedRollout(recorded=recorded, states=states, step=step, folder=own, answers=answers)


async def _read(folder: Path, rollout_id: str) -> tuple[RolloutSpec, Trajectory, Sequence[CallRecord], tuple[str, ...]]:
    async with open_run(folder) as run:
        spec = (await run.look.rollout(rollout_id)).spec
        if spec.branch is not None:
            source = f"{spec.branch.rollout_id!r}"
            raise ConfigError(
                f"rollout {rollout_id!r} is a branch of {source}, and a branch is not branched again; branch {source}"
            )
        (recorded,) = await run.look.trajectories([rollout_id])
        trace = await run.trace(rollout_id)
        answers = tuple(
            "".join(part.text for part in call.segments if part.is_sampled and part.kind is not SegmentKind.MARKUP)
            for call in trace.calls
        )
        return spec, recorded, await run.look.calls(rollout_id, recorded.attempt), answers


def _points(recorded: Trajectory, at: Sequence[int] | None) -> list[int]:
    made = len(recorded.transitions)
    if at is None:
        return [0, *states(recorded.transitions)]
    for calls in at:
        if not 0 <= calls <= made:
            raise ConfigError(
                f"rollout {recorded.rollout_id!r} has {made} calls, so it cannot branch after {calls}; choose 0 to "
                f"{made}"
            )
    return sorted(set(at))


async def _copy(url: str, spec: RolloutSpec, recorded: Trajectory, calls: Sequence[CallRecord]) -> Trajectory:
    """Copy the recorded rollout into a store of its own, where it is not there yet."""
    store = await SqlStore.open(url)
    try:
        await store.create_rollouts([spec])
        if (await store.rollout(spec.id)).outcome is None:
            await store.interrupt("the copy was stopped")
            lease = await store.lease("copy", COPY_S)
            assert lease is not None and lease.rollout_id == spec.id
            place = spec.id, lease.attempt
            for call in calls:
                await store.append_call(replace(call, rollout_id=spec.id, attempt=lease.attempt))
            await store.append_tool_calls(*place, [ToolCallRecord(tool_call=tool) for tool in recorded.tool_calls])
            await store.finish_attempt(*place, recorded.outcome, recorded.output, recorded.error, recorded.duration_s)
            await store.set_scores([replace(score_of(recorded), attempt=lease.attempt)])
        return (await store.trajectories([spec.id]))[0]
    finally:
        await store.close()


async def _collect(served: RunningServices, parts: Parts, ids: Sequence[str], show: Show) -> dict[str, Trajectory]:
    """Wait for the branches and reward them. Returns them by id."""
    ended = await fetch_ended(served.client, ids, lambda ended: show("branches", ended, len(ids)))
    rewarded = await parts.evaluator.evaluate(ended, served.client.set_scores)
    await served.client.set_scores([score_of(branch) for branch in rewarded])
    return {branch.rollout_id: branch for branch in rewarded}
