"""The KL to the starting policy in the loss: which divergence each estimate's mean gradient is of, counted out over
every token, and that a token of other weights weighs as much in it as in the rest of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightningrl.errors import ConfigError
from lightningrl.types import Sample
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.losses import KL_ESTIMATES, approximate_kl
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_sample

MakeBackend = Callable[..., TorchBackend]


def pair(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over six tokens, with a gradient, and the log-probs of its reference."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference = (spread * torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(), reference.log_softmax(0)


def exact_gradient(logits: torch.Tensor, reference: torch.Tensor, *, forward: bool) -> torch.Tensor:
    """∇KL(π_ref ‖ π_θ), or ∇KL(π_θ ‖ π_ref), by its definition."""
    logprobs = logits.log_softmax(0)
    divergence = (
        (reference.exp() * (reference - logprobs)).sum() if forward else (logprobs.exp() * (logprobs - reference)).sum()
    )
    (gradient,) = torch.autograd.grad(divergence, logits)
    return gradient


def mean_gradient(
    estimate: Callable[[torch.Tensor], torch.Tensor],
    logits: torch.Tensor,
    reference: torch.Tensor,
    *,
    sampled_by: torch.Tensor | None = None,
) -> torch.Tensor:
    """E[∇estimate] over every token, as likely as `sampled_by` has it, weighed by π_θ / sampled_by; None = π_θ."""
    logprobs = logits.log_softmax(0)
    behaviour = logprobs.detach() if sampled_by is None else sampled_by
    weights = (logprobs.detach() - behaviour).exp()
    (gradient,) = torch.autograd.grad((behaviour.exp() * weights * estimate(reference - logprobs)).sum(), logits)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_k2_has_the_reverse_kls_gradient_and_k3_the_forward_ones(seed: int, spread: float) -> None:
    logits, reference = pair(seed, spread)
    reverse, forward = (exact_gradient(logits, reference, forward=forward) for forward in (False, True))
    torch.testing.assert_close(mean_gradient(KL_ESTIMATES["k2"], logits, reference), reverse)
    torch.testing.assert_close(mean_gradient(KL_ESTIMATES["k3"], logits, reference), forward)
    assert float(torch.cosine_similarity(reverse, forward, dim=0)) < 0.999, "they are two directions"


@pytest.mark.parametrize("seed", range(4))
def test_k1_as_a_loss_has_no_gradient_on_average(seed: int) -> None:
    logits, reference = pair(seed, 2.0)
    assert mean_gradient(lambda x: -x, logits, reference).abs().max() < 1e-12
    assert "k1" not in KL_ESTIMATES


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", KL_ESTIMATES)
def test_importance_weights_give_tokens_of_other_weights_the_same_mean(name: str, seed: int) -> None:
    logits, reference = pair(seed, 1.0)
    _, other = pair(seed + 100, 1.0)
    expected = exact_gradient(logits, reference, forward=name == "k3")
    torch.testing.assert_close(mean_gradient(KL_ESTIMATES[name], logits, reference, sampled_by=other), expected)


def rows(backend: TorchBackend, shift: float = 0.0) -> list[Sample]:
    """Rows without any advantage, sampled `shift` less probably than the policy would; of versions that are gone."""
    made = [make_sample([1, 2, 3], [5 + number, 9, 12], 0.0, rollout=str(number)) for number in range(3)]
    logprobs = backend.learner.recompute(made, backend.learner.model)
    for row in made:
        row.logprobs[row.mask] = logprobs[id(row)] - shift
    return [replace(row, versions=np.where(row.mask, -2, -1).astype(np.int32)) for row in made]


def gradient_of(backend: TorchBackend, samples: list[Sample]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in backend.learner.gradients(samples).values()])


def away(make_backend: MakeBackend, **settings: Any) -> TorchBackend:
    """A backend whose policy has moved from its reference."""
    backend = make_backend(learning_rate=3e-2, **settings)
    backend.learn([make_sample([1, 2, 3], [5 + number, 9, 12], 1.0, rollout=str(number)) for number in range(3)])
    return backend


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_of_a_token_weighs_as_much_as_the_token(make_backend: MakeBackend, estimator: str) -> None:
    settings = {"kl_coef": 1.0, "kl_estimator": estimator}
    backend = away(make_backend, importance_cap=10.0, **settings)
    plain = gradient_of(backend, rows(backend))
    assert plain.abs().max() > 1e-4
    twice = gradient_of(backend, rows(backend, shift=float(np.log(2))))
    torch.testing.assert_close(twice, 2 * plain, rtol=1e-3, atol=1e-6)
    left_out = away(make_backend, importance_mask=(0.5, 1.5), **settings)
    assert gradient_of(left_out, rows(left_out, shift=float(np.log(2)))).abs().max() == 0.0


def test_the_recipe_chooses_the_estimate(make_backend: MakeBackend) -> None:
    gradients = {}
    for estimator in ("k2", "k3"):
        backend = away(make_backend, kl_coef=1.0, kl_estimator=estimator)
        gradients[estimator] = gradient_of(backend, rows(backend))
    assert float(torch.cosine_similarity(gradients["k2"], gradients["k3"], dim=0)) < 0.999


def test_with_k1_the_reference_is_kept_for_the_reward_and_the_loss_has_no_kl(make_backend: MakeBackend) -> None:
    backend = away(make_backend, kl_coef=1.0, kl_estimator="k1")
    assert not gradient_of(backend, rows(backend)).any()
    (row,) = rows(backend)[:1]
    asked = [continuation_of(row)]
    now, then = (backend.logprobs(asked, reference=reference)[0] for reference in (False, True))
    assert float(approximate_kl(torch.from_numpy(then - now)).mean()) > 1e-4


def continuation_of(row: Sample) -> Any:
    from lightningrl.backends import Continuation

    return Continuation(context=row.token_ids[~row.mask], tokens=row.token_ids[row.mask])


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl_estimator is 'k2' and kl_coef is 0, so there is no KL; set kl_coef"):
        Settings(policy="tiny", kl_estimator="k2")
    with pytest.raises(ConfigError, match="kl_estimator is 'k4'; choose 'k1', 'k2' or 'k3'"):
        Settings(policy="tiny", kl_coef=0.1, kl_estimator="k4")  # type: ignore[arg-type]
