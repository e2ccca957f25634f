"""The losses are those of a few lines of numpy, value and gradient, and of verl's `core_algos`, on random inputs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl_torch.losses import (
    KL_ESTIMATES,
    LOSSES,
    TokenBatch,
    approximate_kl,
    masked_importance,
    mean_by_call,
    ppo_clip,
    truncated_importance,
    weigh_tokens,
)
from lightningrl_torch.rates import schedule_factor

Floats = np.ndarray[Any, np.dtype[np.float64]]


def make_batch(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    calls: torch.Tensor | None = None,
    **others: Any,
) -> TokenBatch:
    values = {"rollout_logprobs": old, "reference_logprobs": None, **others}
    calls = torch.zeros(len(logprobs), dtype=torch.int64) if calls is None else calls.long()
    return TokenBatch(logprobs=logprobs, old_logprobs=old, advantages=advantages, calls=calls, **values)


def scene(seed: int) -> dict[str, Floats]:
    """Tokens of five calls of one to six tokens; the policy has moved."""
    random = np.random.default_rng(seed)
    calls = np.repeat(np.arange(5.0), random.integers(1, 7, 5))
    old = -3 * random.random(len(calls))
    return {
        "logprobs": old + 0.4 * random.normal(size=len(calls)),
        "old": old,
        "advantages": random.normal(size=len(calls)),
        "calls": calls,
    }


def options_of(name: str, low: float, high: float) -> dict[str, float]:
    """The bounds, where the loss has any."""
    return {} if name == "reinforce" else {"clip_low": low, "clip_high": high}


def numpy_loss(name: str, given_: dict[str, Floats], low: float, high: float) -> tuple[Floats, Floats]:
    """Each token's loss, and its derivative by the token's own logprob."""
    logprobs, advantages, calls = given_["logprobs"], given_["advantages"], given_["calls"]
    if name == "reinforce":
        return -advantages * logprobs, -advantages
    ratio = np.exp(logprobs - given_["old"])
    if name == "gspo":
        means = {call: np.exp((logprobs - given_["old"])[calls == call].mean()) for call in set(calls.tolist())}
        ratio = np.array([means[call] for call in calls.tolist()])
    clipped = np.clip(ratio, 1 - low, 1 + high)
    if name == "cispo":
        return -clipped * advantages * logprobs, -clipped * advantages
    is_clipped = np.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    return -np.minimum(ratio * advantages, clipped * advantages), np.where(is_clipped, 0.0, -ratio * advantages)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.05, 0.01), (1.0, 0.2)])
def test_every_loss_and_its_gradient_are_those_of_numpy(name: str, seed: int, low: float, high: float) -> None:
    given_ = scene(seed)
    tensors = {key: torch.from_numpy(value) for key, value in given_.items()}
    logprobs = tensors.pop("logprobs").requires_grad_()
    found = LOSSES[name](make_batch(logprobs, **tensors), **options_of(name, low, high))
    (gradient,) = torch.autograd.grad(found.losses.sum(), logprobs)
    losses, slopes = numpy_loss(name, given_, low, high)
    np.testing.assert_allclose(found.losses.detach().numpy(), losses, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-12, atol=1e-12)
    assert all(values.shape == logprobs.shape for values in found.metrics.values())


@pytest.mark.parametrize("seed", range(6))
def test_gspo_has_the_gradient_of_the_papers_sequence_objective(seed: int) -> None:
    """Where all tokens of a call have one advantage, GSPO-token is GSPO (arXiv 2507.18071, eq. 5): finite differences
    of eq. 5."""
    given_ = scene(seed)
    calls = given_["calls"].astype(np.int64)
    advantages = np.random.default_rng(seed).normal(size=5)

    def objective(logprobs: Floats) -> float:
        s = np.array([np.exp((logprobs - given_["old"])[calls == call].mean()) for call in range(5)])
        return float(-np.minimum(s * advantages, np.clip(s, 0.9, 1.1) * advantages).sum())

    steps = np.eye(len(calls)) * 1e-6
    expected = [(objective(given_["logprobs"] + step) - objective(given_["logprobs"] - step)) / 2e-6 for step in steps]
    logprobs = torch.from_numpy(given_["logprobs"]).requires_grad_()
    batch = make_batch(
        logprobs, torch.from_numpy(given_["old"]), torch.from_numpy(advantages[calls]), torch.from_numpy(calls)
    )
    per_token = LOSSES["gspo"](batch, clip_low=0.1, clip_high=0.1).losses / torch.from_numpy(np.bincount(calls)[calls])
    (gradient,) = torch.autograd.grad(per_token.sum(), logprobs)
    np.testing.assert_allclose(gradient.numpy(), expected, atol=1e-7)


def test_means_by_call() -> None:
    means = mean_by_call(torch.tensor([1.0, 3.0, 5.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 2, 2]))
    assert means.tolist() == [2.0, 2.0, 5.0, 0.5, 0.5]
    assert mean_by_call(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("low", "high", "beta"), [(0.2, 0.2, 0.0), (0.2, 0.28, 0.0), (0.1, 0.3, 0.05)])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_and_gradient_are_those_of_verl(
    core_algos: Any, seed: int, low: float, high: float, beta: float, aggregation: str
) -> None:
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

    batch = make_batch(logprobs.flatten(), old.flatten(), advantages.flatten())
    token_loss = ppo_clip(batch, clip_low=low, clip_high=high).losses.view(rows, tokens) + beta * approximate_kl(
        reference - logprobs
    )
    loss = (token_weights(mask, aggregation) * token_loss).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("estimator", "name"), [("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimates_are_verls(core_algos: Any, estimator: str, name: str) -> None:
    """verl's `k2` and `mse` are one."""
    reference, logprobs = (-torch.rand(50, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    torch.testing.assert_close(
        KL_ESTIMATES[estimator](reference - logprobs), core_algos.kl_penalty(logprobs, reference, name)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("c", [1.5, 3.0])
def test_dual_clip_is_verls(core_algos: Any, seed: int, c: float) -> None:
    old, logprobs, advantages, mask = verl_scene(seed, moved=1.5)
    expected = verl_loss(core_algos, old, logprobs, advantages, mask, "token-mean", low=0.2, high=0.28, c=c)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    batch = make_batch(logprobs.flatten(), old.flatten(), advantages.flatten())
    found = ppo_clip(batch, clip_low=0.2, clip_high=0.28, dual_clip=c)
    loss = (token_weights(mask, "token-mean") * found.losses.view(mask.shape)).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
    assert found.metrics["dual_clip_fraction"].any(), "the scene has a ratio beyond it"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["cispo", "reinforce"])
def test_cispo_and_reinforce_are_verls(core_algos: Any, seed: int, name: str) -> None:
    old, logprobs, advantages, mask = verl_scene(seed)
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.3, "clip_ratio_high": 0.4}
    config = type("Config", (core_algos.ActorConfig,), {**bounds, "global_batch_info": {}})()
    compute = getattr(core_algos, f"compute_policy_loss_{name}")
    expected, _ = compute(old, logprobs, advantages, mask, "token-mean", config)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    batch = make_batch(logprobs.flatten(), old.flatten(), advantages.flatten())
    losses = LOSSES[name](batch, **options_of(name, 0.3, 0.4)).losses.view(mask.shape)
    loss = (token_weights(mask, "token-mean") * losses).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_gspo_is_verls(core_algos: Any, seed: int, aggregation: str) -> None:
    """Each row is one call: its padding is no part of the mean that its ratio is made of."""
    old, logprobs, advantages, mask = verl_scene(seed)
    bounds = {"clip_ratio": 0.5, "clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
    config = type("Config", (core_algos.ActorConfig,), {**bounds, "global_batch_info": {}})()
    expected, _ = core_algos.compute_policy_loss_gspo(old, logprobs, advantages, mask, aggregation, config)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    sampled = mask.bool()
    batch = make_batch(logprobs[sampled], old[sampled], advantages[sampled], sampled.nonzero()[:, 0])
    found = LOSSES["gspo"](batch, clip_low=0.1, clip_high=0.15)
    loss = (token_weights(mask, aggregation)[sampled] * found.losses).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-6)
    assert found.metrics["clip_fraction"].any(), "the scene has a ratio beyond its bounds"


def verl_scene(seed: int, moved: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs before and now, advantages and mask of six rows."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(6, 9, generator=generator)
    logprobs = (old + moved * torch.randn(6, 9, generator=generator)).requires_grad_()
    mask = (torch.arange(9) < torch.randint(1, 10, (6, 1), generator=generator)).float()
    return old, logprobs, torch.randn(6, 9, generator=generator), mask


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
    c: float = 1e9,
) -> torch.Tensor:
    """With c far off, there is no dual clip."""

    class Config(dict[str, Any]):
        clip_ratio = low
        clip_ratio_low = low
        clip_ratio_high = high
        global_batch_info: ClassVar[dict[str, Any]] = {}

    loss, _ = core_algos.compute_policy_loss_vanilla(
        old, logprobs, advantages, mask, aggregation, Config(clip_ratio_c=c)
    )
    result: torch.Tensor = loss
    return result


def token_weights(mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    """`Sample.weights` of rows that are one rollout each: `token_mean` (DAPO), `rollout_mean` (GRPO), `constant` (Dr.
    GRPO)."""
    rows, tokens = mask.shape
    if aggregation == "token-mean":
        return mask / mask.sum()
    if aggregation == "seq-mean-token-mean":
        return mask / mask.sum(dim=1, keepdim=True) / rows
    return mask / (rows * tokens)


@settings(deadline=None)
@given(log_ratio=st.floats(-3, 3), advantage=st.floats(-3, 3), low=st.floats(0, 0.9), high=st.floats(0, 2))
def test_a_clipped_token_has_no_gradient_and_another_has(
    log_ratio: float, advantage: float, low: float, high: float
) -> None:
    x = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    if min(abs(x.exp().item() - 1 + low), abs(x.exp().item() - 1 - high)) < 1e-6:
        return
    found = ppo_clip(
        make_batch(x, torch.zeros_like(x), torch.tensor([advantage], dtype=torch.float64)), clip_low=low, clip_high=high
    )
    (gradient,) = torch.autograd.grad(found.losses.sum(), x)
    assert gradient.item() == pytest.approx(
        0.0 if found.metrics["clip_fraction"].item() else -x.exp().item() * advantage
    )


@given(st.one_of(st.floats(-5, 5), st.floats(-1e-6, 1e-6)))
def test_the_kl_estimate_is_never_negative(log_ratio: float) -> None:
    assert float(approximate_kl(torch.tensor(log_ratio, dtype=torch.float64))) >= 0.0


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    log_ratio = torch.tensor([-1.0, 0.0, 3.0], requires_grad=True)
    weights = truncated_importance(log_ratio, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.36787944, 1.0, 2.0]))
    assert not weights.requires_grad


