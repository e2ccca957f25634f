"""Recorded rollouts credited anew, by another assigner, judge or rewards; nothing is trained, nothing is written.

each step of the ledger ─► its trajectories ─► Evaluator: rewards, evidence ─► Scorer: credit ─► beside what the store
has
                                              └─ values of the same digest are taken as they are: nobody is asked twice
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Array, Trajectory
from lightningrl_training.build import build_credit
from lightningrl_training.lab.recorded import check_steps, read_rollouts
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import open_run

__all__ = ["Recredit", "recredit"]


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
