"""SFT, DPO and KTO as credit: the advantage of each token with which the policy gradient is the method's gradient.

∇L = -Σ weight · advantage · ∇log π(token)        `reinforce`, which every trainer backend has

sft   A = 1,                        weight 1 / tokens
dpo   A = ±β σ(-β (Δ+ - Δ-)),       weight 1 / pairs      Δ = Σ log π - Σ log π_ref of an answer
kto   A = ±λ β σ(h) (1 - σ(h)),     weight 1 / rows       h = ±β (Δ - z)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.backends import Continuation
from lightningrl.types import Sample
from lightningrl_training.tuning.rows import Row
from lightningrl_training.tuning.settings import TuneSettings

__all__ = ["Credit", "credit_dpo", "credit_kto", "credit_sft", "make_sample", "mismatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """Credit of a batch's answers, in the order of rows and of answers in them."""

    advantages: Sequence[float]
    weights: Sequence[float]
    loss: float | None
    """None = the learner's own loss is the method's."""
    accuracy: float | None = None
    """Share of pairs whose chosen answer is preferred; None = there are no pairs."""


def credit_sft(rows: Sequence[Row]) -> Credit:
    """Credit whose loss is the mean -log π of the answers' tokens."""
    tokens = sum(len(answer.tokens) for row in rows for answer in row.answers)
    count = sum(len(row.answers) for row in rows)
    return Credit(advantages=[1.0] * count, weights=[1.0 / tokens] * count, loss=None)


def credit_dpo(ratios: Sequence[tuple[float, float]], beta: float) -> Credit:
    """Credit of pairs by the log-ratios to the reference of chosen and rejected.

    L = -log σ(β (Δ+ - Δ-))  (Rafailov et al. 2023, eq. 7)
    """
    margins = [beta * (chosen - rejected) for chosen, rejected in ratios]
    pulls = [beta * _sigmoid(-margin) for margin in margins]
    return Credit(
        advantages=[value for pull in pulls for value in (pull, -pull)],
        weights=[1.0 / len(ratios)] * (2 * len(ratios)),
        loss=float(np.mean([np.logaddexp(0.0, -margin) for margin in margins])),
        accuracy=float(np.mean([margin > 0 for margin in margins])),
    )


def credit_kto(ratios: Sequence[float], labels: Sequence[bool], divergence: float, settings: TuneSettings) -> Credit:
    """Credit of good and bad answers; `divergence`: z, the estimated KL to the reference, which has no gradient.

    L = λ_D (1 - σ(β (Δ - z))) of a good answer, λ_U (1 - σ(β (z - Δ))) of a bad one  (Ethayarajh et al. 2024, eq. 8)
    """
    advantages, losses = [], []
    for ratio, label in zip(ratios, labels, strict=True):
        sign = 1.0 if label else -1.0
        weight = settings.desirable_weight if label else settings.undesirable_weight
        value = _sigmoid(sign * settings.beta * (ratio - divergence))
        advantages.append(sign * weight * settings.beta * value * (1.0 - value))
        losses.append(weight * (1.0 - value))
    return Credit(advantages=advantages, weights=[1.0 / len(ratios)] * len(ratios), loss=float(np.mean(losses)))


def mismatch(rows: Sequence[Row]) -> list[Continuation]:
    """Each prompt with the answer of the row before it, from which KTO estimates the KL (its section 4.1), as TRL pairs
    them."""
    answers = [row.answers[0] for row in rows]
    return [
        Continuation(context=answer.context, tokens=other.tokens)
        for answer, other in zip(answers, [*answers[-1:], *answers[:-1]], strict=True)
    ]


def make_sample(answer: Continuation, advantage: float, weight: float, *, policy: str, version: int) -> Sample:
    """A row for the learner: the answer alone is trained."""
    length = len(answer.context) + len(answer.tokens)
    mask = np.arange(length) >= len(answer.context)
    return Sample(
        rollout_id="",
        policy=policy,
        token_ids=np.concatenate([answer.context, answer.tokens]),
        mask=mask,
        logprobs=np.zeros(length, np.float32),
        advantages=np.where(mask, np.float32(advantage), np.float32(0.0)),
        weights=np.where(mask, np.float32(weight), np.float32(0.0)),
        versions=np.where(mask, version, -1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
    )


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
