"""The gradient of each method's credit is the gradient of its published loss, and its loss is that loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightningrl.backends import Continuation
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_model, plain_logits, save_policy
from lightningrl_training.tuning import methods
from lightningrl_training.tuning.rows import Row
from lightningrl_training.tuning.settings import TuneSettings
from lightningrl_training.tuning.tuner import Tuner, arrange, order_of

BETA = 0.3
RANDOM = np.random.default_rng(3)


def continuation(prompt: int, answer: int) -> Continuation:
    ids = RANDOM.integers(0, 256, prompt + answer).astype(np.int32)
    return Continuation(context=ids[:prompt], tokens=ids[prompt:])


ROWS = {
    "sft": [Row(answers=(continuation(5, 4),)), Row(answers=(continuation(3, 9),))],
    "dpo": [
        Row(answers=(continuation(5, 4), continuation(5, 7))),
        Row(answers=(continuation(3, 6), continuation(3, 2))),
    ],
    "kto": [Row(answers=(continuation(5, 4),)), Row(answers=(continuation(3, 9),), label=False)],
}


def plain_sum(model: Any, answer: Continuation) -> torch.Tensor:
    ids = [*answer.context.tolist(), *answer.tokens.tolist()]
    logprobs = plain_logits(model, ids).log_softmax(-1)
    places = range(len(answer.context), len(ids))
    return torch.stack([logprobs[place - 1, ids[place]] for place in places]).sum()


def published(method: str, model: Any, rows: Sequence[Row], reference: Any) -> torch.Tensor:
    """The loss as its paper and TRL write it, by autograd."""
    sums = [[plain_sum(model, answer) for answer in row.answers] for row in rows]
    if method == "sft":
        return -torch.stack([total for (total,) in sums]).sum() / sum(len(row.answers[0].tokens) for row in rows)
    ratios = [[now - old for now, old in zip(*pair, strict=True)] for pair in zip(sums, reference, strict=True)]
    if method == "dpo":
        return -torch.stack([(BETA * (c - r)).sigmoid().log() for c, r in ratios]).mean()
    with torch.no_grad():
        others = methods.mismatch(rows)
        now = torch.stack([plain_sum(model, text) for text in others])
        old = torch.stack([plain_sum(make_model(), text) for text in others])
        divergence = (now - old).mean().clamp(min=0)
    signs = [1 if row.label else -1 for row in rows]
    losses = [1 - (sign * BETA * (ratio - divergence)).sigmoid() for sign, (ratio,) in zip(signs, ratios, strict=True)]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_loss_and_update_are_those_of_the_published_loss(tmp_path: Path, method: Any) -> None:
    settings = TuneSettings(data=tmp_path, method=method, beta=BETA, batch=2)
    rows = arrange(ROWS[method], settings)
    save_policy(tmp_path / "policy")
    options: dict[str, Any] = {"loss": "reinforce", "learning_rate": 1e-3, "max_grad_norm": 0.0, "device": "cpu"}
    backend = TorchBackend(policy=str(tmp_path / "policy"), name="policy", **options)
    try:
        tuner = Tuner(backend, settings, policy="policy")
        reference = tuner.keep_reference(rows, tmp_path / "reference.npy")
        tuner.update(rows, reference)  # so that the policy is another than the reference
        model = backend._policy.model
        start = make_model()
        with torch.no_grad():
            old = [[plain_sum(start, answer) for answer in row.answers] for row in ROWS[method]]
        loss = published(method, model, ROWS[method], old)
        loss.backward()  # type: ignore[no-untyped-call]
        wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        credit = tuner._credit(rows, reference)
        answers = [answer for row in ROWS[method] for answer in row.answers]
        samples = [
            methods.make_sample(*each, policy="policy", version=1)
            for each in zip(answers, credit.advantages, credit.weights, strict=True)
        ]
        gradients = backend.learner.gradients(samples)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], atol=1e-6, rtol=1e-4)
        assert tuner.update(rows, reference)["learn/loss"] == pytest.approx(loss.item(), abs=1e-6)
    finally:
        backend.close()


def test_each_row_is_learned_from_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    settings = TuneSettings(data=tmp_path, batch=4)
    first, second = ([order_of(10, settings, step) for step in range(start, start + 3)] for start in (0, 3))
    assert [len(numbers) for numbers in first] == [4, 4, 2]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert first == [order_of(10, settings, step) for step in range(3)]
