"""Recorded rollouts credited anew, by another assigner, judge or rewards; nothing is trained.

each step of the ledger ─► its trajectories ─► Evaluator: rewards, evidence ─► Scorer: credit ─► beside the store's
                                              └─ values of the same digest are taken as they are: nobody is asked twice

rescore: the run's recipe with a new reward ─► recredit ─► each rollout before and after ─► Rescore
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.advantages import FloatArray, mean
from lightningrl.errors import ConfigError, LightningError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, Score, StepRecord
from lightningrl.types import Array, RolloutMode, Trajectory
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.trained_calls import trained_calls_of
from lightningrl_credit.xray import Agreement, agree
from lightningrl_runs.dialogue import answer_in, ask_as_agent
from lightningrl_runs.origin import RunOrigin, read_import
from lightningrl_runs.reader import StoredRun, open_run
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store
from lightningrl_training.build import build_credit

__all__ = [
    "Recredit",
    "Rescore",
    "Rewards",
    "check_steps",
    "find_measured",
    "read_measured",
    "read_rollouts",
    "recredit",
    "rescore",
]


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
_AT_ONCE: Final = 64
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


BINS: Final = 10
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of all rollouts together."""

    rewarded: int
    """Rollouts that have a reward."""
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    """Rollouts in each bin of `Rescore.edges`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoredRollout:
    """A rollout whose reward or credit would have been another."""

    rollout_id: str
    task_id: str
    step: int
    before: float | None
    after: float | None
    flips: bool
    """True where it was above its group's mean and would be below, or the other way round."""
    failed: str | None
    """The reason, where a reward failed: it would have the lowest, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescore:
    """The changes that another reward would have made."""

    rollouts: int
    edges: tuple[float, ...]
    """Edges of the histograms' bins."""
    before: Rewards
    after: Rewards
    changed: tuple[RescoredRollout, ...]
    """Rollouts whose reward would have been another: first those that flip, then by size of the change."""
    groups: int
    gained: tuple[str, ...]
    """Groups that taught nothing and would have."""
    lost: tuple[str, ...]
    """Groups that taught and would not have."""
    credit: Agreement
    """Agreement of each call's credit, before and after."""
    failures: int
    """Rollouts on which a reward failed."""
    failure: str | None
    """The first of these failures: which reward, and why."""


async def rescore(
    folder: Path,
    *,
    reward: Any,
    name: str | None,
    settings: Mapping[str, Any] | None,
    steps: Collection[int] | None,
    write: bool = False,
) -> Rescore:
    """Try `reward` in place of the recipe's reward `name` (None = its only one), with its weight; `settings` by dotted
    key. `write`: an imported run keeps the rewards. Raises ConfigError where no reward is given, and whatever building
    and calling the reward raises."""
    recipe = RunOrigin.read(folder).recipe
    chosen: dict[str, Any] = {}
    if reward is not None:
        names = list(recipe.rewards)
        if name is None and len(names) > 1:
            raise ConfigError(
                f"run {str(folder)!r} has the rewards {', '.join(map(repr, names))}; say with --name which is meant"
            )
        if name is not None and name not in names:
            raise ConfigError(f"run {str(folder)!r} has no reward {name!r}; choose one of: {', '.join(names)}")
        key = json.dumps(name or names[0], ensure_ascii=False)  # it may have a dot
        chosen = {f"rewards.{key}.use": reward, f"rewards.{key}.options": {}}
    elif name is not None or not settings:
        raise ConfigError("no reward is given to try; give one: --reward file.py:new")
    changed = with_settings(recipe, {**chosen, **(settings or {})})
    if trained_calls_of(recipe):
        if write:
            raise ConfigError(f"run {str(folder)!r} trained with its rewards and keeps them; leave out --write")
        rollouts = await recredit(folder, changed, steps)
    else:
        rollouts = await _reward_untrained(folder, changed, steps)
        if write:
            await _keep_rewards(folder, [rollout.after for rollout in rollouts])
    if not rollouts:
        raise LightningError(f"run {str(folder)!r} has no trained rollouts; there is none to try a reward on")
    return summarize(rollouts)


