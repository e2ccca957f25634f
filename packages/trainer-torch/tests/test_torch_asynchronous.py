"""Serving while learning: the engine has a copy of the weights, one swap makes them the new ones, old tokens are
weighed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import PATIENCE_S

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError, ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.testing import make_sample, plain_logits
from lightningrl_training.build import build_backends

MakeBackend = Callable[..., TorchBackend]
MODES: list[dict[str, Any]] = [{}, {"lora": {"rank": 4}}]


def request(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(id=name, prompt_ids=tuple(range(20)), sampling=SamplingSettings(max_tokens=tokens, seed=1))


async def generate(backend: TorchBackend, tokens: int = 10) -> list[TokenChunk]:
    return [chunk async for chunk in backend.engine.generate(request("q", tokens))]


def ids_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def logprobs_of(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


def check_logprobs(backend: TorchBackend, chunks: list[TokenChunk]) -> None:
    """They are those of the weights that the learner has now."""
    ids = ids_of(chunks)
    with torch.no_grad():
        logits = plain_logits(backend.learner.model, [*range(20), *ids])[19:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    np.testing.assert_allclose(logprobs_of(chunks), expected.numpy(), atol=1e-4)


def stop_in_mid_step(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The learner has changed its weights and stands still: set when it does, and what lets it go on."""
    stands, go_on = threading.Event(), threading.Event()
    step = backend.learner.optimizer.step

    def slow_step() -> None:
        step()
        stands.set()
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(backend.learner.optimizer, "step", slow_step)
    return stands, go_on


