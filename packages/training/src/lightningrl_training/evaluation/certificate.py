"""A certificate of a finished run: was each token trained as sampled, and as probable to the trainer?

store ─► find_places ─► recompute ─► judge_gaps, judge_steps (recomputation.py) ────────┐
steps ─► find_trained: every trained token was sampled, after the same tokens, once ────┴─► Certificate
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightningrl.advantages import teaching_rows
from lightningrl.errors import RunFolderError
from lightningrl.recipe import Recipe
from lightningrl.records import StepRecord
from lightningrl.types import Sample, Trajectory, TrajectoryGroup
from lightningrl_credit.samples import build_samples
from lightningrl_credit.trained_calls import only_trained
from lightningrl_training.build import trained_calls
from lightningrl_training.checkpoints import find_checkpoint
from lightningrl_training.evaluation import recomputation
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import StoredRun, open_run

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A certificate of a run's tokens."""

    checks: tuple[recomputation.Check, ...]
    gaps: Mapping[str, tuple[recomputation.Gap, ...]]
    """Gaps by policy: of all tokens, then by version, by number of the call, by position in the row."""
    tokens: int
    """Sampled tokens of all rollouts."""
    recomputed: int
    """Sampled tokens whose weights are at hand."""
    trained: int
    """Tokens in rows that teach, over all steps."""
    trained_unique: int
    """Different tokens among `trained`."""
    trained_unsampled: int
    """Tokens among `trained` that were not sampled, or were after other tokens."""
    trained_cut: int
    """Tokens among `trained` that were sampled from a part of the softmax: by top-p, top-k or a grammar."""

    @property
    def is_passed(self) -> bool:
        return all(check.is_passed is not False for check in self.checks)


async def certify(folder: Path) -> Certificate:
    """Certify a run that has a checkpoint and recorded calls. Nothing is written. Raises LightningError."""
    origin = RunOrigin.read(folder)
    find_checkpoint(folder)
    async with open_run(folder) as run:
        places, tokens = await recomputation.find_places(run)
        if not tokens:
            raise RunFolderError(
                f"run {str(folder)!r} has recorded no sampled token; look why: lightningrl rollouts list --run "
                f"{shlex.quote(str(folder))}"
            )
        steps, trained = await run.look.steps(), await find_trained(run, origin.recipe)
        gaps = await recomputation.recompute(run, folder, origin, places)
    checks = [
        *recomputation.judge_gaps(gaps, origin.recipe),
        *recomputation.judge_steps(steps, origin.recipe, places),
        *trained.checks(steps),
    ]
    return Certificate(
        checks=tuple(checks),
        gaps=gaps,
        tokens=tokens,
        recomputed=sum(parts[0].tokens for parts in gaps.values() if parts),
        trained=trained.tokens,
        trained_unique=trained.unique,
        trained_unsampled=trained.unsampled,
        trained_cut=trained.cut,
    )


@dataclass(kw_only=True, slots=True)
class TrainedTokens:
    """Counts of what the steps of a run trained."""

    tokens: int = 0
    unsampled: int = 0
    cut: int = 0
    """Tokens that were sampled from a part of the softmax."""
    seen: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Calls that were trained."""
    unique: int = 0
    by_step: Counter[int] = field(default_factory=Counter[int])

    def add(self, step: int, row: Sample, trajectory: Trajectory) -> None:
        for number in np.unique(row.calls[row.mask]).tolist():
            places = np.flatnonzero(row.calls == number)
            call = trajectory.transitions[number]
            start = len(call.prompt_ids)
            self.tokens += len(places)
            self.by_step[step] += len(places)
            self.cut += len(places) if call.sampling.is_cut else 0
            if (row.rollout_id, number) not in self.seen:
                self.seen.add((row.rollout_id, number))
                self.unique += len(places)
            is_as_sampled = (
                recomputation.is_sampled(call)
                and np.array_equal(places, start + np.flatnonzero(call.chosen))
                and np.array_equal(row.token_ids[start : start + len(call.completion_ids)], call.completion_ids)
                and np.array_equal(row.token_ids[:start], call.prompt_ids)
                and np.array_equal(row.logprobs[places], call.logprobs[call.chosen])
                and bool((row.versions[places] == call.policy_version).all())
            )
            self.unsampled += 0 if is_as_sampled else len(places)

    def checks(self, steps: Sequence[StepRecord]) -> Iterator[recomputation.Check]:
        """Yield the checks. Where nothing was trained, they are undecided (`is_passed` is None)."""
        has_any = self.tokens > 0
        evidence = f"{self.tokens} trained tokens, {self.unsampled} of them not sampled so, after the same tokens"
        is_passed = self.unsampled == 0 if has_any else None
        yield recomputation.Check(name="trained tokens were sampled", is_passed=is_passed, evidence=evidence)
        ratio = self.tokens / max(1, self.unique)
        evidence = f"{self.tokens} trained of {self.unique} different tokens: each {ratio:.2f} times"
        is_passed = self.tokens == self.unique if has_any else None
        yield recomputation.Check(name="each is trained once", is_passed=is_passed, evidence=evidence)
        forgotten = [step.step for step in steps if step.is_forgotten]
        counted = {step.step: step.metrics.get("trained_tokens", 0.0) for step in steps if not step.is_forgotten}
        differ = [step for step, tokens in counted.items() if tokens != self.by_step[step]]
        evidence = "rows made from the record have as many tokens as the steps counted"
        if differ:
            step = differ[0]
            evidence = f"step {step} counted {counted[step]:.0f} tokens, and the record has {self.by_step[step]}"
        elif forgotten:
            evidence += (
                f"; nothing is said of steps {forgotten[0]} to {forgotten[-1]}, whose rollouts were forgotten "
                "(loop.keep_rollouts)"
            )
        yield recomputation.Check(name="the record is what was trained", is_passed=not differ, evidence=evidence)


async def find_trained(run: StoredRun, recipe: Recipe) -> TrainedTokens:
    """Make the rows that teach again, from trajectories and advantages as the store has them."""
    trained, calls = TrainedTokens(), trained_calls(recipe)
    for step in await run.look.steps():
        read = recomputation.read_trajectories(run, step.rollout_ids)
        trajectories = {trajectory.rollout_id: trajectory async for trajectory in read}
        scores = {score.rollout_id: score.advantages for score in await run.look.scores(step.rollout_ids)}
        chosen = [only_trained(trajectory, calls) for trajectory in trajectories.values()]
        group = TrajectoryGroup(id=f"step {step.step}", trajectories=tuple(chosen))
        advantages = tuple(
            tuple(scores.get(trajectory.rollout_id, {}).get(call.id) for call in trajectory.transitions)
            for trajectory in chosen
        )
        rows = build_samples([group], [advantages], rows=recipe.samples.rows, aggregation="token_mean")
        for row in teaching_rows(rows):
            trained.add(step.step, row, trajectories[row.rollout_id])
    return trained
