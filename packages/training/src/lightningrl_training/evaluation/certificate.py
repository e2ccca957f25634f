"""A certificate of a finished run: was each token trained as sampled, and as probable to the trainer?

store ─► calls by policy and version ─► weights at hand? ─► the learner's own forward ─► Gap to the recorded logprob ─┐
steps ─► kl_rollout, as the steps measured it, where weights are gone ────────────────────────────────────────────────┤
steps ─► their rows made again: every trained token was sampled, after the same tokens, once ──────► Certificate ◄────┘

There are weights of the starting models and of the checkpoints that the run kept.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import teaching_rows
from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.errors import RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, StepRecord
from lightningrl.types import Sample, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.samples import build_samples
from lightningrl_credit.trained_calls import only_trained
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import StoredRun, open_run
from lightningrl_training.build import build_backends, trained_calls
from lightningrl_training.checkpoints import checkpoints, find_checkpoint
from lightningrl_training.policies import load_backend

__all__ = ["Certificate", "Check", "Gap", "certify", "is_sampled", "judge_gaps", "read_trajectories"]

FEWEST: Final = 32
"""Tokens of a part from which its mean is judged by itself."""
FAR: Final = math.log(1.2)
"""Log-ratio beyond which PPO's clip, 0.2, takes a token for one that has been learned already."""
FETCH: Final = 64
"""Trajectories per read."""
AT_ONCE: Final = 256
"""Calls per question to the trainer."""
PAGE: Final = 1000
SMALLEST_KL: Final = 1e-6
"""Rounding of float32 in a sum of small terms."""

