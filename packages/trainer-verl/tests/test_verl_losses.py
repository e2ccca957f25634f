"""The registered losses: the torch backend's clipped loss, one ratio a call for GSPO, weights that come out whatever the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo, get_adv_estimator_fn, get_policy_loss_fn
from verl.workers.config import ActorConfig

from lightningrl_torch.losses import clipped_surrogate
from lightningrl_verl.losses import call_numbers, cispo, gspo, ppo_clip, precomputed
from lightningrl_verl.settings import LOSSES

CONFIG = SimpleNamespace(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio=0.2,
    global_batch_info={"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None},
)


def scene(seed: int, rows: int = 3, length: int = 7) -> dict[str, Any]:
    torch.manual_seed(seed)
    mask = (torch.rand(rows, length) > 0.3).long()
    mask[:, 0] = 1
    old = -torch.rand(rows, length) * 3
    new = (old + 0.4 * torch.randn(rows, length)).requires_grad_()
    return {"old_log_prob": old, "log_prob": new, "advantages": torch.randn(rows, length) * mask, "response_mask": mask}


@given(seed=st.integers(0, 10_000))
def test_the_clipped_loss_is_the_torch_backends(seed: int) -> None:
    given_ = scene(seed)
    loss, metrics = ppo_clip(**given_, loss_agg_mode="token-sum", config=CONFIG)
    log_ratio = given_["log_prob"].detach() - given_["old_log_prob"]
    token = clipped_surrogate(log_ratio, given_["advantages"], clip_low=0.2, clip_high=0.28)
    assert float(loss.detach()) == pytest.approx(float((token * given_["response_mask"]).sum()), rel=1e-5, abs=1e-6)
    assert 0.0 <= metrics["clip_fraction"] <= 1.0
    assert metrics["kl_rollout"] >= 0.0


@given(seed=st.integers(0, 10_000), weight=st.floats(0.01, 100.0))
@pytest.mark.parametrize("function", [ppo_clip, gspo, cispo])
def test_losses_are_linear_in_the_weight_of_their_rows(function: Any, seed: int, weight: float) -> None:
    given_ = scene(seed)
    plain, _ = function(**given_, config=CONFIG)
    weighted, _ = function(**{**given_, "advantages": given_["advantages"] * weight}, config=CONFIG)
    assert float(weighted.detach()) == pytest.approx(weight * float(plain.detach()), rel=1e-4, abs=1e-4)


def test_gspo_on_rows_of_one_call_is_verls() -> None:
    given_ = scene(4)
    given_["response_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7])
    given_["advantages"] = torch.tensor([[1.0], [-2.0], [0.5]]) * given_["response_mask"]
    tokens = given_["response_mask"].sum(-1, keepdim=True)
    actor = ActorConfig(
        strategy="fsdp2", use_dynamic_bsz=True, ppo_mini_batch_size=3, rollout_n=1, clip_ratio_low=0.2, clip_ratio_high=0.28
    )
    ours, _ = gspo(**{**given_, "advantages": given_["advantages"] / tokens / 3}, config=CONFIG)  # verl: mean of the rows' token means
    theirs, _ = compute_policy_loss_gspo(**given_, config=actor)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-4)


def test_gspo_has_one_ratio_for_each_call_of_a_merged_row() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
    assert call_numbers(mask).tolist() == [[1, 1, 0, 0, 2, 2, 2, 0]]
    old = torch.zeros(1, 8)
    new = torch.tensor([[0.1, 0.0, 9.0, 9.0, -0.1, 0.0, -0.05, 9.0]], requires_grad=True)
    loss, _ = gspo(old_log_prob=old, log_prob=new, advantages=torch.ones(1, 8) * mask, response_mask=mask, config=CONFIG)
    first, second = torch.tensor(0.05).exp(), torch.tensor(-0.05).exp()
    assert float(loss.detach()) == pytest.approx(-float(2 * first + 3 * second), rel=1e-6)


def test_verl_knows_them_all_and_the_estimator() -> None:
    assert all(callable(get_policy_loss_fn(f"lightningrl_{loss}")) for loss in LOSSES)
    assert get_adv_estimator_fn("lightningrl") is precomputed
    rewards, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = precomputed(token_level_rewards=rewards, response_mask=mask, config=None, index=None)
    assert advantages.tolist() == returns.tolist() == [[1.0, 0.0, 3.0]]
