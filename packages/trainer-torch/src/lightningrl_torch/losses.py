"""Per-token losses. Aggregation is not done here: a step's loss is the plain sum of `weights * token_loss` (see `Sample.weights`)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["approximate_kl", "clipped_surrogate", "is_clipped", "truncated_importance"]


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """PPO's clipped loss of each token, from log π_θ - log π_old.

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)  (Schulman et al. 2017, eq. 7; asymmetric bounds: DAPO, eq. 10)
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(log_ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """True where the clip takes the gradient away."""
    ratio = log_ratio.exp()
    return ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) estimated from each token, from log π_ref - log π_θ; never negative.

    k3 = exp(x) - x - 1  (Schulman, "Approximating KL divergence"; GRPO, eq. 4), exact also where x is tiny
    """
    return log_ratio.expm1() - log_ratio


def truncated_importance(log_ratio: Tensor, cap: float) -> Tensor:
    """Importance weight min(exp(log π_old - log π_rollout), cap) of tokens that another policy sampled. No gradient."""
    return log_ratio.detach().exp().clamp(max=cap)
