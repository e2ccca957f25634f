"""Movement of rollouts by one learning step: how much likelier their tokens become.

recorded log-probabilities ─► the step ─► one forward pass ─► Δ log π of each token
asked  = mean of sign(A) · Δ log π, times tokens of a rollout       in the direction of advantages
earned = Σ reward · Δ log π of calls ÷ Σ reward, times calls of a rollout       of what is right already
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.recipe import Recipe
from lightningrl.types import Array, Transition
from lightningrl_credit.scoring import CreditedGroup

__all__ = ["Movement", "measure_movement"]

MOST_CALLS: Final = 64
"""Calls that are looked at, evenly spaced over all that are trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """Nats by which a step at the full learning rate moves a rollout."""

    asked: float
    """In the direction of its advantages, where it has any."""
    earned: float
    """Towards being likelier, each rollout by the weight of its reward; 0 where nobody earned."""


def measure_movement(
    backends: Mapping[str, Backend], credited: Sequence[CreditedGroup], recipe: Recipe
) -> Movement | None:
    """Measure what the step that learned these groups, the first one, has moved. Blocking; one forward pass of at most
    64 calls. None where no trained token has an advantage, or no backend says."""
    calls = list(_calls(credited, recipe))
    count = min(len(calls), MOST_CALLS)
    looked = [calls[index * len(calls) // count] for index in range(count)]
    asked: list[Array] = []
    weighed: list[tuple[float, float]] = []
    for name, backend in backends.items():
        own = [each for each in looked if each[0].policy == name]
        if not own or not isinstance(backend, TokenScorer):
            continue
        now = backend.logprobs([_continuation(call) for call, _, _ in own])
        for (call, advantages, reward), new in zip(own, now, strict=True):
            moved = new - call.logprobs
            weighed.append((reward, float(moved[call.chosen].sum())))
            if advantages is not None:
                asked.append((np.sign(advantages) * moved)[(advantages != 0.0) & call.chosen])
    if not asked or not len(together := np.concatenate(asked)):
        return None
    rollouts = sum(len(group.group.trajectories) for group in credited)
    tokens = sum(len(call.completion_ids) for call, _, _ in calls)
    earned = sum(reward for reward, _ in weighed)
    raised = sum(reward * moved for reward, moved in weighed) / earned if earned else 0.0
    rate = float(recipe.backend_options.get("warmup_steps") or 1)
    return Movement(
        asked=float(np.mean(together)) * tokens / rollouts * rate, earned=raised * len(calls) / rollouts * rate
    )


def _calls(credited: Sequence[CreditedGroup], recipe: Recipe) -> Iterator[tuple[Transition, Array | None, float]]:
    """Trained calls of all rollouts, each with its advantages and its rollout's reward, scaled to [0, 1]."""
    low, high = recipe.reward_bounds
    for group in credited:
        for rollout, advantages in zip(group.group.trajectories, group.advantages, strict=False):
            reward = low if rollout.reward is None else min(high, max(low, rollout.reward))
            for call, of_call in zip(rollout.transitions, advantages, strict=True):
                if call.trainable:
                    yield call, of_call, (reward - low) / (high - low)


def _continuation(call: Transition) -> Continuation:
    temperature = call.sampling.temperature
    return Continuation(context=call.prompt_ids, tokens=call.completion_ids, temperature=temperature or 1.0)
