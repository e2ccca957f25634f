"""The losses, one table for every backend: log-probs and advantages of tokens in, each token's loss out. Imports no
torch.

    TokenBatch (N tokens)  ─►  LOSSES["gspo"](batch, clip_low=…, clip_high=…)  ─►  TokenLosses (N tokens)

A loss neither sums nor weighs: a step's loss is the plain sum of `weights * losses` (see `lightningrl.Sample.weights`).
A user's own, `"file.py:loss"`, is a function of the same form (`lightningrl_torch.chosen_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KL_ESTIMATES",
    "LOSSES",
    "Loss",
    "TokenBatch",
    "TokenLosses",
    "approximate_kl",
    "cispo",
    "gspo",
    "kept_calls",
    "masked_importance",
    "mean_by_call",
    "ppo_clip",
    "reinforce",
    "squared_kl",
    "truncated_importance",
    "weigh_tokens",
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """N trained tokens of whole calls, in the order of their rows. Every tensor has the shape (N,)."""

    logprobs: Tensor
    """log π_θ: the one with a gradient."""
    old_logprobs: Tensor
    """log π_old, what ratios are to: the rollout's, or with `importance_cap` those of the policy before the step."""
    rollout_logprobs: Tensor | None
    """Logprobs that the engine sampled with; None where the backend has them no more (verl with `importance_cap`)."""
    reference_logprobs: Tensor | None
    """Logprobs of the starting policy; None without a KL in the loss, and on verl, which adds it itself."""
    advantages: Tensor
    calls: Tensor
    """Which call a token is of: 0 … calls - 1. A call's tokens are all in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLosses:
    """Losses of tokens, as a loss returns them."""

    losses: Tensor
    """(N,)."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """A number for each token (N,), by name; their mean is reported."""
    has_other_terms: bool = False
    """True if a token of advantage 0.0 may have a loss or a gradient. False: rows without any advantage are left
    out."""


Loss = Callable[..., TokenLosses]
"""`loss(batch, **options)`; options are keyword parameters, with defaults that someone has trained with."""


def ppo_clip(
    batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLosses:
    """PPO's clipped loss, a ratio for each token.

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)  (Schulman et al. 2017, eq. 7; asymmetric bounds:
    DAPO, eq. 10) L_t = min(L_t, -dual_clip A_t) where A_t < 0  (dual clip, arXiv 1912.09729, eq. 5; 3 there and in
    verl; None = unbounded)
    """
    clipped = _clip((batch.logprobs - batch.old_logprobs).exp(), batch.advantages, clip_low, clip_high)
    if dual_clip is None:
        return clipped
    bound = -dual_clip * batch.advantages
    is_beyond = (batch.advantages < 0) & (clipped.losses > bound)
    return TokenLosses(
        losses=clipped.losses.where(~is_beyond, bound), metrics={**clipped.metrics, "dual_clip_fraction": is_beyond}
    )


def gspo(batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLosses:
    """The clipped loss with one ratio for all tokens of a call, and each token's own gradient (GSPO-token, Zheng et al.
    2025).

    s   = (π_θ(call) / π_old(call))^(1/tokens) = exp(mean_t log r_t)        (arXiv 2507.18071, eq. 7)
    s_t = sg[s] · π_θ(t) / sg[π_θ(t)],  in place of PPO's r_t               (eq. 13 and 14; bounds: its experiments)
    """
    logprobs = batch.logprobs
    means = mean_by_call(logprobs.detach() - batch.old_logprobs, batch.calls)
    return _clip((means + logprobs - logprobs.detach()).exp(), batch.advantages, clip_low, clip_high)


def cispo(batch: TokenBatch, *, clip_low: float = 1.0, clip_high: float = 4.0) -> TokenLosses:
    """REINFORCE with clipped importance weights, so that no token is without a gradient.

    L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log π_θ(t)  (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; no
    lower bound there)
    """
    ratio = (batch.logprobs.detach() - batch.old_logprobs).exp()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(losses=-weights * batch.advantages * batch.logprobs, metrics={"clip_fraction": weights != ratio})


def reinforce(batch: TokenBatch) -> TokenLosses:
    """The plain policy gradient: no ratio, so one update for each batch of rollouts, or importance weights
    (`importance_cap`).

    L_t = -A_t log π_θ(t)  (Williams 1992)
    """
    return TokenLosses(losses=-batch.advantages * batch.logprobs)


LOSSES: Mapping[str, Loss] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
"""Losses by the name in a recipe: `learner.loss = "gspo"`. All are proportional to the advantage, so none has other
terms."""


def mean_by_call(values: Tensor, calls: Tensor) -> Tensor:
    """For each token (N,) the mean of its call."""
    sums = values.new_zeros(int(calls.max()) + 1 if len(calls) else 0).index_add(0, calls, values)
    return (sums / calls.bincount())[calls]


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) estimated from each token, from x = log π_ref - log π_θ; never negative.

    k3 = exp(x) - x - 1  (Schulman, "Approximating KL divergence"; GRPO, eq. 4), exact also where x is tiny

    As a loss its mean gradient over tokens of π_θ is another divergence's, the forward KL(π_ref ‖ π_θ)'s:

    ∇k3 = (1 - exp(x)) ∇log π_θ,  E[∇k3] = -Σ π_ref ∇log π_θ = ∇KL(π_ref ‖ π_θ)
    """
    return log_ratio.expm1() - log_ratio