def test_tokens_outside_the_bounds_are_left_out_and_those_within_weighted() -> None:
    log_ratio = torch.tensor([-1.0, 0.0, 1.0, 2.0, 1000.0], requires_grad=True)
    weights = masked_importance(log_ratio, 0.5, 5.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1.0, 2.7182817, 0.0, 0.0]))
    assert not weights.requires_grad


def test_schedules_warm_up_and_end_where_they_should() -> None:
    warm: dict[str, Any] = {"warmup_steps": 4, "total_steps": 14, "minimum": 0.1}
    assert [schedule_factor("linear", step, **warm) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule_factor("linear", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("cosine", 9, **warm) == pytest.approx(0.55)
    assert schedule_factor("linear", 30, **warm) == schedule_factor("cosine", 30, **warm) == pytest.approx(0.1)
    assert schedule_factor("constant", 30, warmup_steps=0, total_steps=None) == 1.0


@given(seed=st.integers(0, 10_000))
def test_calls_are_left_out_whole_by_their_geometric_mean_or_an_outlier(seed: int) -> None:
    given_ = scene(seed)
    log_ratio, calls = given_["logprobs"] - given_["old"], given_["calls"]
    geometric, outlier = (0.8, 1.25), (0.5, 2.0)
    expected = np.zeros(len(calls))
    for call in range(5):
        ratios = np.exp(log_ratio[calls == call])
        mean = np.prod(ratios) ** (1 / len(ratios))
        is_kept = geometric[0] <= mean <= geometric[1] and all(outlier[0] <= ratio <= outlier[1] for ratio in ratios)
        expected[calls == call] = np.minimum(ratios, 1.1) if is_kept else 0.0
    found = weigh_tokens(
        torch.tensor(log_ratio), torch.tensor(calls).long(), cap=1.1, geometric=geometric, outlier=outlier
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert not weigh_tokens(torch.tensor(log_ratio), torch.tensor(calls).long()).sub(1.0).any(), "off by default"
