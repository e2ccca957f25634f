"""Credit by likelihoods, asked of a real policy that learns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightningrl.types import Evidence, Trajectory
from lightningrl_credit.likelihood import Hindsight, InformationGain
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, plain_logits
from lightningrl_training.evidence_services import PolicyQueries, RolloutServices

MakeBackend = Callable[..., TorchBackend]
ANSWER = [ord("4") - 33, ord("2") - 33]


@pytest.fixture
def search() -> Trajectory:
    """Three calls of one history."""
    calls = [make_transition("c0", prompt=[1, 2, 3], completion=[4, 5])]
    calls.append(make_transition("c1", prompt=[1, 2, 3, 4, 5, 9], completion=[6], index=1, parent="c0"))
    calls.append(make_transition("c2", prompt=[1, 2, 3, 4, 5, 9, 6, 7], completion=[8, 8, 8], index=2, parent="c1"))
    return make_trajectory("r", calls, reward=1.0, answer="42", output="42")


async def score(assigner: Any, trajectory: Trajectory, backend: TorchBackend, folder: str) -> list[float]:
    policies = PolicyQueries({"policy": folder})
    policies.connect("policy", backend)
    evidence: Evidence = await assigner.score(trajectory, RolloutServices(None, policies, trajectory))
    values, *_ = evidence.calls.values()
    return [float(value) for value in values]


def mean_logprob(backend: TorchBackend, context: list[int], tokens: list[int]) -> float:
    with torch.no_grad():
        logprobs = plain_logits(backend.learner.model, [*context, *tokens]).log_softmax(-1)
    return float(np.mean([float(logprobs[len(context) + t - 1, token]) for t, token in enumerate(tokens)]))


async def test_gains_are_those_of_the_policy_and_grow_where_it_has_learned_to_answer(
    make_backend: MakeBackend, policy: str, search: Trajectory
) -> None:
    backend = make_backend()
    chances = [np.exp(mean_logprob(backend, call.prompt_ids.tolist(), ANSWER)) for call in search.transitions]
    gains = await score(InformationGain(), search, backend, policy)
    np.testing.assert_allclose(gains, [chances[1] - chances[0], chances[2] - chances[1], 0.0], atol=1e-6)
    for _ in range(4):
        await asyncio.to_thread(backend.learn, [make_sample(search.transitions[2].prompt_ids.tolist(), ANSWER)])
    chances = [np.exp(mean_logprob(backend, call.prompt_ids.tolist(), ANSWER)) for call in search.transitions]
    after = await score(InformationGain(), search, backend, policy)
    np.testing.assert_allclose(after, [chances[1] - chances[0], chances[2] - chances[1], 0.0], atol=1e-6)
    assert after[1] > gains[1] + 0.02, "of the weights of now: what it learned to answer from is worth more"


async def test_ratios_are_those_of_the_policy_that_is_told_the_end(
    make_backend: MakeBackend, policy: str, search: Trajectory
) -> None:
    backend = make_backend()
    told = [ord(letter) - 33 for letter in "end:42"]
    means = [
        mean_logprob(backend, [*told, *call.prompt_ids.tolist()], call.completion_ids.tolist())
        for call in search.transitions
    ]
    likely = np.exp(np.array(means) / 5.0)
    ratios = await score(Hindsight(hint="end:{output}", bounds=(0.0, 10.0)), search, backend, policy)
    np.testing.assert_allclose(ratios, likely / likely.mean(), atol=1e-5)
    assert len(set(ratios)) == 3
    assert np.mean(ratios) == pytest.approx(1.0, abs=1e-6)