@pytest.mark.parametrize("mode", MODES, ids=["full", "lora"])
async def test_calls_are_answered_by_the_old_version_in_mid_step_and_by_the_new_one_afterwards(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    backend = make_backend(max_staleness=1, **mode)
    assert backend.serves_while_learning
    before = await generate(backend)
    stands, go_on = stop_in_mid_step(backend, monkeypatch)
    learning = asyncio.create_task(asyncio.to_thread(backend.learn, [make_sample(range(8), [1, 2, 3])]))
    assert await asyncio.to_thread(stands.wait, PATIENCE_S)
    meanwhile = await generate(backend)
    assert ids_of(meanwhile) == ids_of(before)
    np.testing.assert_allclose(logprobs_of(meanwhile), logprobs_of(before), atol=1e-5)
    assert {chunk.policy_version for chunk in meanwhile} == {0}
    go_on.set()
    report = await learning
    after = await generate(backend)
    assert report.policy_version == 1 and report.metrics["seconds_swap"] >= 0.0
    assert {chunk.policy_version for chunk in after} == {1}
    check_logprobs(backend, after)


async def test_the_swap_waits_for_a_running_call_which_ends_on_the_weights_that_it_began_with(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend(max_staleness=1)
    alone = ids_of(await generate(backend, 100))
    stream = backend.engine.generate(request("q", 100))
    chunks = [await anext(stream)]
    learning = asyncio.create_task(asyncio.to_thread(backend.learn, [make_sample(range(8), [1, 2, 3])]))
    chunks += [chunk async for chunk in stream]
    assert (ids_of(chunks), {chunk.policy_version for chunk in chunks}) == (alone, {0})
    assert (await learning).policy_version == 1
    check_logprobs(backend, await generate(backend))


def test_only_trained_weights_are_copied_and_none_before_the_first_step(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    set_model = TorchEngine.set_model

    def note(engine: TorchEngine, model: Any) -> None:
        served.append(model)
        set_model(engine, model)

    monkeypatch.setattr(TorchEngine, "set_model", note)
    backend, plain = make_backend(max_staleness=1, lora={"rank": 2}), make_backend()
    assert not served
    for _ in range(2):
        backend.learn([make_sample(range(8), [1, 2, 3])])
        plain.learn([make_sample(range(8), [1, 2, 3])])
    (copied,) = served
    ours, theirs = (dict(model.named_parameters()) for model in (backend.learner.model, copied))
    assert {name for name in ours if ours[name] is not theirs[name]} == backend.learner.parameters.keys()
    assert not plain.serves_while_learning


async def test_a_step_that_fails_and_one_without_a_signal_leave_the_engine_as_it_is(make_backend: MakeBackend) -> None:
    backend = make_backend(max_staleness=1)
    before = ids_of(await generate(backend))
    with pytest.raises(BackendError, match="none of 0 samples"):
        backend.learn([])
    assert backend.learn([make_sample(range(8), [1, 2], 0.0)]).policy_version == 0
    after = await generate(backend)
    assert (ids_of(after), after[0].policy_version) == (before, 0)


async def test_a_loaded_checkpoint_is_served(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(max_staleness=1)
    backend.learn([make_sample(range(8), [1, 2, 3])])
    backend.save(tmp_path / "checkpoint")
    backend.learn([make_sample(range(8), [4, 5, 6])])
    backend.load(tmp_path / "checkpoint")
    chunks = await generate(backend)
    assert chunks[0].policy_version == 1
    check_logprobs(backend, chunks)


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_loop_says_how_stale_tokens_may_be_and_the_learner_s_table_does_not(policy: str, staleness: int) -> None:
    tables: dict[str, Any] = {
        "agent": "agent.py:answer",
        "tasks": {"train": "data.py:tasks"},
        "policy": {"model": policy},
    }
    tables["rewards"] = {"right": {"use": "reward.py:right"}}
    recipe = Recipe.model_validate(
        {**tables, "loop": {"max_staleness": staleness}, "learner": {"threads": 1, "device": "cpu"}}
    )
    (build,) = build_backends(recipe, load_plugins(), dict.fromkeys(recipe.all_policies, policy)).values()
    backend = build()
    assert backend.serves_while_learning == (staleness > 0)
    backend.close()
    said_there = Recipe.model_validate({**tables, "learner": {"max_staleness": 1}})
    with pytest.raises(ConfigError, match="max_staleness"):
        build_backends(said_there, load_plugins(), dict.fromkeys(said_there.all_policies, policy))


def test_tokens_of_older_versions_are_weighed_where_nobody_said_and_fresh_ones_are_not(
    make_backend: MakeBackend,
) -> None:
    fresh, stale = make_sample(range(8), [1, 2, 3]), make_sample(range(8), [1, 2, 3], version=-1)
    backend = make_backend(max_staleness=1, learning_rate=0.0)
    assert "importance" not in backend.learn([fresh]).metrics
    assert 0.0 < backend.learn([stale]).metrics["importance"] <= 2.0
    for settings in ({"max_staleness": 1, "importance_cap": 0.0}, {}):
        assert "importance" not in make_backend(**settings).learn([stale]).metrics


def test_importance_weights_make_stale_samples_teach_what_fresh_ones_would(make_backend: MakeBackend) -> None:
    """One-token completions, every one of them once and weighted by how likely it was: gradients are expectations,
    without noise."""
    old, new = make_backend(), make_backend(learning_rate=3e-2)
    prompt = list(range(8))
    for _ in range(4):
        new.learn([make_sample(prompt, [token], weight=1 / 40) for token in range(100, 140)])
    rewards = np.random.default_rng(0).normal(size=264)

    def probabilities(backend: TorchBackend) -> np.ndarray[Any, np.dtype[np.float64]]:
        with torch.no_grad():
            found = plain_logits(backend.learner.model, prompt)[-1].double().softmax(-1)
        return np.asarray(found)

    def gradient(sampler: TorchBackend, cap: float) -> torch.Tensor:
        sampled = probabilities(sampler)
        rows = [
            make_sample(
                prompt, [token], rewards[token], weight=sampled[token], logprobs=[float(np.log(sampled[token]))]
            )
            for token in range(264)
        ]
        learner = make_backend(loss="reinforce", importance_cap=cap, learning_rate=0.0)
        learner.learner.model.load_state_dict(new.learner.model.state_dict())
        return torch.cat([one.flatten() for one in learner.learner.gradients(rows).values()])

    wanted = gradient(new, 0.0)
    corrected, plain = (float((gradient(old, cap) - wanted).norm() / wanted.norm()) for cap in (1e9, 0.0))
    assert corrected < 1e-3
    assert plain > 0.3
