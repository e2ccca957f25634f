"""Recomputation: the trainer's own probability of every sampled token whose weights are at hand.

store ─► calls by policy and version ─► weights at hand? ─► the learner's own forward ─► gap to the recorded logprob
calls and the trainer's logprobs ─► TokenGaps ─► Gap (all, by version, by call, by position) ─► judge_gaps ─► Check

There are weights of the starting models and of the checkpoints that the run kept. Of other versions there is what the
steps measured: `kl_rollout`, from the learner's forward in the step itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, StepRecord
from lightningrl.types import Trajectory, Transition
from lightningrl_training.build import build_backends
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.policies import load_backend
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["Check", "Gap", "find_places", "is_sampled", "judge_gaps", "judge_steps", "read_trajectories", "recompute"]

FEWEST = 32
"""Tokens of a part from which its mean is judged by itself."""
FAR = math.log(1.2)
"""Log-ratio beyond which PPO's clip, 0.2, takes a token for one that has been learned already."""


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


@dataclass(kw_only=True, slots=True)
class TokenGaps:
    """Gaps of one policy's tokens."""

    tokens: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    """Gap, policy version, index of the call and position in the row, by call: `[call][4][token]`."""

    def add(self, call: Transition, trainer: NDArray[np.float32]) -> None:
        chosen = np.flatnonzero(call.chosen)
        version, index = (np.full(len(chosen), number) for number in (call.policy_version, call.index))
        gap = np.abs(trainer - call.logprobs)[chosen]
        self.tokens.append(np.stack([gap, version, index, len(call.prompt_ids) + chosen]))

    def gaps(self) -> tuple[Gap, ...]:
        """Gaps of all tokens and of the parts of them; empty where there are none."""
        if not self.tokens:
            return ()
        gap, version, call, position = np.concatenate(self.tokens, axis=1)
        begin = 2 ** np.floor(np.log2(np.maximum(position, 1)))
        columns = ("version {}", version), ("call {}", call), ("position {}-{}", begin)
        parts = (
            _gap(name.format(number, 2 * number - 1), gap[column == number])
            for name, column in columns
            for number in np.unique(column).astype(int)
        )
        return _gap("all", gap), *parts


