"""Losses agree with verl's `core_algos`, an independent implementation, on random inputs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl_torch.losses import approximate_kl, clipped_surrogate, is_clipped, truncated_importance
from lightningrl_torch.schedules import schedule_factor


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, 0.2, 0.0), (0.2, 0.28, 0.0), (0.1, 0.3, 0.05)])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_and_gradient_are_those_of_verl(core_algos: Any, seed: int, low: float, high: float, beta: float, aggregation: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 6, 9
    old = -3 * torch.rand(rows, tokens, generator=generator)
    logprobs = (old + 0.4 * torch.randn(rows, tokens, generator=generator)).requires_grad_()
    reference = old + 0.4 * torch.randn(rows, tokens, generator=generator)
    advantages = torch.randn(rows, tokens, generator=generator)
    mask = (torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)).float()

    expected = verl_loss(core_algos, old, logprobs, advantages, mask, aggregation, low=low, high=high)
    kl = core_algos.kl_penalty(logprobs, reference, "low_var_kl")
    expected = expected + beta * core_algos.agg_loss(kl, mask, aggregation)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    token_loss = clipped_surrogate(logprobs - old, advantages, clip_low=low, clip_high=high) + beta * approximate_kl(reference - logprobs)
    loss = (token_weights(mask, aggregation) * token_loss).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


def verl_loss(
    core_algos: Any,
    old: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    aggregation: str,
    *,
    low: float,
    high: float,
) -> torch.Tensor:
    class Config(dict[str, Any]):
        clip_ratio = low
        clip_ratio_low = low
        clip_ratio_high = high
        global_batch_info: ClassVar[dict[str, Any]] = {}

    no_dual_clip = Config(clip_ratio_c=1e9)
    loss, _ = core_algos.compute_policy_loss_vanilla(old, logprobs, advantages, mask, aggregation, no_dual_clip)
    result: torch.Tensor = loss
    return result


def token_weights(mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    """`Sample.weights` of rows that are one rollout each: `token_mean` (DAPO), `rollout_mean` (GRPO), `constant` (Dr. GRPO)."""
    rows, tokens = mask.shape
    if aggregation == "token-mean":
        return mask / mask.sum()
    if aggregation == "seq-mean-token-mean":
        return mask / mask.sum(dim=1, keepdim=True) / rows
    return mask / (rows * tokens)


@settings(deadline=None)
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-3, 3), low=st.floats(0, 0.9), high=st.floats(0, 2))
def test_a_clipped_token_has_no_gradient_and_another_has(log_ratio: float, advantage: float, low: float, high: float) -> None:
    x = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    a = torch.tensor(advantage, dtype=torch.float64)
    if min(abs(x.exp().item() - 1 + low), abs(x.exp().item() - 1 - high)) < 1e-6:
        return
    torch.autograd.backward(clipped_surrogate(x, a, clip_low=low, clip_high=high))
    assert x.grad is not None
    clipped = bool(is_clipped(x, a, clip_low=low, clip_high=high))
    assert x.grad.item() == pytest.approx(0.0 if clipped else -x.exp().item() * advantage)


@given(st.one_of(st.floats(-5, 5), st.floats(-1e-6, 1e-6)))
def test_the_kl_estimate_is_never_negative(log_ratio: float) -> None:
    assert float(approximate_kl(torch.tensor(log_ratio, dtype=torch.float64))) >= 0.0


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    log_ratio = torch.tensor([-1.0, 0.0, 3.0], requires_grad=True)
    weights = truncated_importance(log_ratio, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.36787944, 1.0, 2.0]))
    assert not weights.requires_grad


def test_schedules_warm_up_and_end_where_they_should() -> None:
    warm: dict[str, Any] = {"warmup_steps": 4, "total_steps": 14, "minimum": 0.1}
    assert [schedule_factor("linear", step, **warm) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule_factor("linear", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("cosine", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("linear", 30, **warm) == schedule_factor("cosine", 30, **warm) == pytest.approx(0.1)
    assert schedule_factor("constant", 30, warmup_steps=0, total_steps=None) == 1.0
