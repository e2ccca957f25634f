"""Movement of a rollout by one learning step: how much likelier its tokens become, in the direction of their
advantage.

recorded log-probabilities ─► the step ─► one forward pass ─► mean of sign(A) · Δ log π, times tokens of a rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.recipe import Recipe
from lightningrl.types import Array, Transition
from lightningrl_credit.scoring import CreditedGroup

__all__ = ["at_full_rate", "measure_moved"]

MOST_CALLS = 64
"""Calls that are looked at, evenly spaced over all with an advantage."""


def measure_moved(backends: Mapping[str, Backend], credited: Sequence[CreditedGroup]) -> float | None:
    """Nats that the step which learned these groups, the last one, has moved a rollout by. Blocking; one forward pass
    of at most 64 calls. None where no trained token has an advantage, or no backend says."""
    taught = [
        (call, advantages)
        for group in credited
        for rollout, of_rollout in zip(group.group.members, group.advantages, strict=False)
        for call, advantages in zip(rollout.transitions, of_rollout, strict=True)
        if call.trainable and advantages is not None and bool((advantages != 0.0).any())
    ]
    count = min(len(taught), MOST_CALLS)
    chosen = [taught[index * len(taught) // count] for index in range(count)]
    gains: list[Array] = []
    for name, backend in backends.items():
        calls = [(call, advantages) for call, advantages in chosen if call.policy == name]
        if calls and isinstance(backend, TokenScorer):
            now = backend.logprobs([_continuation(call) for call, _ in calls])
            gains += [
                (np.sign(advantages) * (new - call.logprobs))[(advantages != 0.0) & call.chosen]
                for (call, advantages), new in zip(calls, now, strict=True)
            ]
    if not gains or not len(together := np.concatenate(gains)):
        return None
    rollouts = [rollout for group in credited for rollout in group.group.trajectories]
    trained = sum(len(call.completion_ids) for rollout in rollouts for call in rollout.transitions if call.trainable)
    return float(np.mean(together)) * trained / len(rollouts)


def at_full_rate(moved: float | None, recipe: Recipe) -> float | None:
    """Scale what the first step moved to a step after the learning rate's warm-up."""
    warmup = recipe.backend_options.get("warmup_steps") or 1
    return None if moved is None else moved * float(warmup)


def _continuation(call: Transition) -> Continuation:
    temperature = call.sampling.temperature
    return Continuation(context=call.prompt_ids, tokens=call.completion_ids, temperature=temperature or 1.0)
