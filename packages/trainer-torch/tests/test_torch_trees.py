"""Prefix trees: what samples begin alike with is computed once, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lightningrl.advantages import count_distinct
from lightningrl.types import Sample
from lightningrl_torch import packing
from lightningrl_torch.attention import Paths, follows_paths
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.learner import Learner
from lightningrl_torch.packing import Costs, Plan, build_batches, build_trees, plan_attention
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_model, make_sample

MakeBackend = Callable[..., TorchBackend]
ALWAYS = Costs(token=1e9, call=0.0)
"""Share whatever can be shared; each shape is a call of its own."""
TOGETHER = Costs(token=1e9, call=1e9)
NEVER = Costs(token=0.0, call=0.0)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def thinking_stripped(rng: random.Random, turns: int = 4) -> list[Sample]:
    """A call's thinking is not in the history of the next: each call leaves the one before it where that began to
    think."""
    history, rows = tokens(rng, 20), []
    for _ in range(turns):
        thinking, answer, result = tokens(rng, 9), tokens(rng, 5), tokens(rng, 6)
        rows.append(make_sample(history, thinking + answer))
        history = history + answer + result
    return rows


def forks(rng: random.Random) -> list[Sample]:
    """Two agents go on from one history, each twice, and a group shares its prompt."""
    prompt, first = tokens(rng, 15), tokens(rng, 4)
    rows = [make_sample(prompt, first)]
    for _ in range(2):
        branch = prompt + first + tokens(rng, 7)
        rows += [make_sample(branch, tokens(rng, 5)), make_sample(branch, tokens(rng, 8))]
    return rows


def duplicates(rng: random.Random) -> list[Sample]:
    prompt, completion = tokens(rng, 12), tokens(rng, 6)
    return [
        make_sample(prompt, completion),
        make_sample(prompt, completion),
        make_sample(prompt + completion[:2], completion[2:]),
    ]


def prefixes(rng: random.Random) -> list[Sample]:
    """Each sample is the beginning of the next."""
    whole = tokens(rng, 40)
    return [make_sample(whole[: end - 6], whole[end - 6 : end]) for end in (10, 11, 30, 40)]


def strangers(rng: random.Random) -> list[Sample]:
    return [make_sample(tokens(rng, length), tokens(rng, 4)) for length in (1, 3, 30)]


SHAPES = (thinking_stripped, forks, duplicates, prefixes, strangers)


def make_samples(*shapes: Callable[[random.Random], list[Sample]]) -> list[Sample]:
    """With logprobs, advantages, weights and temperatures of their own."""
    rng, chance = random.Random(7), np.random.default_rng(7)
    rows = []
    for number, row in enumerate(row for shape in shapes for row in shape(rng)):
        drawn = {
            "logprobs": chance.normal(-5.5, 0.3, len(row.mask)),
            "advantages": chance.normal(size=len(row.mask)),
            "weights": chance.random(len(row.mask)) / 100,
        }
        columns: dict[str, Any] = {
            name: np.where(row.mask, values, 0).astype(np.float32) for name, values in drawn.items()
        }
        rows.append(replace(row, rollout_id=str(number), **columns))
    return rows


def make_learner(*, share: bool, model: Any = None, **options: Any) -> Learner:
    model = (make_model() if model is None else model).double()
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            module.forward = partial(normalize, module)  # type: ignore[method-assign]  # transformers' own computes in float32
    return Learner(model, Settings(policy="tiny", learning_rate=1e-2, share_prefixes=share, **options))


def normalize(module: Any, states: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (
        module.weight * states * (states.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    )
    return scale


def step_of(learner: Learner, samples: Sequence[Sample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Every gradient, and what a step says of itself."""
    return learner.gradients(samples), dict(learner.learn(samples).metrics)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest, beside the largest of a parameter's gradient."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one)


