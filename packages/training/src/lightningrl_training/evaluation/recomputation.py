"""Recomputation: the trainer's own probability of every sampled token whose weights are at hand.

store ─► calls by policy and version ─► weights at hand? ─► the learner's own forward ─► gap to the recorded logprob

There are weights of the starting models and of the checkpoints that the run kept. Of other versions there is what the
steps measured: `kl_rollout`, from the learner's forward in the step itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, StepRecord
from lightningrl.types import Trajectory, Transition
from lightningrl_training.build import build_backends
from lightningrl_training.checkpoints import checkpoints
from lightningrl_training.evaluation.gap import ROUNDING, Check, Gap, TokenGaps, number_format
from lightningrl_training.policies import load_backend
from lightningrl_viewer.reading.origin import RunOrigin
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["Places", "find_places", "is_sampled", "judge_steps", "read_trajectories", "recompute"]

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
    """Recompute gaps, by policy. Recomputed versions are taken out of `places`; those left there are without
    weights."""
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
    """Versions whose weights the backend has while each is yielded: those it starts from, then those of each
    checkpoint."""
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
    # k3 of a gap d is d²/2 on average, so the same rounding makes half its square; tenfold, since a mean of squares has
    # a tail
    most = 10 * ROUNDING[number_format(recipe, recipe.policy.name)].mean ** 2 / 2
    yield Check(name=name, is_passed=None if several else worst <= max(most, SMALLEST_KL), evidence=evidence)
