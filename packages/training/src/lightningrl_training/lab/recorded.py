"""Reads the rollouts that were trained, with their branches, from a run's store and folder.

store.sqlite                                     rollouts, and the branches that credit asked for
branches/step-000040/ROLLOUT/store.sqlite        those of `lightningrl branch`
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from lightningrl.errors import ConfigError
from lightningrl.records import RolloutFilter, StepRecord
from lightningrl.types import RolloutMode, Trajectory
from lightningrl_viewer.reading.reader import StoredRun, open_run

__all__ = ["check_steps", "find_measured", "read_measured", "read_rollouts"]

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
