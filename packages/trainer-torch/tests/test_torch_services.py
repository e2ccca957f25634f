"""Logprobs of given tokens, asked of a backend that serves and learns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightningrl.backends import Backend, Continuation, GenerateRequest, TokenScorer
from lightningrl.errors import BackendError, PluginError
from lightningrl.types import Array, SamplingSettings
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, plain_logits
from lightningrl_training.evidence_services import PolicyQueries, RolloutServices

MakeBackend = Callable[..., TorchBackend]


def plain_logprobs(backend: TorchBackend, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """One forward of one row, nothing shared."""
    with torch.no_grad():
        logprobs = plain_logits(backend.learner.model, [*context, *tokens]).log_softmax(-1)
    return [float(logprobs[len(context) + t - 1, token]) for t, token in enumerate(tokens)]


def services(policies: PolicyQueries) -> RolloutServices:
    trajectory = make_trajectory(
        "r", [make_transition("r/0", policy="frozen", trainable=False), make_transition("r/1", policy="main")]
    )
    return RolloutServices(None, policies, trajectory)


def connected(backend: Backend, **settings: Any) -> PolicyQueries:
    policies = PolicyQueries({}, **settings)
    policies.connect("main", backend)
    return policies


async def test_logprobs_are_those_of_one_row_by_itself(make_backend: MakeBackend) -> None:
    backend = make_backend(max_tokens_per_microbatch=16)
    assert isinstance(backend, TokenScorer)
    asked = [([1, 2, 3], [4, 5]), ([1, 2, 3], [6]), ([9], [1, 2, 3, 4, 5, 6]), ([1, 2, 3, 4], [5])]
    ask = services(connected(backend))
    found = await asyncio.gather(*(ask.logprobs(tokens, context) for context, tokens in asked))
    for (context, tokens), logprobs in zip(asked, found, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, plain_logprobs(backend, context, tokens), atol=1e-5)


async def test_weights_are_those_of_now_and_the_reference_is_what_it_started_from(make_backend: MakeBackend) -> None:
    for options in ({"kl_coef": 0.1}, {"lora": {"rank": 4}}):
        backend = make_backend(**options)
        ask = services(connected(backend))
        before = await ask.logprobs([4, 5], [1, 2, 3])
        np.testing.assert_array_equal(await ask.logprobs([4, 5], [1, 2, 3], reference=True), before)
        for _ in range(2):  # adapters begin at zero
            backend.learn([make_sample([1, 2, 3], [4, 5])])
        now = await ask.logprobs([4, 5], [1, 2, 3])
        assert (now > before + 0.01).all()
        np.testing.assert_allclose(await ask.logprobs([4, 5], [1, 2, 3], reference=True), before, atol=1e-6)


async def test_a_backend_without_a_reference_says_how_to_have_one(make_backend: MakeBackend) -> None:
    ask = services(connected(make_backend()))
    with pytest.raises(BackendError, match=r"keeps no reference to score with; set learner.kl_coef above 0"):
        await ask.logprobs([4], [1], reference=True)


async def test_the_engine_goes_on_beside_it_and_samples_what_it_would_alone(make_backend: MakeBackend) -> None:
    backend = make_backend()
    ask = services(connected(backend))

    async def sample() -> tuple[list[int], list[float]]:
        request = GenerateRequest(id="g", prompt_ids=(1, 2, 3), sampling=SamplingSettings(max_tokens=120, seed=3))
        chunks = [chunk async for chunk in backend.engine.generate(request)]
        return [t for c in chunks for t in c.token_ids], [p for c in chunks for p in c.logprobs]

    alone = await sample()
    sampling = asyncio.create_task(sample())
    rounds = 0
    while not sampling.done():
        await ask.logprobs([4, 5], [1, 2, 3])
        rounds += 1
    assert rounds
    assert sampling.result() == alone


class Gate:
    """A backend that waits to be let on, and writes down its batches; token 0 is one that it cannot read."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.batches: list[int] = []

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> list[Array]:
        self.batches.append(len(continuations))
        self.begun.set()
        self.go.wait()
        if any(0 in one.tokens for one in continuations):
            raise BackendError("token 0 is not the policy's")
        return [np.full(len(one.tokens), -float(one.context[0]), np.float32) for one in continuations]


async def test_what_a_rollout_asks_at_once_is_one_batch_beside_no_other_rollouts_and_a_bad_one_fails_alone() -> None:
    gate = Gate()
    policies = connected(gate)  # type: ignore[arg-type]
    first = asyncio.create_task(services(policies).logprobs([1], [7]))
    await asyncio.to_thread(gate.begun.wait)
    one, other = services(policies), services(policies)
    others = [
        asyncio.create_task(ask.logprobs([number % 5, 2], [number + 1]))
        for number in range(1, 21)
        for ask in (one, other)
    ]
    given_up = asyncio.create_task(one.logprobs([1], [1]))
    await asyncio.sleep(0)
    given_up.cancel()
    gate.go.set()
    found = await asyncio.gather(*others, return_exceptions=True)
    assert (await first).tolist() == [-7.0]
    assert gate.batches == [1, 20, *[1] * 20, 20, *[1] * 20], (
        "each rollout's went together, then each once more, by itself"
    )
    for index, values in enumerate(found):
        number = 1 + index // 2
        if number % 5:
            assert isinstance(values, np.ndarray)
            assert values.tolist() == [-float(number + 1)] * 2
        else:
            assert isinstance(values, BackendError)


async def test_a_rollouts_values_are_the_same_bits_whoever_else_asks(make_backend: MakeBackend) -> None:
    """Sums are rounded by what is computed beside them: a resumed run asks about many rollouts at once."""
    backend = make_backend(critic={})
    assert backend.learner.critic is not None
    for parameter in backend.learner.critic.parameters.values():
        torch.nn.init.normal_(parameter, generator=torch.Generator(parameter.device).manual_seed(0))
    policies = connected(backend)
    rollouts = [[[1 + (rollout * turn) % 50] * (3 + turn) for turn in range(1, 6)] for rollout in range(1, 17)]
    alone = [(await services(policies).values(contexts)).tolist() for contexts in rollouts]
    together = await asyncio.gather(*(services(policies).values(contexts) for contexts in rollouts))
    assert [values.tolist() for values in together] == alone


async def test_what_cannot_be_answered_is_one_sentence(make_backend: MakeBackend) -> None:
    backend = make_backend()
    ask = services(connected(backend, max_tokens=100))
    with pytest.raises(BackendError, match="nothing predicts the first token after an empty context"):
        await ask.logprobs([1], [])
    with pytest.raises(BackendError, match=r"token ids outside 0\.\.263"):
        await ask.logprobs([999], [1])
    assert (await ask.logprobs([], [1])).shape == (0,)
    with pytest.raises(PluginError, match="no backend serves policy 'other' in this process"):
        await ask.logprobs([1], [1], policy="other")
    with pytest.raises(PluginError, match="no policy 'main' whose tokens could be read; there are: none here"):
        await ask.encode("a")
    with pytest.raises(BackendError, match=r"may read 100 tokens of policies and critics; raise credit\.max_tokens"):
        await ask.logprobs([1] * 90, [1] * 10)
    with pytest.raises(BackendError, match=r"129 tokens are more than policy .* reads \(128\)"):
        await services(connected(backend)).logprobs([1], [1] * 128)


async def test_texts_are_encoded_by_the_policys_tokenizer(policy: str) -> None:
    ask = services(PolicyQueries({"main": policy}))
    assert await ask.encode("ab") == [ord("a") - 33, ord("b") - 33]
