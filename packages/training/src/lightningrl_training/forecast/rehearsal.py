"""A rehearsal: a copy of the weights learns from the rollouts of four steps, four times over, and shows what it earns.

rows ─► log π now ─► w = π now ÷ π then, of a rollout, by the mean of its group
     ─► A' = w · (A - Σ w·A ÷ Σ w) ─► one step ─► rows …       after 4 and 16 steps: validation, greedy and sampled

A rollout that has grown likelier weighs more, as there would be more of its kind among fresh ones: importance weights,
normalised within each group (Owen 2013, Monte Carlo theory, methods and examples, section 9.2).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer
from lightningrl.errors import ConfigError
from lightningrl.types import Array, Sample
from lightningrl_credit.scoring import CreditedGroup
from lightningrl_training.forecast.evidence import Rehearsal

__all__ = ["SAMPLES", "STEPS_OF_ROLLOUTS", "rehearse", "reweigh"]

STEPS_OF_ROLLOUTS: Final = 4
STEPS: Final = 16
"""Learning steps, the first included; fewer where the run has fewer."""
LOOKS: Final = (4, 16)
"""Steps after which the policy shows what it earns."""
SAMPLES: Final = 2
"""Sampled answers to a validation task, beside the greedy one."""
MOST_NATS: Final = 8.0
"""Nats that a rollout's weight is made of, at most."""


async def rehearse(
    steps: Sequence[Sequence[Sample]],
    credited: Sequence[CreditedGroup],
    backends: Mapping[str, Backend],
    *,
    most: int,
    learn: Callable[[Sequence[Sample]], Awaitable[object]],
    look: Callable[[int], Awaitable[tuple[float, float]]],
) -> Rehearsal | None:
    """Rehearse at most `most` steps; None where no row has an advantage. `steps`: rows of each step, of which the
    first has been learned; `look`: mean reward of greedy and of sampled answers after so many steps. Raises ConfigError
    where a backend tells no log-probabilities, and what `learn` and `look` raise."""
    if not any(row.advantages.any() for rows in steps for row in rows):
        return None
    groups = {member.rollout_id: one.group.id for one in credited for member in one.group.members}
    last = min(STEPS, most)
    shown: list[tuple[float, float]] = []
    for number in range(1, last + 1):
        rows = steps[(number - 1) % len(steps)]
        if number > 1 and rows:
            await learn(reweigh(rows, groups, await asyncio.to_thread(_logprobs, rows, backends)))
        if number in (*LOOKS, last):
            shown.append(await look(number))
    greedy, sampled = zip(*shown, strict=True)
    return Rehearsal(steps=last, greedy=max(greedy), sampled=max(sampled))


def reweigh(rows: Sequence[Sample], groups: Mapping[str, str], now: Sequence[Array]) -> list[Sample]:
    """Make rows of another policy ones of today's. `groups`: by rollout; `now`: today's log-probabilities, by row."""
    moved, asked = defaultdict[str, float](float), defaultdict[str, list[Array]](list)
    members = defaultdict[str, dict[str, None]](dict)  # rollouts of a group, each once
    for row, new in zip(rows, now, strict=True):
        name = f"{row.policy}/{row.rollout_id}"
        moved[name] += float((new - row.logprobs)[row.mask].sum())
        asked[name].append(row.advantages[row.mask])
        members[f"{row.policy}/{groups[row.rollout_id]}"][name] = None
    weights: dict[str, tuple[float, float]] = {}
    for names in members.values():
        each = np.exp(np.clip([moved[name] for name in names], -MOST_NATS, MOST_NATS))
        baseline = float(np.average([np.mean(np.concatenate(asked[name])) for name in names], weights=each))
        weights |= {name: (weight, baseline) for name, weight in zip(names, each / each.mean(), strict=True)}
    made: list[Sample] = []
    for row, new in zip(rows, now, strict=True):
        weight, baseline = weights[f"{row.policy}/{row.rollout_id}"]
        advantages = np.where(row.mask, weight * (row.advantages - baseline), 0.0).astype(np.float32)
        logprobs = np.where(row.mask, new, 0.0).astype(np.float32)
        made.append(replace(row, advantages=advantages, logprobs=logprobs))
    return made


def _logprobs(rows: Sequence[Sample], backends: Mapping[str, Backend]) -> list[Array]:
    """Log-probabilities of the rows' tokens by the weights of now, 0 for the first token of each."""
    logprobs: dict[int, Array] = {}
    for policy in sorted({row.policy for row in rows}):
        backend = backends[policy]
        if not isinstance(backend, TokenScorer):
            raise ConfigError(f"the backend of policy {policy!r} tells no log-probabilities, so nothing is rehearsed")
        own = [number for number, row in enumerate(rows) if row.policy == policy]
        scored = backend.logprobs([_continuation(rows[number]) for number in own])
        logprobs |= {number: np.concatenate([[0.0], values]) for number, values in zip(own, scored, strict=True)}
    return [logprobs[number] for number in range(len(rows))]


def _continuation(row: Sample) -> Continuation:
    temperatures = row.temperatures[row.mask]
    temperature = float(temperatures[0]) if len(temperatures) else 1.0
    return Continuation(context=row.token_ids[:1], tokens=row.token_ids[1:], temperature=temperature)