@pytest.mark.parametrize("shape", [*SHAPES, None])
@pytest.mark.parametrize("costs", [ALWAYS, TOGETHER, NEVER, None], ids=["always", "together", "never", "the model's"])
def test_loss_and_every_gradient_are_those_of_one_call_rows(
    shape: Callable[[random.Random], list[Sample]] | None, costs: Costs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(*(SHAPES if shape is None else (shape,)))
    monkeypatch.setattr(packing, "_PIECE", 4)  # long strips are cut
    if costs is not None:
        monkeypatch.setattr("lightningrl_torch.learner.read_costs", lambda model: costs)
    plain, plain_metrics = step_of(make_learner(share=False, max_tokens_per_microbatch=1), samples)
    trees, metrics = step_of(make_learner(share=True), samples)
    assert difference(trees, plain) < 1e-10
    for name in ("loss", "grad_norm", "kl_rollout", "entropy", "clip_fraction"):
        assert metrics[name] == pytest.approx(plain_metrics[name], rel=1e-10, abs=1e-12)
    if costs in (ALWAYS, TOGETHER):
        assert metrics["trie_efficiency"] == 1.0
    assert plain_metrics["trie_efficiency"] == count_distinct(samples) / sum(
        len(sample.token_ids) for sample in samples
    )


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_a_tree_that_is_cut_for_memory_has_the_same_gradient(budget: int) -> None:
    samples = make_samples(*SHAPES)
    plain = make_learner(share=False).gradients(samples)
    assert difference(make_learner(share=True, max_tokens_per_microbatch=budget).gradients(samples), plain) < 1e-10


@pytest.mark.parametrize("options", [{"loss": "gspo"}, {"entropy_coef": 0.1}, {"gradient_checkpointing": True}])
def test_other_terms_and_checkpointed_layers_follow_the_paths(options: dict[str, Any]) -> None:
    samples = make_samples(*SHAPES)
    models = [make_model() for _ in range(2)]
    if "gradient_checkpointing" in options:
        for model in models:
            # its name since transformers 5.20
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
    plain, trees = (
        make_learner(share=share, model=model, **options).gradients(samples)
        for share, model in zip((False, True), models, strict=True)
    )
    assert difference(trees, plain) < 1e-10


def test_an_own_critic_follows_the_paths(make_backend: MakeBackend, policy: str) -> None:
    samples = [
        replace(sample, value_targets=np.where(sample.mask, np.float32(0.5), np.nan))
        for sample in make_samples(*SHAPES)
    ]
    found = [
        make_backend(critic={"model": policy}, share_prefixes=share).learn(samples).metrics for share in (False, True)
    ]
    assert found[1]["trie_efficiency"] > 2 * found[0]["trie_efficiency"] > 0.0
    assert found[1]["value_grad_norm"] == pytest.approx(found[0]["value_grad_norm"], rel=1e-4)


def visible(plan: Plan) -> dict[int, list[int]]:
    """Which tokens each token looks at."""
    paths = Paths.build(plan, torch.device("cpu"))
    found: dict[int, list[int]] = {}
    for (query_numbers, _), (_, keys, allowed) in zip(plan.calls, paths.calls, strict=True):
        for block, numbers in enumerate(query_numbers.tolist()):
            for place, query in enumerate(numbers):
                if query < 0:
                    continue
                assert query not in found
                seen = keys[block, : place + 1] if allowed is None else keys[block][allowed[block, 0, place]]
                found[query] = sorted(seen.tolist())
    return found


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=8,
    ),
    max_tokens=st.integers(1, 60),
    costs=st.sampled_from([ALWAYS, TOGETHER, NEVER, Costs(token=3.0, call=20.0)]),
)
def test_every_sample_is_a_path_of_exactly_one_tree_and_looks_along_it(
    rows: list[tuple[list[int], list[int]]], max_tokens: int, costs: Costs
) -> None:
    samples = [make_sample(prompt, completion, rollout=str(number)) for number, (prompt, completion) in enumerate(rows)]
    trees = build_trees(samples, max_tokens=max_tokens, costs=costs)
    assert sorted(sample.rollout_id for tree in trees for sample in tree.samples) == sorted(
        sample.rollout_id for sample in samples
    )
    for tree in trees:
        assert tree.size <= max_tokens or len(tree.samples[0].token_ids) > max_tokens
        ids, positions = np.concatenate(tree.token_ids), np.concatenate(tree.positions)
        looks_at = visible(plan_attention(tree.strips, tree.ends, costs))
        assert sorted(looks_at) == list(range(tree.size))
        for sample, path in zip(tree.samples, tree.paths, strict=True):
            assert ids[path].tolist() == sample.token_ids.tolist()
            assert positions[path].tolist() == list(range(len(path)))
            assert [looks_at[token] for token in path] == [path[: place + 1].tolist() for place in range(len(path))]
    if max_tokens >= sum(len(sample.token_ids) for sample in samples) and costs in (ALWAYS, TOGETHER):
        assert [tree.size for tree in trees] == [count_distinct(samples)]
    for chosen in (costs, None):
        batches = list(build_batches(samples, max_tokens=max_tokens, costs=chosen))
        assert sum(len(batch.targets) for batch in batches) == sum(int(sample.mask.sum()) for sample in samples)


def test_a_group_pays_for_its_prompt_once() -> None:
    samples = [make_sample(range(50), [number] * 5, rollout=str(number)) for number in range(8)]
    (batch,) = build_batches(samples, max_tokens=1000, costs=ALWAYS)
    assert batch.token_ids.shape == (1, 50 + 8 * 5)


def test_no_mask_is_as_large_as_all_tokens_by_all_tokens() -> None:
    """A prompt of 1,000 tokens and 32 completions of 100: the masks are a fortieth of that."""
    samples = [make_sample(range(1000), [number] * 100, rollout=str(number)) for number in range(32)]
    (batch,) = build_batches(samples, max_tokens=10_000, costs=Costs(token=1000.0, call=1000.0))
    assert batch.plan is not None and batch.token_ids.size == 4200
    masks = sum(queries.size * keys.shape[1] for queries, keys in batch.plan.calls if keys is not None)
    assert masks < 4200**2 / 4


def test_little_in_common_is_computed_twice_where_that_costs_less() -> None:
    samples = [make_sample([1], [number] * 1000, rollout=str(number)) for number in (2, 3)]
    cheap, dear = (
        next(build_batches(samples, max_tokens=5000, costs=Costs(token=cost, call=0.0))) for cost in (10.0, 1e6)
    )
    assert (cheap.token_ids.size, dear.token_ids.size) == (2002, 2001)


def test_models_that_follow_no_paths_learn_from_plain_rows() -> None:
    assert follows_paths(make_model())
    assert not follows_paths(make_model(attn_implementation="eager"))
    assert not follows_paths(make_model(use_sliding_window=True, sliding_window=4, max_window_layers=0))
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    assert follows_paths(llama)
    heads = llama.model.layers[1].self_attn
    forward = heads.forward
    heads.forward = lambda *args, paths=None, **options: forward(*args, **options)  # a layer that goes its own way
    assert not follows_paths(llama)
