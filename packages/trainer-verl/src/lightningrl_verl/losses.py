"""LightningRL's losses and its advantage estimator, registered with verl. Loaded in every verl process by the `verl.plugins` entry point.

    rows carry  A'_t = weight_t · advantage_t        (credit is assigned and weighed before verl sees a row)
    estimator   hands A' through, token by token
    loss        Σ_t loss_t(A'), and nothing is averaged afterwards: all losses here are linear in |A'|, so the weights come out

With `loss_agg_mode = token-sum` verl adds token losses up over microbatches and ranks as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from lightningrl_verl.vocabulary import leave_out_padding

__all__ = ["ESTIMATOR", "call_numbers", "cispo", "gspo", "loss_name", "ppo_clip", "precomputed"]

ESTIMATOR = "lightningrl"


def loss_name(loss: str) -> str:
    """What a loss of ours is called in verl's registry."""
    return f"lightningrl_{loss}"


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def precomputed(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The advantages that came with the rows, `[row][token]`; prompts and padding get none."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


@register_policy_loss(loss_name("ppo_clip"))  # type: ignore[untyped-decorator]
def ppo_clip(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)  (Schulman et al. 2017, eq. 7; asymmetric bounds: DAPO, eq. 10)."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return _finish(losses, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, ratio=ratio)


@register_policy_loss(loss_name("gspo"))  # type: ignore[untyped-decorator]
def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The clipped loss with one ratio for all tokens of a call: s = exp(mean_t log r_t)  (GSPO, arXiv 2507.18071, eq. 7 and 12).

    A row may hold several calls of a rollout; each run of sampled tokens is one call.
    """
    log_ratio = log_prob - old_log_prob
    per_call = _mean_by_call(log_ratio.detach(), response_mask)
    # eq. 12: s_t has the value of the call's ratio and the gradient of the token's own
    ratio = (per_call + log_prob - log_prob.detach()).exp()
    clipped = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    return _finish(losses, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, ratio=ratio)


@register_policy_loss(loss_name("cispo"))  # type: ignore[untyped-decorator]
def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log π_θ(t)  (CISPO, arXiv 2506.13585, eq. 4): clips weights, drops no token."""
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.detach().clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    losses = -clipped * advantages * log_prob
    return _finish(losses, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, ratio=ratio)


def call_numbers(response_mask: Tensor) -> Tensor:
    """`[row][token]`: which run of sampled tokens a token is in, from 1 in each row; 0 outside."""
    mask = response_mask.bool()
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return starts.cumsum(dim=-1) * mask


def _mean_by_call(values: Tensor, response_mask: Tensor) -> Tensor:
    numbers = call_numbers(response_mask)
    runs = int(numbers.max()) + 1
    zeros = values.new_zeros(values.shape[0], runs)
    mask = response_mask.to(values.dtype)
    means = zeros.scatter_add(1, numbers, values * mask) / zeros.scatter_add(1, numbers, mask).clamp(min=1.0)
    return means.gather(1, numbers)


def _finish(
    losses: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    *,
    ratio: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, _describe(old_log_prob, log_prob.detach(), advantages, response_mask.bool(), ratio.detach(), config)


def _describe(old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor, ratio: Tensor, config: Any) -> dict[str, float]:
    """Means over the microbatch's sampled tokens, by the names that the torch backend gives them; old is the ratio's reference.

    verl averages all of it over microbatches: `probability_gap_max` is the largest gap only where a step is one microbatch.
    """
    if not mask.any():
        return dict.fromkeys(("kl_rollout", "ratio", "clip_fraction", "probability_gap_max"), 0.0)
    difference = (new - old)[mask]
    clipped = ((ratio > 1.0 + config.clip_ratio_high) & (advantages > 0)) | ((ratio < 1.0 - config.clip_ratio_low) & (advantages < 0))
    return {
        "kl_rollout": float((difference.expm1() - difference).mean()),
        "ratio": float(ratio[mask].mean()),
        "clip_fraction": float(clipped[mask].float().mean()),
        "probability_gap_max": float((new.exp() - old.exp())[mask].abs().max()),
    }


leave_out_padding()