Places = dict[tuple[str, int], list[str]]
"""Rollouts with calls that a policy's version answered, by policy and version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of a certificate."""

    name: str
    is_passed: bool | None
    """None = it could not be looked at."""
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """|log p(trainer) - log p(rollout)| of some tokens."""

    part: str
    """Name of the part: `all`, `version 3`, `call 2`, `position 128-255`."""
    tokens: int
    mean: float
    p99: float
    largest: float
    far: float
    """Share of tokens whose ratio PPO would clip before anything is learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A certificate of a run's tokens."""

    checks: tuple[Check, ...]
    gaps: Mapping[str, tuple[Gap, ...]]
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
        places, tokens = await _find_places(run)
        if not tokens:
            raise RunFolderError(
                f"run {str(folder)!r} has recorded no sampled token; look why: lightningrl rollouts list --run "
                f"{shlex.quote(str(folder))}"
            )
        steps = await run.look.steps()
        trained = await _find_trained(run, origin.recipe, steps)
        gaps = await _recompute(run, folder, origin, places)
    checks = [
        *judge_gaps(gaps, origin.recipe),
        *_judge_steps(steps, origin.recipe, places),
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


def is_sampled(call: Transition) -> bool:
    return call.replayed_from is None


async def read_trajectories(run: StoredRun, ids: Sequence[str]) -> AsyncIterator[Trajectory]:
    for start in range(0, len(ids), FETCH):
        for trajectory in await run.look.trajectories(ids[start : start + FETCH]):
            yield trajectory


async def _find_places(run: StoredRun) -> tuple[Places, int]:
    """Find the places of all sampled calls, and count the tokens that were chosen."""
    places: Places = {}
    tokens = offset = 0
    while page := await run.list_rollouts(RolloutFilter(limit=PAGE, offset=offset)):
        offset += len(page)
        async for trajectory in read_trajectories(run, [row.spec.id for row in page if row.outcome is not None]):
            sampled = list(filter(is_sampled, trajectory.transitions))
            tokens += sum(int(call.chosen.sum()) for call in sampled)
            for place in dict.fromkeys((call.policy, call.policy_version) for call in sampled):
                places.setdefault(place, []).append(trajectory.rollout_id)
    return places, tokens


async def _recompute(run: StoredRun, folder: Path, origin: RunOrigin, places: Places) -> Mapping[str, tuple[Gap, ...]]:
    """Recompute gaps, by policy. Recomputed versions leave `places`; those left there are without weights."""
    gaps = {}
    for name, build in build_backends(origin.recipe, load_plugins(), origin.models, will_run=False).items():
        backend = build()
        measured: list[NDArray[np.float64]] = []
        try:
            if isinstance(backend, TokenScorer):  # else its engine, which may be a cluster of processes, is not started
                for version in _weights(backend, folder, name, is_trained=origin.recipe.all_policies[name].trainable):
                    if rollout_ids := places.pop((name, version), None):
                        await _measure(run, backend, (name, version), rollout_ids, measured)
        finally:
            backend.close()
        gaps[name] = _gaps(np.concatenate(measured, axis=1)) if measured else ()
    return gaps


def _weights(backend: Backend, folder: Path, policy: str, *, is_trained: bool) -> Iterator[int]:
    """Versions whose weights the backend has while each is yielded: its start's, then each checkpoint's."""
    yield backend.engine.info.version
    for saved in checkpoints(folder) if is_trained else ():
        load_backend(backend, saved.folder, policy)
        yield backend.engine.info.version


async def _measure(
    run: StoredRun,
    scorer: TokenScorer,
    place: tuple[str, int],
    ids: Sequence[str],
    into: list[NDArray[np.float64]],
) -> None:
    """Add the gaps of calls, with their policy version, index of the call and position in the row: `[4][token]`."""
    waiting: list[Transition] = []

    async def ask() -> None:
        asked = [
            Continuation(
                context=call.prompt_ids,
                tokens=call.completion_ids,
                temperature=call.sampling.temperature or 1.0,  # greedy calls record their logprobs at temperature 1
            )
            for call in waiting
        ]
        for call, logprobs in zip(waiting, await asyncio.to_thread(scorer.logprobs, asked), strict=True):
            chosen = np.flatnonzero(call.chosen)
            version, index = (np.full(len(chosen), number) for number in (call.policy_version, call.index))
            gap = np.abs(logprobs - call.logprobs)[chosen]
            into.append(np.stack([gap, version, index, len(call.prompt_ids) + chosen]))
        waiting.clear()

    async for trajectory in read_trajectories(run, ids):
        calls = filter(is_sampled, trajectory.transitions)
        waiting += [call for call in calls if (call.policy, call.policy_version) == place]
        if len(waiting) >= AT_ONCE:
            await ask()
    await ask()


def _gaps(measured: NDArray[np.float64]) -> tuple[Gap, ...]:
    """Gaps of all tokens and of the parts of them."""
    gap, version, call, position = measured
    begin = 2 ** np.floor(np.log2(np.maximum(position, 1)))
    named = {"version {}": version, "call {}": call, "position {}-{}": begin}
    parts = {
        name.format(number, 2 * number - 1): gap[column == number]
        for name, column in named.items()
        for number in np.unique(column).astype(int)
    }
    return tuple(
        Gap(
            part=part,
            tokens=len(values),
            mean=float(values.mean()),
            p99=float(np.quantile(values, 0.99)),
            largest=float(values.max()),
            far=float((values > FAR).mean()),
        )
        for part, values in {"all": gap, **parts}.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Differences that one number format makes of the same weights in another order of summation."""

    mean: float
    """Mean of |log p(trainer) - log p(rollout)|."""
    far: float
    """Share of tokens beyond `FAR`."""
    largest: float
    """Largest difference of a token; infinite = a few are large without a fault."""

    def explains(self, part: Gap) -> bool:
        """Tell whether a gap is mere rounding. One that is no number is not."""
        is_near = part.tokens < FEWEST or (part.mean <= self.mean and part.far <= self.far)
        return math.isfinite(part.mean) and is_near and part.largest <= self.largest


ROUNDING: Final = {
    # 24 bits: clean runs of tiny policies have means of some 1e-7; of SmolLM2's 30 layers 1.1e-5, and a largest of
    # 4.6e-5, on some CPUs. The least of faults, weights in 16 bits, makes a hundredth
    "float32": Rounding(mean=3e-5, far=0.0, largest=1e-3),
    # 8 bits: 0.2 % of each logit, so hundredths where engine and learner sum in another order, and a few tokens far off
    "bfloat16": Rounding(mean=0.03, far=0.01, largest=math.inf),
}


def _number_format(recipe: Recipe, policy: str) -> str:
    """Number format of engine and learner: float32 where both are torch's and nothing else is set."""
    dtype = recipe.options_of(recipe.all_policies[policy]).get(
        "dtype", "float32" if recipe.backend == "torch" else "bfloat16"
    )
    return dtype if dtype in ROUNDING else "bfloat16"


def judge_gaps(gaps: Mapping[str, Sequence[Gap]], recipe: Recipe) -> Iterator[Check]:
    """Judge each policy's gaps by the rounding of its number format."""
    for policy, parts in gaps.items():
        name = f"probabilities of {policy!r}"
        if not parts:
            why = "no weights of the versions that sampled are at hand, or the backend does not score"
            yield Check(name=name, is_passed=None, evidence=why)
            continue
        kind = _number_format(recipe, policy)
        bad = [part for part in parts if not ROUNDING[kind].explains(part)]
        whole = parts[0]
        evidence = (
            f"{whole.tokens} tokens recomputed: gap {whole.mean:.1e} on average, {whole.largest:.1e} at most ({kind})"
        )
        if bad:
            worst = max(bad, key=lambda part: math.inf if math.isnan(part.mean) else part.mean)
            evidence += f"; the trainer does not see what was sampled, most in {worst.part}: {worst.mean:.1e}"
            evidence += f"; {_explain(parts, ROUNDING[kind])}"
        yield Check(name=name, is_passed=not bad, evidence=evidence)


def _explain(parts: Sequence[Gap], may: Rounding) -> str:
    """Explain a gap by where it begins."""
    versions, calls = ([part for part in parts if part.part.startswith(kind)] for kind in ("version ", "call "))
    if len(versions) > 1 and may.explains(versions[0]):
        return "the first version is clean: look for weights that did not reach the engine"
    if len(calls) > 1 and may.explains(calls[0]):
        return "first calls are clean: look for a history that was tokenised anew"
    return (
        "from the first call of the first version on: look for another chat template, other sampling settings, or "
        "other numerics"
    )


def _judge_steps(steps: Sequence[StepRecord], recipe: Recipe, places: Places) -> Iterator[Check]:
    """Judge the versions without weights, by what the steps measured."""
    if not places:
        return
    kls = {
        f"{name} of step {step.step}": value
        for step in steps
        for name, value in step.metrics.items()
        if name.startswith("learn/") and name.endswith("kl_rollout")
    }
    name = f"steps of {len({version for _, version in places})} versions whose weights are gone"
    if not kls:
        why = "no step measured kl_rollout; keep more checkpoints: loop.keep_checkpoints"
        yield Check(name=name, is_passed=None, evidence=why)
        return
    where, worst = max(kls.items(), key=lambda pair: pair[1])
    options = recipe.backend_options
    several = options.get("epochs", 1) != 1 or options.get("minibatches", 1) != 1 or recipe.loop.max_staleness > 0
    mean = np.mean(list(kls.values()))
    evidence = f"kl_rollout {mean:.1e} on average, at most {worst:.1e} ({where}), as the steps recorded it"
    if several:
        evidence += (
            "; it holds what was learned between the updates of a step, or the age of rollouts, too, so it is "
            "not judged"
        )
    # k3 of a gap d is d²/2 on average, so the same rounding makes half its square; tenfold, as mean squares have a tail
    most = 10 * ROUNDING[_number_format(recipe, recipe.policy.name)].mean ** 2 / 2
    yield Check(name=name, is_passed=None if several else worst <= max(most, SMALLEST_KL), evidence=evidence)


@dataclass(kw_only=True, slots=True)
class _TrainedTokens:
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
                is_sampled(call)
                and np.array_equal(places, start + np.flatnonzero(call.chosen))
                and np.array_equal(row.token_ids[start : start + len(call.completion_ids)], call.completion_ids)
                and np.array_equal(row.token_ids[:start], call.prompt_ids)
                and np.array_equal(row.logprobs[places], call.logprobs[call.chosen])
                and bool((row.versions[places] == call.policy_version).all())
            )
            self.unsampled += 0 if is_as_sampled else len(places)

    def checks(self, steps: Sequence[StepRecord]) -> Iterator[Check]:
        """Yield the checks. Where nothing was trained, they are undecided (`is_passed` is None)."""
        has_any = self.tokens > 0
        evidence = f"{self.tokens} trained tokens, {self.unsampled} of them not sampled so, after the same tokens"
        is_passed = self.unsampled == 0 if has_any else None
        yield Check(name="trained tokens were sampled", is_passed=is_passed, evidence=evidence)
        ratio = self.tokens / max(1, self.unique)
        evidence = f"{self.tokens} trained of {self.unique} different tokens: each {ratio:.2f} times"
        is_passed = self.tokens == self.unique if has_any else None
        yield Check(name="each is trained once", is_passed=is_passed, evidence=evidence)
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
        yield Check(name="the record is what was trained", is_passed=not differ, evidence=evidence)


async def _find_trained(run: StoredRun, recipe: Recipe, steps: Sequence[StepRecord]) -> _TrainedTokens:
    """Make the rows that teach again, from trajectories and advantages as the store has them."""
    trained, calls = _TrainedTokens(), trained_calls(recipe)
    for step in steps:
        read = read_trajectories(run, step.rollout_ids)
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
