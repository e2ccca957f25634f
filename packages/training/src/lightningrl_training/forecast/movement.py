"""Movement of rollouts by learning steps: how much likelier their tokens become, in the direction of their advantage.

recorded log-probabilities ─► the step that learns them ─► one forward pass ─► moved
                           ─► the next step, of other tasks ─► one forward pass ─► carried

Both are means of sign(A) · Δ log π over tokens, times tokens of a rollout. What a step on some tasks does to the
rollouts of others is the learning rate times the product of their gradients: the part of a gradient that tasks share
(Fort et al. 2019, "Stiffness", arXiv 1901.09491), where `moved` holds what is learned by heart as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.recipe import Recipe
from lightningrl.types import Array, Transition
from lightningrl_credit.scoring import CreditedGroup

__all__ = ["Movement", "at_full_rate"]

MOST_CALLS = 64
"""Calls that are looked at, evenly spaced over all with an advantage."""


class Movement:
    """Watches calls of groups while steps are learned."""

    def __init__(self, backends: Mapping[str, Backend], credited: Sequence[CreditedGroup]) -> None:
        """`backends`: by policy. `credited`: groups whose recorded log-probabilities are those of the weights now."""
        taught = [
            (call, advantages)
            for group in credited
            for rollout, of_rollout in zip(group.group.members, group.advantages, strict=False)
            for call, advantages in zip(rollout.transitions, of_rollout, strict=True)
            if call.trainable and advantages is not None and bool((advantages != 0.0).any())
        ]
        count = min(len(taught), MOST_CALLS)
        chosen = [taught[index * len(taught) // count] for index in range(count)]
        scorers = {name: backend for name, backend in backends.items() if isinstance(backend, TokenScorer)}
        self._calls = [(call, advantages) for call, advantages in chosen if call.policy in scorers]
        self._scorers = scorers
        self._before: list[Array] = [call.logprobs for call, _ in self._calls]
        rollouts = [rollout for group in credited for rollout in group.group.trajectories]
        trained = sum(
            len(call.completion_ids) for rollout in rollouts for call in rollout.transitions if call.trainable
        )
        self._tokens = trained / max(1, len(rollouts))

    def measure(self) -> float | None:
        """Nats that a rollout has been moved by since the last call, or since it was recorded. Blocking; one forward
        pass of at most 64 calls. None where no trained token has an advantage, or no backend says."""
        now = self._score()
        gains = [
            (np.sign(advantages) * (after - before))[(advantages != 0.0) & call.chosen]
            for (call, advantages), before, after in zip(self._calls, self._before, now, strict=True)
        ]
        self._before = now
        if not gains or not len(together := np.concatenate(gains)):
            return None
        return float(np.mean(together)) * self._tokens

    def _score(self) -> list[Array]:
        """Log-probabilities by the weights now, in the order of the calls."""
        scored: dict[int, Array] = {}
        for name, scorer in self._scorers.items():
            places = [place for place, (call, _) in enumerate(self._calls) if call.policy == name]
            if places:
                logprobs = scorer.logprobs([_continuation(self._calls[place][0]) for place in places])
                scored.update(zip(places, logprobs, strict=True))
        return [scored[place] for place in range(len(self._calls))]


def at_full_rate(moved: float | None, recipe: Recipe, *, step: int = 1) -> float | None:
    """Scale what a step, the first or a later one, moved to a step after the learning rate's warm-up."""
    warmup = float(recipe.backend_options.get("warmup_steps") or 1)
    return None if moved is None else moved * max(1.0, warmup / step)


def _continuation(call: Transition) -> Continuation:
    temperature = call.sampling.temperature
    return Continuation(context=call.prompt_ids, tokens=call.completion_ids, temperature=temperature or 1.0)
