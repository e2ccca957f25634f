"""The registered losses: the table's, call by call, on verl's matrices; weights come out whatever the loss."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import (
    compute_policy_loss_cispo,
    compute_policy_loss_gspo,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from lightningrl.errors import ConfigError
from lightningrl_torch.learner_settings import SequenceMask
from lightningrl_torch.losses import LOSSES, TokenBatch, masked_importance, truncated_importance, weigh_tokens
from lightningrl_verl.environment import IMPORTANCE, OWN_LOSS, process_environment
from lightningrl_verl.losses import call_numbers, policy_loss, precomputed
from lightningrl_verl.ray_connection import actor_environment
from lightningrl_verl.settings import Settings
from lightningrl_verl.verl_config import build_config

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
@pytest.mark.parametrize("loss", LOSSES)
def test_each_is_the_tables_call_by_call(loss: str, seed: int) -> None:
    given_ = scene(seed)
    ours, metrics = policy_loss(LOSSES[loss])(**given_, loss_agg_mode="token-sum", config=CONFIG)
    (gradient,) = torch.autograd.grad(ours, given_["log_prob"])
    expected = torch.zeros(())
    for row, mask in enumerate(given_["response_mask"].tolist()):
        runs = [
            list(run) for sampled, run in itertools.groupby(range(len(mask)), key=lambda token: mask[token]) if sampled
        ]
        for run in runs:
            new, old, advantages = (given_[name][row, run] for name in ("log_prob", "old_log_prob", "advantages"))
            calls = torch.zeros(len(run), dtype=torch.int64)
            others: dict[str, Any] = {"rollout_logprobs": old, "reference_logprobs": None}
            batch = TokenBatch(logprobs=new, old_logprobs=old, advantages=advantages, calls=calls, **others)
            expected = (
                expected
                + LOSSES[loss](
                    batch, **({} if loss == "reinforce" else {"clip_low": 0.2, "clip_high": 0.28})
                ).losses.sum()
            )
    (slopes,) = torch.autograd.grad(expected, given_["log_prob"])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, slopes, rtol=1e-5, atol=1e-6)
    assert loss == "reinforce" or 0.0 <= metrics["lightningrl/clip_fraction"] <= 1.0
    assert metrics["lightningrl/kl_rollout"] >= 0.0


def test_a_step_after_which_a_sampled_token_is_impossible_has_a_finite_kl() -> None:
    """An infinite one is no JSON: the step that went too far was the one without a figure."""
    given_ = scene(0)
    with torch.no_grad():
        given_["log_prob"][0, 0] = -torch.inf
    _, metrics = policy_loss(LOSSES["ppo_clip"])(**given_, config=CONFIG)
    assert 1.0 < metrics["lightningrl/kl_rollout"] < 103.0


@given(seed=st.integers(0, 10_000), weight=st.floats(0.01, 100.0))
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_proportional_to_the_weight_of_their_rows(loss: str, seed: int, weight: float) -> None:
    given_, function = scene(seed), policy_loss(LOSSES[loss])
    plain, _ = function(**given_, config=CONFIG)
    weighted, _ = function(**{**given_, "advantages": given_["advantages"] * weight}, config=CONFIG)
    assert float(weighted.detach()) == pytest.approx(weight * float(plain.detach()), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_cispo_dual_clip_and_reinforce_are_verls(seed: int) -> None:
    given_ = scene(seed)
    given_["log_prob"] = (given_["old_log_prob"] + 1.5 * torch.randn(3, 7)).requires_grad_()
    actor = ActorConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        ppo_mini_batch_size=3,
        rollout_n=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
    )
    tokens = given_["response_mask"].sum()
    for ours, theirs in (
        (LOSSES["cispo"], compute_policy_loss_cispo),
        (functools.partial(LOSSES["ppo_clip"], dual_clip=actor.clip_ratio_c), compute_policy_loss_vanilla),
        (LOSSES["reinforce"], lambda old_log_prob, **others: compute_policy_loss_reinforce(old_log_prob, **others)),
    ):
        expected, _ = theirs(**given_, loss_agg_mode="token-mean", config=actor)
        found, _ = policy_loss(ours)(**{**given_, "advantages": given_["advantages"] / tokens}, config=CONFIG)
        gradients = [torch.autograd.grad(loss, given_["log_prob"], retain_graph=True)[0] for loss in (found, expected)]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_importance_weights_are_verls_as_our_settings_ask_for_them(policy: str, seed: int) -> None:
    log_ratio = 2.0 * torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    for ours, values in (
        (truncated_importance(log_ratio, 2.0), {"importance_cap": 2.0}),
        (masked_importance(log_ratio, 0.5, 5.0), {"importance_mask": (0.5, 5.0)}),
    ):
        config = build_config(
            Settings(policy=policy, **values), context_length=128, cpu=True
        ).algorithm.rollout_correction
        theirs, _ = compute_rollout_correction_weights(
            log_ratio, torch.ones(3, 7), rollout_is=config.rollout_is, rollout_is_threshold=config.rollout_is_threshold
        )
        assert config.bypass_mode is False
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


SEQUENCE_MASK = {"geometric": (0.7, 1.4), "outlier": (0.1, 10.0)}


@pytest.mark.parametrize("importance", [{}, {"importance_cap": 2.0}, {"importance_mask": (0.5, 5.0)}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_calls_that_the_sequence_mask_leaves_out_are_those_of_the_torch_backend(
    policy: str, monkeypatch: pytest.MonkeyPatch, seed: int, importance: dict[str, Any]
) -> None:
    settings = Settings(policy=policy, sequence_mask=SequenceMask.model_validate(SEQUENCE_MASK), **importance)
    monkeypatch.setenv(IMPORTANCE, process_environment(settings)[IMPORTANCE])
    correction = build_config(settings, context_length=128, cpu=True).algorithm.rollout_correction
    given_ = scene(seed)
    log_ratio = 0.8 * torch.randn(3, 7, generator=torch.Generator().manual_seed(seed))
    mask = given_["response_mask"].bool()
    raw, _ = compute_rollout_correction_weights(
        log_ratio,
        mask.float(),
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
    )
    found, metrics = policy_loss(LOSSES["reinforce"])(**given_, config=CONFIG, rollout_is_weights=raw)
    weights = weigh_tokens(log_ratio[mask], call_numbers(mask), **settings.importance_arguments)
    expected = -(weights * given_["advantages"][mask] * given_["log_prob"][mask]).sum()
    (gradient,) = torch.autograd.grad(found, given_["log_prob"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not gradient[mask][weights == 0.0].any(), "exactly 0"
    assert metrics["lightningrl/masked"] == pytest.approx(float((weights == 0.0).float().mean()))
    assert metrics["lightningrl/importance"] == pytest.approx(float(weights.mean()))


@pytest.mark.parametrize("seed", range(8))
def test_on_rows_of_one_call_the_sequence_mask_is_verls(seed: int) -> None:
    log_ratio, mask = 0.3 * torch.randn(16, 7, generator=torch.Generator().manual_seed(seed)), torch.ones(16, 7)
    numbers = torch.arange(16).repeat_interleave(7)
    for name, bounds, option, limit in (
        ("geometric", (0.9, 1.05), "seq_mean_k1", f"{1 / 1.05}_{1 / 0.9}"),  # verl bounds -log r
        ("outlier", (0.5, 2.0), "seq_max_k2", 0.5 * math.log(2.0) ** 2),  # and ½ (log r)², the same on either side
    ):
        theirs, _ = compute_rollout_rejection_mask(log_ratio, mask, rollout_rs=option, rollout_rs_threshold=limit)
        arguments: dict[str, Any] = {name: bounds}
        ours = weigh_tokens(log_ratio.flatten(), numbers, **arguments).reshape(16, 7)
        torch.testing.assert_close(ours, theirs)
        assert 0.0 < float(ours.mean()) < 1.0


def test_an_option_of_a_loss_of_the_table_reaches_verl(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(policy=policy, loss_options={"dual_clip": 1.5})
    config = build_config(settings, context_length=128, cpu=True)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "lightningrl_own"
    assert not settings.is_averaged, "it is proportional still"
    monkeypatch.setenv(OWN_LOSS, process_environment(settings)[OWN_LOSS])
    given_ = {**scene(3), "advantages": -torch.ones(3, 7)}
    given_["log_prob"] = given_["old_log_prob"] + 1.0
    bound, _ = get_policy_loss_fn("lightningrl_own")(**given_, config=CONFIG)
    assert float(bound) == pytest.approx(1.5 * float(given_["response_mask"].sum()))


@pytest.mark.parametrize("seed", range(4))
def test_gspo_on_rows_of_one_call_is_verls(seed: int) -> None:
    given_ = scene(seed)
    given_["response_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7])
    given_["advantages"] = torch.tensor([[1.0], [-2.0], [0.5]]) * given_["response_mask"]
    tokens = given_["response_mask"].sum(-1, keepdim=True)
    actor = ActorConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        ppo_mini_batch_size=3,
        rollout_n=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
    )
    ours, _ = policy_loss(LOSSES["gspo"])(
        **{**given_, "advantages": given_["advantages"] / tokens / 3}, config=CONFIG
    )  # verl: mean of the rows' token means
    theirs, _ = compute_policy_loss_gspo(**given_, config=actor)
    gradients = [torch.autograd.grad(loss, given_["log_prob"])[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_gspo_has_one_ratio_for_each_call_of_a_merged_row() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0]])
    assert call_numbers(mask.bool()).tolist() == [0, 0, 1, 1, 1]
    old = torch.zeros(1, 8)
    new = torch.tensor([[0.1, 0.0, 9.0, 9.0, -0.1, 0.0, -0.05, 9.0]], requires_grad=True)
    loss, _ = policy_loss(LOSSES["gspo"])(
        old_log_prob=old, log_prob=new, advantages=torch.ones(1, 8) * mask, response_mask=mask, config=CONFIG
    )
    first, second = torch.tensor(0.05).exp(), torch.tensor(-0.05).exp()
    assert float(loss.detach()) == pytest.approx(-float(2 * first + 3 * second), rel=1e-6)


def test_verl_knows_them_all_and_the_estimator() -> None:
    assert all(callable(get_policy_loss_fn(f"lightningrl_{loss}")) for loss in (*LOSSES, "own"))
    assert get_adv_estimator_fn("lightningrl") is precomputed
    rewards, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = precomputed(token_level_rewards=rewards, response_mask=mask, config=None, index=None)
    assert advantages.tolist() == returns.tolist() == [[1.0, 0.0, 3.0]]


def test_a_users_own_is_read_from_the_environment_and_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verl_own.py"
    file.write_text(
        "from lightningrl_torch.losses import ppo_clip\n\ndef loss(batch, *, width):\n    return ppo_clip(batch, clip_low=width)\n"
    )
    monkeypatch.setenv(OWN_LOSS, json.dumps({"name": f"{file}:loss", "options": {"width": 0.05}}))
    own = get_policy_loss_fn("lightningrl_own")
    ours, _ = own(**scene(3), config=CONFIG)
    narrow = SimpleNamespace(**{**vars(CONFIG), "clip_ratio_low": 0.05, "clip_ratio_high": 0.2})
    theirs, _ = get_policy_loss_fn("lightningrl_ppo_clip")(**scene(3), config=narrow)
    assert torch.equal(ours, theirs)
    monkeypatch.setenv(OWN_LOSS, json.dumps({"name": f"{file}:other", "options": {}}))
    with pytest.raises(ConfigError, match="has no 'other'; it has: loss, ppo_clip"):
        own(**scene(3), config=CONFIG)


def test_a_users_own_reaches_rays_processes(cpu_ray: None, policy: str, tmp_path: Path) -> None:
    """With the environment that the backend gives verl's actors; an actor's own actors inherit it."""
    (tmp_path / "verl_far.py").write_text("from lightningrl_torch.losses import cispo as loss\n", encoding="utf-8")
    settings = Settings(
        policy=policy, loss=f"{tmp_path / 'verl_far.py'}:loss", clip_high=0.28, loss_options={"clip_low": 0.2}
    )
    config = build_config(settings, context_length=128, cpu=True)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "lightningrl_own"

    def compute(given_: dict[str, Any], config: Any) -> float:
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        import lightningrl_verl.losses  # noqa: F401  verl's plugin entry point does it in its workers

        return float(get_policy_loss_fn("lightningrl_own")(**given_, config=config)[0])

    def start(*arguments: Any) -> float:
        return float(ray.get(ray.remote(compute).remote(*arguments)))

    given_ = {name: value.detach() for name, value in scene(5).items()}
    given_["log_prob"].requires_grad_()
    ours, _ = policy_loss(LOSSES["cispo"])(**given_, config=CONFIG)
    there = ray.remote(start).options(runtime_env=actor_environment(config, process_environment(settings)))
    assert ray.get(there.remote(given_, CONFIG)) == pytest.approx(float(ours.detach()), rel=1e-6)