def _gap(part: str, values: NDArray[np.float64]) -> Gap:
    return Gap(
        part=part,
        tokens=len(values),
        mean=float(values.mean()),
        p99=float(np.quantile(values, 0.99)),
        largest=float(values.max()),
        far=float((values > FAR).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Differences that one number format makes of the same weights in another order of summation."""

    mean: float
    """Mean of |log p(trainer) - log p(rollout)|."""
    far: float
    """Share of tokens beyond `FAR`."""
    largest: float | None
    """Largest difference of a token; None = a few are large without a fault."""


ROUNDING = {
    # 24 bits: clean runs of tiny policies have means of some 1e-7; of SmolLM2's 30 layers 1.1e-5, and a largest of
    # 4.6e-5, on some CPUs. The least of faults, weights in 16 bits, makes a hundredth
    "float32": Rounding(mean=3e-5, far=0.0, largest=1e-3),
    # 8 bits: 0.2 % of each logit, so hundredths where engine and learner sum in another order, and a few tokens far off
    "bfloat16": Rounding(mean=0.03, far=0.01, largest=None),
}


def number_format(recipe: Recipe, policy: str) -> str:
    """Number format of engine and learner: float32 where both are torch's and nothing else is set."""
    dtype = recipe.options_of(recipe.all_policies[policy]).get(
        "dtype", "float32" if recipe.backend == "torch" else "bfloat16"
    )
    return dtype if dtype in ROUNDING else "bfloat16"


def judge_gaps(gaps: Mapping[str, Sequence[Gap]], recipe: Recipe) -> Iterator[Check]:
    for policy, parts in gaps.items():
        name = f"probabilities of {policy!r}"
        if not parts:
            why = "no weights of the versions that sampled are at hand, or the backend does not score"
            yield Check(name=name, is_passed=None, evidence=why)
            continue
        kind = number_format(recipe, policy)
        may = ROUNDING[kind]
        bad = [part for part in parts if not _is_rounding(part, may)]
        whole = parts[0]
        evidence = (
            f"{whole.tokens} tokens recomputed: gap {whole.mean:.1e} on average, {whole.largest:.1e} at most ({kind})"
        )
        if bad:
            worst = max(bad, key=lambda part: math.inf if math.isnan(part.mean) else part.mean)
            evidence += f"; the trainer does not see what was sampled, most in {worst.part}: {worst.mean:.1e}"
            evidence += f"; {_explain(parts, may)}"
        yield Check(name=name, is_passed=not bad, evidence=evidence)


def _is_rounding(part: Gap, may: Rounding) -> bool:
    """Tell whether a gap is mere rounding. One that is no number is not."""
    is_near = part.tokens < FEWEST or (part.mean <= may.mean and part.far <= may.far)
    return math.isfinite(part.mean) and is_near and (may.largest is None or part.largest <= may.largest)


def _explain(parts: Sequence[Gap], may: Rounding) -> str:
    """Explain a gap by where it begins."""
    versions, calls = ([part for part in parts if part.part.startswith(kind)] for kind in ("version ", "call "))
    if len(versions) > 1 and _is_rounding(versions[0], may):
        return "the first version is clean: look for weights that did not reach the engine"
    if len(calls) > 1 and _is_rounding(calls[0], may):
        return "first calls are clean: look for a history that was tokenised anew"
    return (
        "from the first call of the first version on: look for another chat template, other sampling settings, or "
        "other numerics"
    )


FETCH = 64
"""Trajectories per read."""
AT_ONCE = 256
"""Calls per question to the trainer."""
PAGE = 1000
SMALLEST_KL = 1e-6
"""Rounding of float32 in a sum of small terms."""

Places = dict[tuple[str, int], list[str]]
"""Rollouts with calls that a policy's version answered, by policy and version."""


async def find_places(run: StoredRun) -> tuple[Places, int]:
    """Find the places of all sampled calls, and count the tokens that were chosen."""
    places: Places = {}
    tokens = offset = 0
    while page := await run.list_rollouts(RolloutFilter(limit=PAGE, offset=offset)):
        offset += len(page)
        ended = [rollout.spec.id for rollout in page if rollout.outcome is not None]
        async for trajectory in read_trajectories(run, ended):
            for call in filter(is_sampled, trajectory.transitions):
                tokens += int(call.chosen.sum())
                rollout_ids = places.setdefault((call.policy, call.policy_version), [])
                if not rollout_ids or rollout_ids[-1] != trajectory.rollout_id:
                    rollout_ids.append(trajectory.rollout_id)
    return places, tokens


async def recompute(run: StoredRun, folder: Path, origin: RunOrigin, places: Places) -> Mapping[str, tuple[Gap, ...]]:
    """Recompute gaps, by policy. Recomputed versions leave `places`; those left there are without weights."""
    gaps = {}
    for name, build in build_backends(origin.recipe, load_plugins(), origin.models, will_run=False).items():
        backend, measured = build(), TokenGaps()
        try:
            if isinstance(backend, TokenScorer):  # else its engine, which may be a cluster of processes, is not started
                for version in _weights(backend, folder, name, is_trained=origin.recipe.all_policies[name].trainable):
                    if rollout_ids := places.pop((name, version), None):
                        await _measure(run, backend, (name, version), rollout_ids, measured)
        finally:
            backend.close()
        gaps[name] = measured.gaps()
    return gaps


def is_sampled(call: Transition) -> bool:
    return call.replayed_from is None


def _weights(backend: Backend, folder: Path, policy: str, *, is_trained: bool) -> Iterator[int]:
    """Versions whose weights the backend has while each is yielded: its start's, then each checkpoint's."""
    yield backend.engine.info.version
    for saved in checkpoints(folder) if is_trained else ():
        load_backend(backend, saved.folder, policy)
        yield backend.engine.info.version


async def read_trajectories(run: StoredRun, ids: Sequence[str]) -> AsyncIterator[Trajectory]:
    for start in range(0, len(ids), FETCH):
        for trajectory in await run.look.trajectories(ids[start : start + FETCH]):
            yield trajectory


async def _measure(
    run: StoredRun, scorer: TokenScorer, place: tuple[str, int], ids: Sequence[str], into: TokenGaps
) -> None:
    waiting: list[Transition] = []

    async def ask() -> None:
        asked = [
            Continuation(context=call.prompt_ids, tokens=call.completion_ids, temperature=_temperature(call))
            for call in waiting
        ]
        for call, logprobs in zip(waiting, await asyncio.to_thread(scorer.logprobs, asked), strict=True):
            into.add(call, logprobs)
        waiting.clear()

    async for trajectory in read_trajectories(run, ids):
        calls = filter(is_sampled, trajectory.transitions)
        waiting += [call for call in calls if (call.policy, call.policy_version) == place]
        if len(waiting) >= AT_ONCE:
            await ask()
    await ask()


def _temperature(call: Transition) -> float:
    return call.sampling.temperature or 1.0  # greedy calls record their logprobs at temperature 1


def judge_steps(steps: Sequence[StepRecord], recipe: Recipe, places: Places) -> Iterator[Check]:
    """Judge the versions without weights, by what the steps measured."""
    if not places:
        return
    gone = sorted({version for _, version in places})
    kls = {
        f"{name} of step {step.step}": value
        for step in steps
        for name, value in step.metrics.items()
        if name.startswith("learn/") and name.endswith("kl_rollout")
    }
    name = f"steps of {len(gone)} versions whose weights are gone"
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
    most = 10 * ROUNDING[number_format(recipe, recipe.policy.name)].mean ** 2 / 2
    yield Check(name=name, is_passed=None if several else worst <= max(most, SMALLEST_KL), evidence=evidence)