def squared_kl(log_ratio: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) to second order, from x = log π_ref - log π_θ; never negative.

    k2 = x² / 2  (Schulman, "Approximating KL divergence")

    As a loss its mean gradient over tokens of π_θ is exactly that of the reverse KL(π_θ ‖ π_ref):

    ∇k2 = -x ∇log π_θ,  E[∇k2] = Σ π_θ (log π_θ - log π_ref) ∇log π_θ = ∇KL(π_θ ‖ π_ref)
    """
    return log_ratio.square() / 2


KL_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {"k2": squared_kl, "k3": approximate_kl}
"""Terms of the loss by `learner.kl_estimator`. k1 = -x is none: its mean gradient is 0, and it goes into the reward
(`lightningrl_credit.ReferenceKl`)."""


def truncated_importance(log_ratio: Tensor, cap: float) -> Tensor:
    """Importance weight min(exp(log π_old - log π_rollout), cap) of tokens that another policy sampled. No gradient."""
    return log_ratio.detach().exp().clamp(max=cap)


def masked_importance(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Importance weight exp(log π_old - log π_rollout) within low … high, and 0 outside: such tokens are left out. No
    gradient.

    M(k) = k if k in [α, β] else 0  (IcePop, Ring-1T, arXiv 2510.18855)
    """
    weights = log_ratio.detach().exp()
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def weigh_tokens(
    log_ratio: Tensor,
    calls: Tensor,
    *,
    cap: float | None = None,
    mask: tuple[float, float] | None = None,
    geometric: tuple[float, float] | None = None,
    outlier: tuple[float, float] | None = None,
) -> Tensor:
    """Weights (N,) of tokens that another policy sampled, by `importance_cap` or `importance_mask`, and 0 in calls that
    `sequence_mask` leaves out. No gradient."""
    weights = log_ratio.new_ones(log_ratio.shape)
    if mask is not None:
        weights = masked_importance(log_ratio, *mask)
    elif cap is not None:
        weights = truncated_importance(log_ratio, cap)
    is_learned = kept_calls(log_ratio, calls, geometric=geometric, outlier=outlier) > 0.0
    return weights.where(is_learned, 0.0)


def kept_calls(
    log_ratio: Tensor,
    calls: Tensor,
    *,
    geometric: tuple[float, float] | None = None,
    outlier: tuple[float, float] | None = None,
) -> Tensor:
    """1 for the tokens of calls that are learned from, 0 for those of calls that are left out whole, from the tokens'
    log π_old - log π_rollout (N,). No gradient.

    geometric   kept if low <= exp(mean_t log r_t) <= high   (SkyRL's geometric mask; verl's `seq_mean_k1`, of 1/r)
    outlier     kept if low <= r_t <= high for every token t (outlier mask; verl's token veto, both ways)
    (Liu, Li et al. 2025, "When Speed Kills Stability")
    """
    log_ratio = log_ratio.detach()
    weights = log_ratio.new_ones(log_ratio.shape)
    if geometric is not None:
        weights = weights * _is_within(mean_by_call(log_ratio, calls).exp(), geometric)
    if outlier is not None:
        is_outlier = ~_is_within(log_ratio.exp(), outlier)
        weights = weights * (mean_by_call(is_outlier.to(weights), calls) == 0.0)
    return weights


def _is_within(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return (ratio >= low) & (ratio <= high)


def _clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> TokenLosses:
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    fraction = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))
    return TokenLosses(losses=-(ratio * advantages).minimum(clipped * advantages), metrics={"clip_fraction": fraction})
