"""Answers that a grammar bounds: what is sampled, what is recorded, what is trained."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from gguf_models import smollm2_file
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized

from lightningrl.backends import GenerateRequest
from lightningrl.errors import GrammarError
from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_server.rendering.grammars import format_grammar
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.gguf.format import GgufFormat
from lightningrl_torch.policy import LoadedPolicy
from lightningrl_torch.sampling import AllowedTokens, SamplingBatch, sample_tokens
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_model, make_tokenizer

jsonschema: Any = import_module("jsonschema")
TOKENIZER = make_tokenizer()
END = 256
CLOSE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': CLOSE})}"


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(
        make_model(max_position_embeddings=512),
        policy="p",
        context_length=512,
        stop_token_ids=[END],
        text_of=lambda ids: str(TOKENIZER.decode(list(ids))),
        tokenizer=TOKENIZER.backend_tokenizer.to_str,
    )
    yield engine
    engine.close()


async def sample(engine: TorchEngine, prompt: str = "a: ", **sampling: Any) -> tuple[list[int], list[float], Any]:
    settings = SamplingSettings(**{"max_tokens": 200, **sampling})
    request = GenerateRequest(id=f"r{id(sampling)}", prompt_ids=tuple(TOKENIZER.encode(prompt)), sampling=settings)
    ids: list[int] = []
    logprobs: list[float] = []
    reason = None
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason
    return ids, logprobs, reason


def text(ids: Sequence[int]) -> str:
    assert ids[-1] == END
    return str(TOKENIZER.decode(list(ids[:-1])))


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, *[st.integers(0, 50)] * 2),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda words: {"enum": words}, st.lists(st.text('abé"\\ ', max_size=4), min_size=1, unique=True)),
    st.just({"type": "string", "pattern": "^[A-C]{2}-[0-9]$"}),
    st.just({"type": "string", "format": "date"}),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.text("xyz", min_size=1, max_size=3), inner, min_size=1, max_size=3).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields)[:1],
            "additionalProperties": False,
        }
    )
    arrays = st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner)
    return objects | arrays | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


@settings(max_examples=sized(25, 500), deadline=None)
@given(schema=st.recursive(SCALARS, grown, max_leaves=4), temperature=st.sampled_from([0.0, 1.0, 2.0]))
def test_every_answer_fits_its_schema(engine: TorchEngine, schema: dict[str, Any], temperature: float) -> None:
    ids, logprobs, reason = asyncio.run(
        sample(engine, grammar=lark(schema), temperature=temperature, max_tokens=400, top_p=0.9)
    )
    assert reason is FinishReason.STOP and len(ids) == len(logprobs)
    jsonschema.validate(json.loads(text(ids)), schema)


def rows(count: int, vocabulary: int = 6, **settings: Any) -> tuple[torch.Tensor, SamplingBatch]:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)).expand(count, vocabulary)
    batch = SamplingBatch(
        temperatures=np.full(count, settings.get("temperature", 1.0), np.float32),
        top_ps=np.full(count, settings.get("top_p", 1.0), np.float32),
        top_ks=np.full(count, settings.get("top_k", 0), np.int64),
        seeds=np.arange(count, dtype=np.uint64),
        positions=np.zeros(count, np.uint64),
    )
    return logits, batch


def bound(count: int, tokens: Sequence[int], vocabulary: int = 6) -> AllowedTokens:
    mask = np.zeros((count, vocabulary), np.bool_)
    mask[:, list(tokens)] = True
    return AllowedTokens(rows=np.arange(count), tokens=mask, free=np.full(count, len(tokens) > 1))


def test_a_token_comes_of_the_renormalised_softmax_and_its_logprob_is_the_whole_ones() -> None:
    logits, batch = rows(20_000)
    tokens, logprobs = sample_tokens(logits, batch, bound(len(logits), [1, 3, 4]))
    whole = logits[0].log_softmax(-1)
    share = whole.exp()[[1, 3, 4]] / whole.exp()[[1, 3, 4]].sum()
    counted = torch.bincount(torch.tensor(tokens), minlength=6).float() / len(tokens)
    assert counted[[0, 2, 5]].sum() == 0.0
    torch.testing.assert_close(counted[[1, 3, 4]], share, atol=0.015, rtol=0.0)
    torch.testing.assert_close(torch.tensor(logprobs), whole[tokens])


def test_0_is_the_logprob_of_a_token_without_a_choice_and_of_no_other() -> None:
    logits, batch = rows(1)
    assert sample_tokens(logits, batch, bound(1, [2])) == ([2], [0.0])
    certain = torch.tensor([[200.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    tokens, (logprob,) = sample_tokens(certain, batch, bound(1, [0, 1]))
    assert tokens == [0] and -1e-20 < logprob < 0.0
    assert sample_tokens(certain, batch) == ([0], [0.0]), "unbound, it is a probability"


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.0}])
def test_truncation_is_of_what_the_grammar_leaves(settings: dict[str, Any]) -> None:
    """Also where that is as unlikely as it can be."""
    _, batch = rows(1, 6, **settings)
    logits = torch.tensor([[500.0, 0.0, 3.0, 0.0, 2.0, 0.0]])
    tokens, logprobs = sample_tokens(logits, batch, bound(1, [1, 2, 4]))
    assert tokens == [2] and logprobs == [-497.0]


def test_a_request_beside_bound_ones_is_sampled_as_alone(engine: TorchEngine) -> None:
    async def both() -> tuple[Any, Any]:
        alone = await sample(engine, seed=7, max_tokens=30)
        company, *others = await asyncio.gather(
            sample(engine, seed=7, max_tokens=30), *(sample(engine, grammar=lark(PET), seed=n) for n in range(5))
        )
        for ids, logprobs, _ in others:
            jsonschema.validate(json.loads(text(ids)), PET)
            assert 0 < sum(logprob == 0.0 for logprob in logprobs) < len(ids)
        return alone, company

    alone, company = asyncio.run(both())
    assert alone[0] == company[0]


def test_settled_text_is_written_as_the_tokenizer_writes_it_and_is_no_choice(engine: TorchEngine) -> None:
    ids, logprobs, _ = asyncio.run(sample(engine, grammar=lark({"const": {"name": "Ada", "age": 36}})))
    assert ids == [*TOKENIZER.encode('{"name": "Ada", "age": 36}'), END]
    assert logprobs == [0.0] * len(ids)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lark({"not": {"type": "string"}}), 'it has "not", which sampling cannot keep to'),
        (lark({"type": "string", "pattern": "^(?=a)b"}), "look-ahead"),
        (lark({"type": "string", "format": "foo"}), "Unknown format: foo"),
        (lark({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}), "oneOf"),
        (lark({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
        ("start: (", "Expected token"),
    ],
)
def test_a_grammar_beyond_the_library_is_refused_in_a_sentence(engine: TorchEngine, grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        asyncio.run(sample(engine, grammar=grammar))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_without_a_tokenizer_says_that_it_binds_nothing() -> None:
    engine = TorchEngine(make_model(), policy="p", context_length=128, stop_token_ids=[END])
    try:
        assert not engine.info.grammars
        with pytest.raises(GrammarError, match="this engine keeps to none"):
            asyncio.run(sample(engine, grammar=lark(PET)))
    finally:
        engine.close()


THINKING = CHATML_TEMPLATE.replace("{%- if add_gen", "{#- <think> -#}{%- if add_gen")
OPENED = THINKING.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")


@pytest.mark.parametrize(
    ("template", "fitting", "other"),
    [
        (CHATML_TEMPLATE, ["true", "false"], ["<think>", "\n", "True", "<tool_call>"]),
        (THINKING, ["true", "<think>\nhm {\n</think>\n\ntrue"], ["<think>hm</think>x", "hm"]),
        (OPENED, ["hm {\n</think>\n\ntrue", "</think>false"], ["hm</think>x"]),
    ],
)
def test_a_policy_that_may_think_thinks_before_it_is_bound(template: str, fitting: list[str], other: list[str]) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    renderer = PolicyRenderer(tokenizer)
    prompt = renderer.render([{"role": "user", "content": "?"}], None)
    grammar = format_grammar(renderer, prompt, {"type": "boolean"})
    assert grammar is not None
    own = llguidance.LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=[2])
    for said, expected in [*((one, True) for one in fitting), *((one, False) for one in other)]:
        matcher = llguidance.LLMatcher(own, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(said)
        fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert fits is expected, said


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchEngine, LoadedPolicy]]:
    folder = tmp_path_factory.mktemp("smollm2")
    GgufFormat().read(smollm2_file(), folder, lambda share: None)
    policy = LoadedPolicy(Settings(policy=str(folder)))
    engine = TorchEngine(
        policy.served,
        policy="p",
        context_length=policy.context_length,
        stop_token_ids=policy.stop_token_ids,
        text_of=policy.text_of,
        tokenizer=policy.tokenizer_text,
    )
    yield engine, policy
    engine.close()


async def test_a_pretrained_policy_keeps_to_a_schema_and_its_logprobs_are_the_models(
    smollm2: tuple[TorchEngine, LoadedPolicy],
) -> None:
    engine, policy = smollm2
    tokenizer = policy.whole.tokenizer
    messages = [{"role": "user", "content": "Name a pet. Answer in JSON with its kind and age."}]
    prompt = tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    async def one(seed: int) -> None:
        sampling = SamplingSettings(max_tokens=40, seed=seed, grammar=lark(PET))
        chunks = [c async for c in engine.generate(GenerateRequest(id=f"{seed}", prompt_ids=prompt, sampling=sampling))]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = np.array([value for chunk in chunks for value in chunk.logprobs])
        assert chunks[-1].finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(str(tokenizer.decode(ids[:-1]))), PET)
        chosen = logprobs != 0.0
        assert 2 <= chosen.sum() < len(ids) // 2, "kind and age; the rest is settled"
        with torch.inference_mode():
            logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        whole = logits.log_softmax(-1)[torch.arange(len(ids)), ids].numpy()
        assert np.abs(whole - logprobs)[chosen].max() < 1e-4

    await asyncio.gather(*(one(seed) for seed in range(3)))


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 16])
async def test_speed_of_bound_rows_is_logged(smollm2: tuple[TorchEngine, LoadedPolicy], rows: int) -> None:
    """`pytest --long -k speed -o log_cli=true -o log_cli_level=INFO` on this file says what docs/how-to/agents/structured.md quotes."""
    engine, policy = smollm2
    messages = [{"role": "user", "content": "Write many words."}]
    prompt = tuple(policy.whole.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    grammar = lark({"type": "array", "items": {"type": "string"}, "minItems": 400})

    async def one(seed: int, grammar: str) -> int:
        sampling = SamplingSettings(max_tokens=48, seed=seed, grammar=grammar)
        request = GenerateRequest(id=f"{seed}", prompt_ids=prompt, sampling=sampling)
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def speed(grammar: str) -> float:
        began = time.process_time()
        tokens = sum(await asyncio.gather(*(one(seed, grammar) for seed in range(rows))))
        assert tokens <= 48 * rows and (not grammar or tokens == 48 * rows)
        return tokens / (time.process_time() - began)

    await speed(grammar)
    pairs = [(await speed(""), await speed(grammar)) for _ in range(3)]
    free, bound_too = (float(np.median(values)) for values in zip(*pairs, strict=True))
    logging.getLogger(__name__).info(
        "%d rows: %.1f tokens per CPU second, bound %.1f: %.2f", *(rows, free, bound_too, bound_too / free)
    )
