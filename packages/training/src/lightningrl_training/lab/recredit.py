"""Recorded rollouts credited anew, by another assigner, judge or rewards; nothing is trained, nothing is written.

each step of the ledger ─► its trajectories ─► Evaluator: rewards, evidence ─► Scorer: credit ─► beside what the store
has
                                              └─ values of the same digest are taken as they are: nobody is asked twice
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, StepRecord
from lightningrl.types import Array, RolloutMode, Trajectory
from lightningrl_training.build import build_credit
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import StoredRun, open_run

__all__ = ["Recredit", "check_steps", "find_measured", "read_measured", "read_rollouts", "recredit"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recredit:
    """A rollout with the credit that it had, and the credit that it would have."""

    step: int
    """The step that trained it."""
    before: Trajectory
    """The rollout with the rewards that it had."""
    after: Trajectory
    """The rollout with the rewards that it would have."""
    advantages_before: tuple[Array | None, ...]
    """`[call][token]`; None = nobody scored the call."""
    advantages: tuple[Array | None, ...]

    @property
    def change(self) -> float:
        """The largest change of a token's advantage; a call that nobody scored counts as 0."""
        pairs = zip(self.advantages_before, self.advantages, strict=True)
        return max((_largest(before, after) for before, after in pairs), default=0.0)


async def recredit(folder: Path, recipe: Recipe, steps: Collection[int] | None = None) -> list[Recredit]:
    """Credit the rollouts of trained steps anew; `steps` None = all. An assigner that remembers begins with the first.
    Raises LightningError, also for a step that the run does not have."""
    evaluator, scorer = build_credit(recipe, load_plugins(), RunOrigin.read(folder).models)
    recredited: list[Recredit] = []
    async with open_run(folder) as run:
        records = await run.look.steps()
        check_steps(folder, records, steps or ())
        for step in records:
            if steps is not None and step.step not in steps:
                continue
            rollouts, branches = await read_rollouts(run, step.rollout_ids)
            recorded = {rollout.rollout_id: rollout for rollout in rollouts}
            scores = {score.rollout_id: score for score in await run.look.scores(tuple(recorded))}
            credited = scorer.credit(await evaluator.evaluate(rollouts), await evaluator.evaluate(branches))
            for group, credit in zip(credited, scorer.finish(credited)[0], strict=True):
                # those of branches follow
                for after, advantages in zip(group.group.trajectories, credit, strict=False):
                    earlier = scores[after.rollout_id].advantages if after.rollout_id in scores else {}
                    recredited.append(
                        Recredit(
                            step=step.step,
                            before=recorded[after.rollout_id],
                            after=after,
                            advantages_before=tuple(earlier.get(call.id) for call in after.transitions),
                            advantages=advantages,
                        )
                    )
    return recredited


def _largest(before: Array | None, after: Array | None) -> float:
    difference = (0.0 if after is None else after) - (0.0 if before is None else before)
    return float(np.abs(difference).max(initial=0.0))


ALL = 1_000_000
_MOST_SPANS = 5


def check_steps(folder: Path, records: Sequence[StepRecord], steps: Collection[int]) -> None:
    """Raises ConfigError naming those of `steps` that the run has no rollouts of: not trained, or forgotten."""
    there = [record.step for record in records if record.rollout_ids]
    if missing := sorted(set(steps) - set(there)):
        offered = f"it has those of {_spans(there)}" if there else "it has none"
        raise ConfigError(f"run {str(folder)!r} has no trained rollouts of {_spans(missing)}; {offered}")


def _spans(steps: Sequence[int]) -> str:
    """`step 3`, `steps 1 to 4, 9`; of steps in order."""
    spans = [[step for _, step in span] for _, span in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    shown = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    listed = f"{', '.join(shown[:_MOST_SPANS])}{' …' if len(shown) > _MOST_SPANS else ''}"
    return f"step{'s' if len(steps) > 1 else ''} {listed}"


async def read_rollouts(run: StoredRun, rollout_ids: Sequence[str]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Rollouts of one step, and the branches that left them, in the order in which they were ordered."""
    read = await run.look.trajectories(rollout_ids)
    rollouts = [rollout for rollout in read if rollout.branch is None]
    place = {rollout.rollout_id: number for number, rollout in enumerate(rollouts)}
    names = {rollout.rollout_id for rollout in read}
    left: list[str] = []
    for step in sorted({rollout.step for rollout in rollouts}):
        for record in await run.list_rollouts(RolloutFilter(mode=RolloutMode.BRANCH, step=step + 1, limit=ALL)):
            branch, name = record.spec.branch, record.spec.id
            if branch is not None and branch.rollout_id in place and record.outcome is not None and name not in names:
                left.append(name)
    branches: dict[tuple[int, int, str], Trajectory] = {}
    for rollout in (*read, *await run.look.trajectories(left)):
        if (branch := rollout.branch) is not None and branch.rollout_id in place:
            branches[place[branch.rollout_id], branch.calls, rollout.rollout_id] = rollout
    return rollouts, [branches[key] for key in sorted(branches)]


def find_measured(folder: Path, rollout_ids: Collection[str]) -> dict[str, Path]:
    """Folders where `lightningrl branch` left branches last, by rollout."""
    stores = sorted(folder.glob("branches/step-*/*/store.sqlite"))
    return {path.parent.name: path.parent for path in stores if path.parent.name in rollout_ids}


async def read_measured(folder: Path) -> list[Trajectory]:
    """The branches in a folder that have a reward."""
    async with open_run(folder) as run:
        records = await run.list_rollouts(RolloutFilter(mode=RolloutMode.BRANCH, limit=ALL))
        return list(await run.look.trajectories([record.spec.id for record in records if record.reward is not None]))
