"""LightningRL's losses and advantage estimator, loaded in every verl process by the `verl.plugins` entry point.

    rows carry  A'_t = weight_t · advantage_t        (credit is assigned and weighed before verl sees a row)
    estimator   hands A' through, token by token
    loss        Σ_t loss_t(A'), not averaged afterwards: the losses are proportional to A', so the weights come out

With `loss_agg_mode = token-sum` verl adds token losses up over microbatches and ranks as they are. A user's own loss
that is not proportional is averaged by verl, unweighted (`lightningrl_verl.recipe_check` sees to equal weights).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from lightningrl_torch.chosen_loss import ChosenLoss
from lightningrl_torch.losses import LOSSES, Loss, TokenBatch, TokenLosses, approximate_kl, weigh_tokens
from lightningrl_verl.environment import IMPORTANCE, OWN_LOSS
from lightningrl_verl.settings import METRIC, loss_name

__all__ = ["ESTIMATOR", "call_numbers", "policy_loss", "precomputed"]

ESTIMATOR = "lightningrl"
LEAST_LOG_RATIO = -103.0
"""Log-ratio of a token whose probability became 0: the log of float32's least number. So large a step is to be seen."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def precomputed(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The advantages that came with the rows, `[row][token]`; prompts and padding get none."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


def policy_loss(loss: Loss) -> Any:
    """A loss of the table as verl calls one: matrices `[row][token]` in, one number and metrics out."""
    clips = inspect.signature(loss).parameters.keys() & {"clip_low", "clip_high"}

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-sum",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = response_mask.bool()
        old, new = old_log_prob[mask], log_prob[mask]
        batch = TokenBatch(
            logprobs=new,
            old_logprobs=old,
            rollout_logprobs=old if rollout_is_weights is None else None,
            reference_logprobs=None,
            advantages=advantages[mask],
            calls=call_numbers(mask),
        )
        token_losses = loss(
            batch, **{name: getattr(config, f"clip_ratio_{name.removeprefix('clip_')}") for name in clips}
        )
        losses = torch.zeros_like(log_prob).masked_scatter(mask, token_losses.losses.to(log_prob.dtype))
        importance = None
        if rollout_is_weights is not None:
            importance = _weigh(rollout_is_weights[mask], batch.calls)
            losses = losses * torch.zeros_like(log_prob).masked_scatter(mask, importance.to(log_prob.dtype))
        total = agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return total, _describe(old, new.detach(), token_losses, importance)

    return compute


def own_loss(batch: TokenBatch) -> TokenLosses:
    """The user's own, or the table's with options of the user's, which the environment names."""
    return _load_own(os.environ[OWN_LOSS])(batch)


for _name, _loss in {**LOSSES, "own": own_loss}.items():
    register_policy_loss(loss_name(_name))(policy_loss(_loss))


@functools.cache
def _load_own(options: str) -> ChosenLoss:
    return ChosenLoss(**json.loads(options))


def _weigh(ratio: Tensor, calls: Tensor) -> Tensor:
    """Weights of the sampled tokens: verl's, or with `sequence_mask` those of the torch backend, of verl's ratios."""
    arguments = _read_arguments(os.environ.get(IMPORTANCE, ""))
    return ratio if arguments is None else weigh_tokens(ratio.log(), calls, **arguments)


@functools.cache
def _read_arguments(text: str) -> dict[str, Any] | None:
    return json.loads(text) if text else None


def call_numbers(mask: Tensor) -> Tensor:
    """Each sampled token's call, from 0: a run in a row is one call (`lightningrl_verl.rows.separate_calls`)."""
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return starts.flatten().cumsum(0)[mask.flatten()] - 1


def _describe(old: Tensor, new: Tensor, losses: TokenLosses, importance: Tensor | None) -> dict[str, float]:
    """Means over a microbatch's sampled tokens, `METRIC` before the torch backend's names; old is what ratios are to.
    verl averages all over microbatches: `probability_gap_max` is the largest gap only in steps of one microbatch."""
    log_ratio = (new - old).clamp(min=LEAST_LOG_RATIO)
    by_token = {"kl_rollout": approximate_kl(log_ratio), "ratio": (new - old).exp(), **losses.metrics}
    if importance is not None:
        by_token |= {"importance": importance, "masked": importance == 0.0}
    metrics = {name: float(values.float().mean()) if len(new) else 0.0 for name, values in by_token.items()}
    metrics["probability_gap_max"] = float((new.exp() - old.exp()).abs().max()) if len(new) else 0.0
    return {f"{METRIC}{name}": value for name, value in metrics.items()}


def _leave_out_padding() -> None:
    """Make verl's FSDP engines compute logprobs and entropies over the tokenizer's tokens, which are sampled from. Safe
    to call twice.

    Embeddings are often padded (Qwen2.5: 151 936 rows, 151 665 tokens). verl's vLLM replicas never sample an id that
    the tokenizer lacks (workers/rollout/vllm_rollout/utils.py `monkey_patch_compute_logits`), but its FSDP engines
    count the padding's probability: each rollout logprob is too high by −log(1 − padding's mass), 2e-4 where the
    padding was never trained down.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    original = FSDPEngineWithLMHead.prepare_model_outputs
    if not hasattr(original, "__wrapped__"):
        FSDPEngineWithLMHead.prepare_model_outputs = _over_known_tokens(original)


def _over_known_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def prepare_model_outputs(self: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        logits, tokens = getattr(output, "logits", None), len(self.model_config.tokenizer)
        # finite, not -inf: verl's entropy multiplies probabilities by logits, and 0 · -inf is NaN
        if logits is not None and tokens < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= tokens
            output.logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min / 2)
        return original(self, output, *arguments, **options)

    return prepare_model_outputs


_leave_out_padding()