async def _reward_untrained(folder: Path, recipe: Recipe, steps: Collection[int] | None) -> list[Recredit]:
    """Reward the rollouts of a run that trains no policy, as an imported one: no call of it has credit."""
    if steps:
        raise ConfigError(f"run {str(folder)!r} trained no step, so there is none to choose; leave out --steps")
    policy = recipe.policy.model_copy(update={"trainable": True})
    evaluator, _ = build_credit(recipe.model_copy(update={"policy": policy}), load_plugins())
    rewarded: list[Recredit] = []
    is_import = read_import(folder) is not None
    async with open_run(folder) as run:
        names = [record.spec.id for record in await run.list_rollouts(RolloutFilter(limit=ALL))][::-1]
        for start in range(0, len(names), _AT_ONCE):
            rollouts = await run.look.trajectories(names[start : start + _AT_ONCE])
            seen = [_as_agent_answered(rollout) for rollout in rollouts] if is_import else rollouts
            for before, after in zip(rollouts, await evaluator.evaluate(seen), strict=True):
                credit = (None,) * len(before.transitions)
                rewarded.append(
                    Recredit(step=0, before=before, after=after, advantages_before=credit, advantages=credit)
                )
    return rewarded


def _as_agent_answered(rollout: Trajectory) -> Trajectory:
    """Return an imported rollout as a reward of the agent's own function reads it."""
    return replace(rollout, task=ask_as_agent(rollout.task), output=answer_in(rollout.output))


async def _keep_rewards(folder: Path, rollouts: Sequence[Trajectory]) -> None:
    store = await SqlStore.open(find_store(folder))
    try:
        scores = [
            Score(
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                rewards=rollout.rewards,
                reward=rollout.reward,
                unrewarded=rollout.unrewarded,
            )
            for rollout in rollouts
        ]
        await store.set_scores(scores)
    finally:
        await store.close()


def summarize(rollouts: Sequence[Recredit]) -> Rescore:
    """Summarize the changes of rollouts that were credited anew."""
    by_group: dict[tuple[int, str], list[Recredit]] = {}
    for rollout in rollouts:
        by_group.setdefault((rollout.step, rollout.before.group_id), []).append(rollout)
    changed: list[RescoredRollout] = []
    gained, lost = list[str](), list[str]()
    for (_, name), group in by_group.items():
        did, would = _teaches(group, "advantages_before"), _teaches(group, "advantages")
        gained += [name] if would and not did else []
        lost += [name] if did and not would else []
        means = [_mean(_rewards(group, when)) for when in ("before", "after")]
        changed += [_rescored(each, *means) for each in group if each.before.reward != each.after.reward]
    before, after = (_rewards(rollouts, when) for when in ("before", "after"))
    edges = np.histogram_bin_edges([*before, *after] or [0.0], bins=BINS)
    changed.sort(key=lambda rollout: (not rollout.flips, -abs((rollout.after or 0.0) - (rollout.before or 0.0))))
    return Rescore(
        rollouts=len(rollouts),
        edges=tuple(edges.tolist()),
        before=_describe(before, edges),
        after=_describe(after, edges),
        changed=tuple(changed),
        groups=len(by_group),
        gained=tuple(gained),
        lost=tuple(lost),
        credit=agree(_by_call(rollouts, "advantages_before"), _by_call(rollouts, "advantages")),
        failures=sum(rollout.after.unrewarded is not None for rollout in rollouts),
        failure=next((rollout.after.unrewarded for rollout in rollouts if rollout.after.unrewarded is not None), None),
    )


def _rescored(rollout: Recredit, before: float | None, after: float | None) -> RescoredRollout:
    return RescoredRollout(
        rollout_id=rollout.after.rollout_id,
        task_id=rollout.after.task.id,
        step=rollout.step,
        before=rollout.before.reward,
        after=rollout.after.reward,
        flips=_side(rollout.before.reward, before) * _side(rollout.after.reward, after) < 0,
        failed=rollout.after.unrewarded,
    )


def _side(reward: float | None, middle: float | None) -> int:
    """1 above, -1 below, 0 at it."""
    away = 0.0 if reward is None or middle is None else reward - middle
    return 0 if abs(away) <= _ROUNDING else 1 if away > 0 else -1


def _teaches(group: Sequence[Recredit], which: str) -> bool:
    return any(values is not None and bool(values.any()) for rollout in group for values in getattr(rollout, which))


def _by_call(rollouts: Sequence[Recredit], which: str) -> list[float]:
    calls: list[Array | None] = [values for rollout in rollouts for values in getattr(rollout, which)]
    return [float("nan") if values is None else float(values.mean()) for values in calls]


def _rewards(rollouts: Sequence[Recredit], when: str) -> list[float]:
    return [value for rollout in rollouts if (value := getattr(rollout, when).reward) is not None]


def _mean(rewards: Sequence[float]) -> float | None:
    return mean(rewards) if rewards else None


def _describe(rewards: Sequence[float], edges: FloatArray) -> Rewards:
    return Rewards(
        rewarded=len(rewards),
        mean=_mean(rewards),
        std=float(np.std(rewards)) if rewards else None,
        histogram=tuple(np.histogram(rewards, edges)[0].tolist()),
    )
