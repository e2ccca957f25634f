"""Losses agree with TRL's GRPO trainer, an independent implementation, on random inputs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl_torch.losses import approximate_kl, clipped_surrogate, is_clipped, truncated_importance
from lightningrl_torch.schedules import schedule_factor


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


def trl_loss(
    trainer: Any, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], *, low: float, high: float, beta: float
) -> torch.Tensor:
    """`GRPOTrainer._compute_loss` with logprobs given instead of recomputed; `dapo` = mean over all completion tokens."""
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False)
    itself = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value),
        args=args, aux_loss_enabled=False, beta=beta, current_gradient_accumulation_steps=1, epsilon_high=high, epsilon_low=low,
        importance_sampling_level="token", loss_type="dapo", max_completion_length=logprobs.shape[1], model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None, top_entropy_quantile=1.0, use_vllm=False, vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False, _metrics={"eval": defaultdict(list)},
    )  # fmt: skip
    result: torch.Tensor = trainer._compute_loss(itself, None, inputs)
    return result


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, 0.2, 0.0), (0.2, 0.28, 0.0), (0.1, 0.3, 0.05)])
def test_loss_and_gradient_are_those_of_trl(trl: Any, seed: int, low: float, high: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = 6, 9
    old = -3 * torch.rand(rows, tokens, generator=generator)
    logprobs = (old + 0.4 * torch.randn(rows, tokens, generator=generator)).requires_grad_()
    reference = old + 0.4 * torch.randn(rows, tokens, generator=generator)
    advantages = torch.randn(rows, tokens, generator=generator)
    mask = (torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=generator)).int()
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long), "prompt_mask": torch.ones(rows, 1, dtype=torch.int),
        "completion_ids": torch.zeros(rows, tokens, dtype=torch.long), "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    expected = trl_loss(trl, logprobs, inputs, low=low, high=high, beta=beta)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    token_loss = clipped_surrogate(logprobs - old, advantages, clip_low=low, clip_high=high) + beta * approximate_kl(reference - logprobs)
    loss = (mask / mask.sum() * token_loss).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


@settings(deadline=None)
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-3, 3), low=st.floats(0, 0.9), high=st.floats(0, 2))
def test_a_clipped_token_has_no_gradient_and_another_has(log_ratio: float, advantage: float, low: float, high: float) -> None:
    x = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    a = torch.tensor(advantage, dtype=torch.float64)
    if min(abs(x.exp().item() - 1 + low), abs(x.exp().item() - 1 - high)) < 1e-6:
        return
    clipped_surrogate(x, a, clip_low=low, clip_high=high).backward()
    assert x.grad is not None
    clipped = bool(is_clipped(x, a, clip_low=low, clip_high=high))
    assert x.grad.item() == pytest.approx(0.0 if clipped else -x.exp().item() * advantage)


@given(st.floats(-5, 5))
def test_the_kl_estimate_is_never_negative(log_ratio: float) -> None:
    assert float(approximate_kl(torch.tensor(log_ratio, dtype=torch.float64))) >= 0.0


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    log_ratio = torch.tensor([-1.0, 0.0, 3.0], requires_grad=True)
    weights = truncated_importance(log_ratio, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.36787944, 1.0, 2.0]))
    assert not weights.requires_grad


def test_schedules_warm_up_and_end_where_they_should() -> None:
    warm = {"warmup_steps": 4, "total_steps": 14, "minimum": 0.1}
    assert [schedule_factor("linear", step, **warm) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule_factor("linear", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("cosine", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("linear", 30, **warm) == schedule_factor("cosine", 30, **warm) == pytest.approx(0.1)
    assert schedule_factor("constant", 30, warmup_steps=0, total_steps=None) == 1.0
