"""Our forward passes of Llama-shaped models against transformers': the same keys, values and logits."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lightningrl_torch.decoder import Prefiller
from lightningrl_torch.forward import Forward, GraphedForward, _Step, build_forward
from lightningrl_torch.llama import LARGE, LEAST, ONE_DNN, LlamaForward, join_rows, multiply, plan_calls
from lightningrl_torch.models import read_traits
from lightningrl_torch.plain import PlainForward
from lightningrl_torch.slots import KeyValues, SlotCache
from lightningrl_torch.testing import make_config, make_model

PROMPTS = [(1, 2, 3, 4, 5, 6, 7), (9, 8, 7), (1, 2, 3, 4, 5, 9, 9, 9, 9)]
STEPS = [(11, 12, 13), (21, 22, 23), (31, 32, 33)]


def of_llama(**overrides: Any) -> PreTrainedModel:
    values = {**make_config().to_dict(), "head_dim": None, **overrides}
    for name in ("model_type", "layer_types", "use_sliding_window", "architectures", "rope_parameters"):
        values.pop(name, None) if name not in overrides else None
    return _seeded(LlamaForCausalLM, LlamaConfig(**values))


def of_qwen3(**overrides: Any) -> PreTrainedModel:
    values = {**make_config().to_dict(), "head_dim": 12, **overrides}
    for name in ("model_type", "layer_types", "architectures", "rope_parameters"):
        values.pop(name)
    return _seeded(Qwen3ForCausalLM, Qwen3Config(**values))


def with_lora() -> PreTrainedModel:
    model = make_model(tie_word_embeddings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is about to go
        adapted = get_peft_model(
            model, LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return model


def _seeded(kind: Any, config: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: PreTrainedModel = kind(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


MODELS = {
    "qwen2": make_model,
    "llama": of_llama,
    "llama with biases": lambda: of_llama(attention_bias=True, tie_word_embeddings=False),
    "llama 3's rotary": lambda: of_llama(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "qwen3": of_qwen3,
    "lora": with_lora,
}


def test_a_graph_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS["qwen2"]()
    traits = read_traits(model, "qwen2")
    forward = build_forward(model, traits, autocast=False)
    assert isinstance(forward, LlamaForward)
    plain = generate(forward, traits.layers)
    compute = _Step._compute
    monkeypatch.setattr(_Step, "_compute", lambda step: 1.1 * compute(step))
    graphed = GraphedForward(forward, captures=False)
    assert largest_difference(generate(graphed, traits.layers)[1], plain[1]) < 1e-5
    assert [record.message for record in caplog.records] == [
        "decoding by CUDA graphs gives other logits on this device; it goes on without them"
    ]


@torch.inference_mode()
def test_memory_that_the_engine_gives_back_is_kept_by_no_graph() -> None:
    model = MODELS["qwen2"]()
    forward = build_forward(model, read_traits(model, "qwen2"), autocast=False)
    assert isinstance(forward, LlamaForward)
    graphed, cache = GraphedForward(forward, captures=False), SlotCache(forward.layers)
    cache.join(forward.prefill([PROMPTS[0]], [[]]))
    cache.make_room()
    length = torch.tensor([len(PROMPTS[0])])
    graphed.decode(torch.tensor([1]), length, cache, None)
    held = weakref.ref(cache.layers[0].buffers[0])
    cache.clear()
    gc.collect()
    assert held() is None


@torch.inference_mode()
def generate(forward: Forward, layers: int) -> tuple[list[KeyValues], list[Tensor]]:
    """Keys and values of the prompts, and logits of some steps in which rows of different lengths stand side by
    side."""
    cache = SlotCache(layers)
    prefixes = [kv for prompt in PROMPTS for kv in forward.prefill([prompt], [[]])]
    cache.join(prefixes)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    found = []
    for tokens in STEPS:
        cache.make_room()
        padding = torch.from_numpy(cache.width - lengths)
        allowed = torch.arange(cache.width + 1) >= padding[:, None]
        found.append(forward.decode(torch.tensor(tokens), torch.from_numpy(lengths), cache, allowed).clone())
        cache.advance()
        lengths = lengths + 1
    return prefixes, found


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((left - right).abs().max()) for left, right in zip(one, other, strict=True))


def flat(prefixes: list[KeyValues]) -> list[Tensor]:
    return [state for kv in prefixes for states in kv for state in states.unbind()]


@pytest.mark.parametrize("name", MODELS)
def test_keys_values_and_logits_are_those_of_transformers(name: str) -> None:
    model = MODELS[name]()
    traits = read_traits(model, name)
    plain = generate(PlainForward(model, traits, autocast=False), traits.layers)
    forward = build_forward(model, traits, autocast=False)
    assert isinstance(forward, LlamaForward)

    ours = generate(forward, traits.layers)
    assert largest_difference(flat(ours[0]), flat(plain[0])) < 1e-5
    assert largest_difference(ours[1], plain[1]) < 1e-5
    graphed = generate(GraphedForward(forward, captures=False), traits.layers)
    assert largest_difference(graphed[1], plain[1]) < 1e-5
    again = generate(PlainForward(model, traits, autocast=False), traits.layers)
    assert largest_difference(again[1], plain[1]) == 0.0, "the model's own weights have changed"


@torch.inference_mode()
def test_prompts_of_any_length_are_one_pass_and_go_on_where_a_remembered_one_ends() -> None:
    model = make_model()
    forward = build_forward(model, read_traits(model, "policy"), autocast=False)
    alone = [kv for prompt in PROMPTS for kv in forward.prefill([prompt], [[]])]
    together = forward.prefill(PROMPTS, [[], [], []])
    assert largest_difference(flat(together), flat(alone)) < 1e-5
    beginning = [states[:, :, :5] for states in alone[0]]
    for new in (PROMPTS[2][5:], PROMPTS[2][5:6]):
        resumed = forward.prefill([new, PROMPTS[1]], [beginning, []])
        whole = forward.prefill([(*PROMPTS[2][:5], *new), PROMPTS[1]], [[], []])
        assert largest_difference(flat(resumed), flat(whole)) < 1e-5


def test_weights_that_learn_are_the_ones_that_are_served() -> None:
    model = make_model()
    traits = read_traits(model, "policy")
    forward = build_forward(model, traits, autocast=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.ones_like(parameter), alpha=0.01)
    forward.refresh()
    changed = generate(PlainForward(model, traits, autocast=False), traits.layers)[1]
    assert largest_difference(generate(forward, traits.layers)[1], changed) < 1e-5


def test_in_bfloat16_it_is_as_near_to_float32_as_transformers_is() -> None:
    model = make_model()
    traits = read_traits(model, "policy")
    exact = generate(PlainForward(model, traits, autocast=False), traits.layers)[1]
    plain = generate(PlainForward(model, traits, autocast=True), traits.layers)[1]
    ours = generate(build_forward(model, traits, autocast=True), traits.layers)[1]
    assert largest_difference(ours, exact) < 2 * largest_difference(plain, exact)


@pytest.mark.parametrize(
    "overrides",
    [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}],
)
def test_what_it_does_not_know_is_left_to_transformers(overrides: dict[str, Any]) -> None:
    model = of_llama(**overrides)
    assert isinstance(build_forward(model, read_traits(model, "policy"), autocast=False), PlainForward)


def test_parameters_become_rows_of_one_tensor_once() -> None:
    parts = [torch.nn.Parameter(torch.full((size, 3), float(size))) for size in (2, 4)]
    joined = join_rows(parts)
    assert joined.tolist() == [[2.0] * 3] * 2 + [[4.0] * 3] * 4
    assert join_rows(parts).data_ptr() == joined.data_ptr()
    with torch.no_grad():
        parts[1].fill_(9.0)
    assert joined[2:].eq(9.0).all()
    assert join_rows([parts[1], parts[0]]).tolist() == [[9.0] * 3] * 4 + [[2.0] * 3] * 2


@torch.inference_mode()
def test_a_prompt_pays_for_what_no_remembered_prompt_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    forward = build_forward(model, read_traits(model, "policy"), autocast=False)
    computed: list[int] = []
    compute = forward.prefill

    def count(sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        computed.extend(map(len, sequences))
        return compute(sequences, before)

    monkeypatch.setattr(forward, "prefill", count)
    prefiller = Prefiller(forward, batch_tokens=256, cache_tokens=100)
    schema = tuple(range(1, 31))
    prompts = [(*schema, 40, 41), (*schema, 40, 50, 51), schema, (*schema[:10], 60)]
    found = [prefiller.prefill([prompt])[0] for prompt in prompts]
    assert computed == [32, 2, 1, 11], "the third ends inside another; the last has too little in common"
    fresh = [compute([prompt], [[]])[0] for prompt in prompts]
    assert largest_difference(flat(found), flat(fresh)) < 1e-5

    prefiller.prefill([tuple(range(100, 195))])  # takes the place of all others
    computed.clear()
    prefiller.prefill([prompts[0], prompts[0]])
    assert computed == [32]
    prefiller.clear()
    prefiller.prefill([prompts[0]])
    assert computed == [32, 32]


@pytest.mark.parametrize("rows", [1, 8, 100])
@torch.inference_mode()
def test_large_matrices_are_multiplied_as_small_ones_are(rows: int) -> None:
    weight, bias, x = torch.randn(1030, 1040) * 0.03, torch.randn(1030), torch.randn(2 * rows, 1040)[::2]
    assert weight.numel() >= LARGE
    for one in (None, bias):
        assert largest_difference([multiply(x, weight, one)], [torch.nn.functional.linear(x, weight, one)]) < 1e-5


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a GPU would be started for: operations that are no mere view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def waiting_prompts(number: int, *, lengths: tuple[int, int] = (20, 20)) -> list[tuple[int, ...]]:
    rng = random.Random(number)
    return [tuple(rng.randrange(256) for _ in range(rng.randint(*lengths))) for _ in range(number)]


def test_many_waiting_prompts_start_hardly_more_operations_than_a_few() -> None:
    """Attention and copies were started prompt by prompt and layer by layer: on a GPU half of a batch's time."""
    model = make_model()
    forward = build_forward(model, read_traits(model, "policy"), autocast=False)
    counts = []
    for prompts in (waiting_prompts(4), waiting_prompts(64)):
        with torch.no_grad(), Operations() as operations:
            prefiller, cache = Prefiller(forward, batch_tokens=4096, cache_tokens=4096), SlotCache(forward.layers)
            cache.join(prefiller.prefill(prompts))
        counts.append(operations.count)
    assert counts[1] - counts[0] <= 60, "one copy for each prompt that is remembered"


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "lora"])
@pytest.mark.parametrize("least", [0.0, 0.5, 1.0])
@torch.inference_mode()
def test_prompts_that_wait_together_have_the_keys_and_values_of_each_alone(
    name: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any lengths, new ones beside those that go on from remembered ones, in a few passes."""
    monkeypatch.setitem(LEAST, "cpu", least)
    model = MODELS[name]()
    forward = build_forward(model, read_traits(model, name), autocast=False)
    shared = waiting_prompts(1, lengths=(40, 40))[0]
    longer = [(*shared[:30], *prompt) for prompt in waiting_prompts(5, lengths=(1, 9))]
    prompts = [*waiting_prompts(9, lengths=(1, 60)), *longer, (*shared, 1), shared[:20], longer[0], ()]
    prefiller = Prefiller(forward, batch_tokens=128, cache_tokens=4096)
    prefiller.prefill([shared])
    found = prefiller.prefill(prompts)
    alone = [forward.prefill([prompt], [[]])[0] if prompt else [] for prompt in prompts]
    assert largest_difference(flat(found), flat(alone)) < 1e-5

    together, one_by_one = SlotCache(forward.layers), SlotCache(forward.layers)
    together.join(found)
    for kv in alone:
        one_by_one.join([kv])
    for row, prompt in enumerate(prompts):
        for layer, other in zip(together.layers, one_by_one.layers, strict=True):
            for buffer, expected in zip(layer.buffers, other.buffers, strict=True):
                found_states, states = (
                    memory[row, :, cache.end - len(prompt) : cache.end]
                    for memory, cache in ((buffer, together), (expected, one_by_one))
                )
                torch.testing.assert_close(found_states, states, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_prompts_that_wait_together_pay_once_for_their_common_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computed all of it where none had come before them."""
    model = make_model()
    forward = build_forward(model, read_traits(model, "policy"), autocast=False)
    passes: list[list[int]] = []
    compute = forward.prefill

    def count(sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        passes.append(sorted(map(len, sequences)))
        return compute(sequences, before)

    monkeypatch.setattr(forward, "prefill", count)
    schema = tuple(range(1, 51))
    prompts = [(*schema, 60 + number, *range(number)) for number in range(4)]
    found = Prefiller(forward, batch_tokens=4096, cache_tokens=4096).prefill(prompts)
    assert passes == [[51], [2, 3, 4]]
    assert largest_difference(flat(found), flat([compute([prompt], [[]])[0] for prompt in prompts])) < 1e-5


@given(
    tokens=st.lists(st.tuples(st.integers(1, 300), st.sampled_from([0, 0, 5, 200])), min_size=1, max_size=40),
    least=st.floats(0.0, 1.0),
)
def test_a_call_of_attention_is_padded_no_further_than_its_share(tokens: list[tuple[int, int]], least: float) -> None:
    new, past = ([pair[side] for pair in tokens] for side in (0, 1))
    calls = plan_calls(new, past, least)
    assert sorted(number for call in calls for number in call) == list(range(len(tokens)))
    for call in calls:
        assert len({past[number] > 0 for number in call}) == 1
        widest = max(new[number] for number in call)
        area = len(call) * widest * (widest + max(past[number] for number in call))
        assert sum(new[number] * (new[number] + past[number]) for number in call) >= least * area * (1 - 1e-9)


@pytest.mark.skipif(not ONE_DNN, reason="torch without oneDNN")
@pytest.mark.parametrize("name", ["qwen2", "lora"])
def test_weights_in_the_order_of_one_dnn_follow_those_that_learn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightningrl_torch.llama.LARGE", 1)
    model = MODELS[name]().cpu()
    traits = read_traits(model, name)
    forward = build_forward(model, traits, autocast=False)
    assert isinstance(forward, LlamaForward)
    for _ in range(2):
        expected = generate(PlainForward(model, traits, autocast=False), traits.layers)[1]
        assert largest_difference(generate(forward, traits.layers)[1], expected) < 1e-5
        assert all(projection.packed for projection in forward._projections)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.ones_like(parameter), alpha=0.01)
        forward.refresh()
    assert not any(projection.packed for projection in forward._projections), "given back while weights are learned"
