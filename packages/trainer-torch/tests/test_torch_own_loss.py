"""A user's own loss, from a file: it learns, and what is wrong with it is said in one sentence before anything heavy
starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightningrl.errors import BackendError, ConfigError
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.chosen_loss import ChosenLoss
from lightningrl_torch.learner import Learner
from lightningrl_torch.losses import LOSSES
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_model, make_sample

MakeBackend = Callable[..., TorchBackend]
HEAD = "import torch\nfrom lightningrl_torch.losses import LOSSES, TokenLosses\n\n"
PLAIN = "ratio = (batch.logprobs - batch.old_logprobs).exp()\n    "


@pytest.fixture
def write_loss(tmp_path: Path) -> Callable[..., str]:
    """A file with a loss of this body; returns its reference."""

    def write(body: str, parameters: str = "batch") -> str:
        file = tmp_path / f"own_loss_{abs(hash((tmp_path, body)))}.py"
        file.write_text(f"{HEAD}def loss({parameters}):\n    {body}\n", encoding="utf-8")
        return f"{file}:loss"

    return write


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            PLAIN + "return -ratio * batch.advantages",
            r"returned a Tensor; return lightningrl_torch\.losses\.TokenLosses\(losses=\.\.\.\)",
        ),
        (
            PLAIN + "return TokenLosses(losses=(-ratio * batch.advantages).sum())",
            r"losses of shape \(\) for 48 tokens; one number a token",
        ),
        (
            PLAIN + "return TokenLosses(losses=-ratio * batch.advantages, metrics={'r': ratio.mean()})",
            r"gave r of shape \(\)",
        ),
        (
            PLAIN + "return TokenLosses(losses=-ratio * batch.advantages / 0 * 0)",
            "is not finite for 48 of 48 ordinary tokens",
        ),
        (
            PLAIN + "return TokenLosses(losses=-ratio.detach() * batch.advantages)",
            "has no gradient; compute it from batch.logprobs",
        ),
        (
            "return TokenLosses(losses=batch.logprob)",
            "raised AttributeError: 'TokenBatch' object has no attribute 'logprob'",
        ),
        ("return TokenLosses(losses=batch.logprobs - batch.reference_logprobs)", "raised TypeError"),
        (
            PLAIN + "return TokenLosses(losses=(ratio - 1).square() - ratio * batch.advantages)",
            r"return TokenLosses\(\.\.\., has_other_terms=True",
        ),
    ],
)
def test_what_is_wrong_with_a_loss_is_one_sentence(write_loss: Callable[..., str], body: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ChosenLoss(write_loss(body), {})
    assert "\n" not in str(caught.value)
    assert "own_loss_" in str(caught.value)


def test_a_loss_that_is_not_there_or_takes_no_such_option(write_loss: Callable[..., str], tmp_path: Path) -> None:
    there = write_loss("return LOSSES['ppo_clip'](batch)")
    with pytest.raises(ConfigError, match="has no 'other'; it has"):
        ChosenLoss(there.replace(":loss", ":other"), {})
    with pytest.raises(ConfigError, match="no file"):
        ChosenLoss(f"{tmp_path / 'nowhere.py'}:loss", {})
    with pytest.raises(ConfigError, match="has no setting 'tau'"):
        ChosenLoss(there, {"tau": 1.0})
    with pytest.raises(
        ConfigError,
        match=r"loss is 'dpo'; choose 'ppo_clip', 'gspo', 'cispo', 'reinforce', or your own: 'file.py:loss'",
    ):
        Settings(policy="tiny", loss="dpo")
    with pytest.raises(ConfigError, match="loss 'gspo' has no setting 'tau'"):
        Settings(policy="tiny", loss="gspo", loss_options={"tau": 1.0})


@pytest.mark.parametrize("name", LOSSES)
def test_the_tables_losses_are_proportional_to_the_advantage(name: str) -> None:
    chosen = ChosenLoss(name, {})
    assert (chosen.is_proportional, chosen.has_other_terms) == (True, False)


def test_what_a_loss_says_of_itself_is_seen(write_loss: Callable[..., str]) -> None:
    pulled = ChosenLoss(
        write_loss(
            PLAIN + "return TokenLosses(losses=(ratio - 1).square() - ratio * batch.advantages, has_other_terms=True)"
        ),
        {},
    )
    assert (pulled.is_proportional, pulled.has_other_terms) == (False, True)
    signs = ChosenLoss(write_loss(PLAIN + "return TokenLosses(losses=-ratio * batch.advantages.sign())"), {})
    assert (signs.is_proportional, signs.has_other_terms) == (False, False)


def test_options_reach_the_loss(write_loss: Callable[..., str]) -> None:
    own = write_loss(
        "return LOSSES['ppo_clip'](batch, clip_low=width, clip_high=clip_high)", "batch, width, clip_high=9.0"
    )
    model, samples = make_model(), [make_sample(range(20), [5, 6, 7], 0.7, logprobs=[-6.0, -5.0, -0.5])]
    ours = Learner(model, Settings(policy="tiny", loss=own, loss_options={"width": 0.1}, clip_high=0.3)).gradients(
        samples
    )
    theirs = Learner(model, Settings(policy="tiny", clip_low=0.1, clip_high=0.3)).gradients(samples)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_loss_with_other_terms_keeps_the_rows_without_an_advantage(
    make_backend: MakeBackend, write_loss: Callable[..., str]
) -> None:
    body = PLAIN + "return TokenLosses(losses=(ratio - 1).square() - ratio * batch.advantages, has_other_terms=True)"
    silent = replace(make_sample([1, 2, 3], [4, 5]), advantages=np.zeros(5, np.float32))
    assert make_backend(loss=write_loss(body)).learn([silent]).tokens == 2
    assert make_backend().learn([silent]).tokens == 0


def test_a_loss_that_breaks_in_a_step_leaves_weights_and_gradients_as_they_were(
    make_backend: MakeBackend, write_loss: Callable[..., str]
) -> None:
    body = "if batch.advantages.min() < -9:\n        raise ValueError('too low')\n    return LOSSES['ppo_clip'](batch)"
    broken, sound = (
        make_backend(loss=write_loss(body), max_tokens_per_microbatch=1),
        make_backend(max_tokens_per_microbatch=1),
    )
    good, bad = make_sample([1, 2, 3], [4, 5, 6], 0.5), make_sample([1, 2, 3], [7], -10.0)
    with pytest.raises(
        ConfigError, match=r"own_loss_.* raised ValueError: too low \(own_loss_\d+\.py, line 6\); fix it"
    ):
        broken.learn([good, bad])
    assert broken.engine.info.version == 0
    broken.learn([good])
    sound.learn([good])
    for ours, theirs in zip(broken.learner.parameters.values(), sound.learner.parameters.values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_that_turns_to_nan_leaves_the_weights(make_backend: MakeBackend, write_loss: Callable[..., str]) -> None:
    body = "ok = batch.advantages > -9\n    return TokenLosses(losses=-batch.logprobs * batch.advantages * torch.where(ok, 1.0, torch.nan))"
    backend = make_backend(loss=write_loss(body))
    with pytest.raises(BackendError, match=r"loss '.*own_loss_.*:loss' is nan .* the weights stay at version 0"):
        backend.learn([make_sample([1, 2, 3], [4, 5, 6], -10.0)])
    assert backend.learn([make_sample([1, 2, 3], [4, 5, 6], 1.0)]).policy_version == 1
