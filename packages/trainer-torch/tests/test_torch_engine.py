"""The engine: what a request gets, alone and in company."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import PATIENCE_S
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from lightningrl.backends import Engine, GenerateRequest, TokenChunk
from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable
from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_torch.decoder import Decoder
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.forward import GraphedForward
from lightningrl_torch.llama import LlamaForward, find_forward
from lightningrl_torch.sampling import AllowedTokens, SamplingBatch, _truncate, draw_noise, gumbel_of, sample_tokens
from lightningrl_torch.settings import EngineSettings
from lightningrl_torch.slots import SharedPrompt
from lightningrl_torch.testing import make_model, make_tokenizer

Result = tuple[list[int], list[float], list[int], FinishReason]


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def make_engine(model: Any = None, *, seed: int = 0, **options: Any) -> TorchEngine:
    tokenizer = make_tokenizer()
    return TorchEngine(
        model or make_model(),
        policy="tiny",
        context_length=128,
        text_of=lambda ids: str(tokenizer.decode(list(ids))),
        seed=seed,
        settings=EngineSettings(threads=1, **options),
    )


def make_request(number: int = 0, *, prompt: tuple[int, ...] | None = None, **sampling: Any) -> GenerateRequest:
    rng = random.Random(number)
    ids = prompt or tuple(rng.randrange(256) for _ in range(rng.randint(1, 60)))
    return GenerateRequest(
        id=f"q{number}", prompt_ids=ids, sampling=SamplingSettings(**{"max_tokens": 12, "seed": number, **sampling})
    )


async def collect(engine: TorchEngine, request: GenerateRequest, delay: float = 0.0) -> Result:
    await asyncio.sleep(delay)
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        versions += [chunk.policy_version] * len(chunk.token_ids)
        reason = chunk.finish_reason
    assert reason is not None
    return ids, logprobs, versions, reason


async def test_a_request_gets_the_same_alone_and_among_others_that_join_at_random_times(engine: TorchEngine) -> None:
    rng = random.Random(0)
    requests = [make_request(number, max_tokens=rng.randint(1, 40)) for number in range(31)]
    alone = [await collect(engine, request) for request in requests]
    together = await asyncio.gather(*(collect(engine, request, rng.random() * 0.1) for request in requests))
    for one, other in zip(alone, together, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], atol=1e-4)
        assert one[2:] == other[2:]


async def test_decoding_in_the_shapes_of_a_graph_gives_the_same(engine: TorchEngine) -> None:
    """Rounded rows and the whole slot memory, as a GPU replays them: rows join and leave, the memory grows."""
    forward = find_forward(make_model(), autocast=False)
    assert forward is not None
    graphed = make_engine(GraphedForward(forward, captures=False))
    rng = random.Random(1)
    requests = [make_request(number, max_tokens=rng.randint(1, 60)) for number in range(31)]
    plain = [await collect(engine, request) for request in requests]
    found = await asyncio.gather(*(collect(graphed, request, rng.random() * 0.1) for request in requests))
    graphed.close()
    for one, other in zip(plain, found, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], atol=1e-4)


async def test_a_prompt_that_is_read_once_for_all_rows_gives_the_same(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin alike, rows that do not, prompts that are no more than what is shared; they join and leave, and
    another beginning comes after the first."""
    monkeypatch.setattr("lightningrl_torch.decoder.LEAST_SAVED", 1)
    rng = random.Random(2)
    beginnings = [tuple(rng.randrange(256) for _ in range(60)) for _ in range(2)]
    turns = [
        [
            make_request(number, prompt=(*begun, *tail), max_tokens=rng.randint(1, 30))
            for number, tail in enumerate([(), (5,), *(tuple(rng.choices(range(256), k=n)) for n in range(1, 12))])
        ]
        for begun in beginnings
    ]
    strangers = [make_request(100 + number, max_tokens=rng.randint(1, 40)) for number in range(6)]
    alone = [[await collect(engine, request) for request in (*turn, *strangers)] for turn in turns]

    sharing = make_engine()
    attended = 0
    attend = SharedPrompt.attend

    def count(self: SharedPrompt, *arguments: Any) -> Any:
        nonlocal attended
        attended += 1
        return attend(self, *arguments)

    monkeypatch.setattr(SharedPrompt, "attend", count)
    for turn, expected in zip(turns, alone, strict=True):
        found = await asyncio.gather(
            *(collect(sharing, request) for request in turn),
            *(collect(sharing, request, rng.random() * 0.05) for request in strangers),
        )
        for one, other in zip(expected, found, strict=True):
            assert one[0] == other[0]
            np.testing.assert_allclose(one[1], other[1], atol=1e-5)
    sharing.close()
    assert attended > 0


async def test_more_requests_than_places_wait_their_turn() -> None:
    engine = make_engine(max_batch=4)
    results = await asyncio.gather(*(collect(engine, make_request(number)) for number in range(20)))
    engine.close()
    assert [len(ids) for ids, *_ in results] == [12] * 20


def greedy(model: Any, prompt: tuple[int, ...], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    make_config: Any = GenerationConfig
    config = make_config(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return list(
            model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
                0, len(prompt) :
            ].tolist()
        )


def make_sliding() -> Any:
    torch.manual_seed(1)
    build: Any = MistralForCausalLM
    return build(
        MistralConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=16, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None,
        )
    ).eval()  # fmt: skip


def make_gpt2() -> Any:
    torch.manual_seed(1)
    build: Any = GPT2LMHeadModel
    return build(
        GPT2Config(
            vocab_size=264,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()


@pytest.mark.parametrize(
    "make",
    [make_model, make_sliding, make_gpt2, lambda: make_model(attn_implementation="eager")],
    ids=["qwen2", "mistral-sliding", "gpt2", "qwen2-eager"],
)
async def test_greedy_is_what_transformers_generates(make: Any) -> None:
    model = make()
    engine = make_engine(model)
    requests = [make_request(number, temperature=0.0, max_tokens=30) for number in range(12)]
    results = await asyncio.gather(
        *(collect(engine, request, 0.01 * number) for number, request in enumerate(requests))
    )
    engine.close()
    for request, (ids, *_) in zip(requests, results, strict=True):
        assert ids == greedy(model, request.prompt_ids, 30)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_logprobs_are_those_of_a_full_forward_at_the_temperature(engine: TorchEngine, temperature: float) -> None:
    model = make_model()
    requests = [make_request(number, temperature=temperature, top_p=0.9, max_tokens=30) for number in range(8)]
    for request, (ids, logprobs, *_) in zip(
        requests, await asyncio.gather(*(collect(engine, one) for one in requests)), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = (logits / (temperature or 1.0)).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-4)


async def test_no_seed_gives_different_completions(engine: TorchEngine) -> None:
    requests = [make_request(1, seed=None) for _ in range(4)]
    results = await asyncio.gather(*(collect(engine, request) for request in requests))
    assert len({tuple(ids) for ids, *_ in results}) == 4


async def test_a_call_of_a_rollout_has_one_completion_per_seed_of_the_run_whatever_comes_first_and_beside_it() -> None:
    calls = [replace(make_request(number % 6, seed=None), session=f"g000000-{number % 3:03}/1") for number in range(24)]

    async def sample(seed: int, order: Sequence[int]) -> dict[tuple[str, tuple[int, ...]], list[list[int]]]:
        """What each prompt of each session gave, the first time that it was sent, the second and so on."""
        engine = make_engine(seed=seed, max_batch=5)
        results = await asyncio.gather(*(collect(engine, calls[place]) for place in order))
        engine.close()
        found: dict[tuple[str, tuple[int, ...]], list[list[int]]] = {}
        for place, (ids, *_) in zip(order, results, strict=True):
            found.setdefault((calls[place].session, calls[place].prompt_ids), []).append(ids)
        return found

    first = await sample(7, range(24))
    assert await sample(7, random.Random(1).sample(range(24), 24)) == first
    sampled = {tuple(ids) for several in first.values() for ids in several}
    assert len(sampled) == 24, "a prompt that is sent again is sampled again"
    assert not sampled & {tuple(ids) for several in (await sample(8, range(24))).values() for ids in several}


async def test_stop_string_ends_with_the_token_that_completes_it(engine: TorchEngine) -> None:
    free, *_ = await collect(engine, make_request(3, max_tokens=40))
    text_of = make_tokenizer().decode
    stop = next(text_of(free[at : at + 2]) for at in range(10, 38) if "�" not in text_of(free[at : at + 2]))
    ids, logprobs, _, reason = await collect(engine, make_request(3, max_tokens=40, stop=("never this", stop)))
    assert reason is FinishReason.STOP
    assert ids == free[: len(ids)]
    assert len(logprobs) == len(ids)
    assert stop in text_of(ids)
    assert stop not in text_of(ids[:-1])


async def test_stop_token_is_part_of_the_completion(engine: TorchEngine) -> None:
    free, *_ = await collect(engine, make_request(4, max_tokens=40))
    ids, _, _, reason = await collect(engine, make_request(4, max_tokens=40, stop_token_ids=(free[7],)))
    assert reason is FinishReason.STOP
    assert ids == free[: free.index(free[7]) + 1]


async def test_max_tokens_and_the_context_end_a_completion(engine: TorchEngine) -> None:
    ids, _, _, reason = await collect(engine, make_request(5, max_tokens=3))
    assert (len(ids), reason) == (3, FinishReason.LENGTH)
    ids, _, _, reason = await collect(engine, make_request(5, prompt=(7,) * 120, max_tokens=100))
    assert (len(ids), reason) == (8, FinishReason.LENGTH)


async def test_a_prompt_without_room_overflows(engine: TorchEngine) -> None:
    with pytest.raises(ContextOverflow, match="128 tokens leaves no room in a context of 128"):
        await collect(engine, make_request(prompt=(7,) * 128))


@pytest.mark.parametrize(("prompt", "sampling"), [((9999,), {}), ((1, -1), {}), ((1,), {"max_tokens": 0})])
async def test_impossible_requests_are_refused_alone(
    engine: TorchEngine, prompt: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    with pytest.raises(BackendError, match="q0"):
        await collect(engine, make_request(prompt=prompt, **sampling))


async def test_completions_stream_while_they_are_sampled() -> None:
    engine = make_engine(stream_interval_s=0.0)
    chunks = [chunk async for chunk in engine.generate(make_request(6, max_tokens=50))]
    engine.close()
    assert len(chunks) > 10
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


async def test_closing_the_iterator_frees_the_place() -> None:
    engine = make_engine(max_batch=1, stream_interval_s=0.0)
    stream = engine.generate(make_request(6, max_tokens=100))
    await anext(stream)
    waiting = engine.generate(make_request(7))
    task = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    task.cancel()
    await stream.aclose()  # type: ignore[attr-defined]
    ids, *_ = await asyncio.wait_for(collect(engine, make_request(8)), PATIENCE_S)
    assert len(ids) == 12
    with engine.held():
        pass
    engine.close()


async def test_held_waits_for_the_running_and_keeps_the_new_waiting() -> None:
    engine = make_engine()
    running = asyncio.ensure_future(collect(engine, make_request(1, prompt=(1,), max_tokens=100)))
    await asyncio.sleep(0.02)

    def update() -> asyncio.Task[Result]:
        with engine.held():
            late = asyncio.run_coroutine_threadsafe(collect(engine, make_request(2)), loop)
            engine.set_version(1)
            return late  # type: ignore[return-value]

    loop = asyncio.get_running_loop()
    late = await asyncio.to_thread(update)
    assert set((await running)[2]) == {0}
    assert set((await asyncio.wrap_future(late))[2]) == {1}
    engine.close()


async def test_version_is_not_set_while_requests_may_run(engine: TorchEngine) -> None:
    with pytest.raises(BackendError, match=r"engine\.held"):
        engine.set_version(4)


async def test_a_failing_model_fails_its_requests_and_the_next_are_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_model())
    with monkeypatch.context() as broken:
        broken.setattr(LlamaForward, "decode", lambda *_: 1 / 0)
        with pytest.raises(BackendError, match="ZeroDivisionError"):
            await collect(engine, make_request(1))
    assert len((await collect(engine, make_request(1)))[0]) == 12
    engine.close()
    assert "failed in mid-decode" in caplog.text


async def test_what_fails_as_a_request_leaves_fails_its_companions_and_the_next_are_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the thread, and whoever asked waited for ever."""
    engine = make_engine(stream_interval_s=0.0)
    leaving = engine.generate(make_request(6, max_tokens=100))
    await anext(leaving)
    with monkeypatch.context() as broken:
        broken.setattr(Decoder, "drop", lambda *_: 1 / 0)
        companion = engine.generate(make_request(7, max_tokens=100))
        await anext(companion)
        await leaving.aclose()  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match="ZeroDivisionError"):
            await asyncio.wait_for(read_to_the_end(companion), PATIENCE_S)
    assert len((await asyncio.wait_for(collect(engine, make_request(1)), PATIENCE_S))[0]) == 12
    engine.close()
    assert "failed in mid-decode" in caplog.text


async def read_to_the_end(stream: AsyncIterator[TokenChunk]) -> None:
    async for _ in stream:
        pass


async def test_weights_that_are_not_finite_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    weight = model.model.norm.weight.detach().clone()
    model.model.norm.weight.data.fill_(float("nan"))
    engine = make_engine(model)
    with pytest.raises(BackendError, match="not finite"):
        await collect(engine, make_request(1))
    model.model.norm.weight.data.copy_(weight)
    assert len((await collect(engine, make_request(1)))[0]) == 12
    engine.close()


async def test_closing_fails_the_running_request() -> None:
    engine = make_engine()
    running = asyncio.ensure_future(collect(engine, make_request(1, prompt=(1,), max_tokens=120)))
    await asyncio.sleep(0.01)
    await asyncio.to_thread(engine.close)
    with pytest.raises(EngineUnavailable):
        await running
    with pytest.raises(EngineUnavailable, match="closed"):
        await collect(engine, make_request(2))


async def test_requests_of_several_event_loops_are_served(engine: TorchEngine) -> None:
    def ask(number: int) -> Any:
        return asyncio.run(collect(engine, make_request(number)))

    results = await asyncio.gather(*(asyncio.to_thread(ask, number) for number in range(4)))
    assert [ids for ids, *_ in results] == [(await collect(engine, make_request(number)))[0] for number in range(4)]


def test_the_engine_is_an_engine(engine: TorchEngine) -> None:
    assert isinstance(engine, Engine)
    assert (engine.info.policy, engine.info.version, engine.info.context_length) == ("tiny", 0, 128)


def make_batch(
    rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0
) -> SamplingBatch:
    return SamplingBatch(
        temperatures=np.full(rows, temperature, np.float32),
        top_ps=np.full(rows, top_p, np.float32),
        top_ks=np.full(rows, top_k, np.int64),
        seeds=np.full(rows, seed, np.uint64),
        positions=np.arange(rows, dtype=np.uint64),
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 20),
    temperature=st.floats(0.1, 3.0),
)
def test_sampled_tokens_are_within_top_k_and_top_p(seed: int, top_p: float, top_k: int, temperature: float) -> None:
    torch.manual_seed(seed % 2**32)
    logits = torch.randn(16, 16) * 3
    tokens, logprobs = sample_tokens(
        logits, make_batch(16, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    )
    full = (logits / temperature).log_softmax(-1)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert logprob == pytest.approx(float(full[row, token]), abs=1e-5)
        better = full[row][full[row] > full[row, token]]
        assert top_k == 0 or len(better) < top_k
        kept = full[row].exp().sort(descending=True).values[: top_k or None].sum()
        assert float(better.exp().sum() / kept) < top_p + 1e-5


@pytest.mark.parametrize("top_k", [0, 1, 7, 3000, 9000])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.95, 1.0])
def test_truncation_of_a_large_vocabulary_is_that_of_all_of_it_sorted(top_k: int, top_p: float) -> None:
    """Likely ones alone are sorted. Rows: peaked, flat, of equal tokens, of a few that a grammar left."""
    torch.manual_seed(1)
    logits = torch.randn(5, 6000) * torch.tensor([5.0, 1.0, 0.0, 2.0, 3.0])[:, None]
    logits[3] = logits[3].round()
    logits[4, 4:] = -torch.inf
    probs = logits.softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(6000) >= (top_k or 6000), 0.0)
    outside = ordered.cumsum(-1) - ordered >= top_p * ordered.sum(-1, keepdim=True)
    outside[:, 0] = False
    expected = torch.zeros_like(probs).scatter(
        -1, order, ordered if top_p == 1.0 else ordered.masked_fill(outside, 0.0)
    )
    truncated = _truncate(probs, torch.full((5,), top_k), torch.full((5,), top_p))
    assert ((truncated > 0) != (expected > 0)).sum() <= 1, "a sum in another order may round to the other side"
    assert torch.equal(truncated[truncated > 0], probs[truncated > 0])


def test_many_rows_are_sampled_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a few at a time: some bound by a grammar, some truncated, some greedy."""
    torch.manual_seed(2)
    logits = torch.randn(9, 300) * 3
    batch = replace(
        make_batch(9, seed=5),
        temperatures=np.array([1, 0, 0.7] * 3, np.float32),
        top_ps=np.array([1, 1, 1, 0.5, 0.9, 0.9, 1, 1, 1], np.float32),
    )
    tokens = np.random.default_rng(0).random((3, 300)) < 0.1
    allowed = AllowedTokens(rows=np.array([1, 4, 8]), tokens=tokens, free=np.array([True, True, False]))
    together = sample_tokens(logits, batch, allowed)
    monkeypatch.setattr("lightningrl_torch.sampling.IN_CACHE", 700)
    assert sample_tokens(logits, batch, allowed) == together


def test_sampling_follows_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    tokens, _ = sample_tokens(probs.log().expand(20000, 4), make_batch(20000, seed=3))
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 20000, probs.numpy(), atol=0.015)


def test_noise_depends_on_seed_and_position_alone_and_is_gumbel() -> None:
    seeds, positions = np.array([1, 2, 1], np.uint64), np.array([5, 5, 5], np.uint64)
    noise = draw_noise(seeds, positions, 50, torch.device("cpu"))
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    many = draw_noise(np.zeros(300, np.uint64), np.arange(300, dtype=np.uint64), 300, torch.device("cpu"))
    assert torch.isfinite(many).all()
    assert many.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert many.var().item() == pytest.approx(1.6449, abs=0.05)
    for pair in ((many[1:], many[:-1]), (many[:, 1:], many[:, :-1])):
        assert abs(np.corrcoef(pair[0].flatten(), pair[1].flatten())[0, 1]) < 0.015


def test_noise_is_finite_for_every_number_and_the_last_is_the_largest() -> None:
    numbers = torch.arange(2**24, dtype=torch.int32)
    noise = gumbel_of(numbers)
    assert torch.isfinite(noise).all()
    assert bool((noise[1:] >= noise[:-1]).all())
    plain = numbers[:-1].float().add_(0.5).mul_(2.0**-24).log_().neg_().log_().neg_()
    assert torch.equal(noise[:-1], plain)
    assert noise[-1].item() == pytest.approx(-math.log(-math.log1p(-(2.0**-25))), abs=1e-5)


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.5}, {}])
def test_the_largest_noise_draws_no_token_that_is_cut_or_improbable(cut: dict[str, Any]) -> None:
    worst = replace(
        make_batch(1, **cut), positions=np.array([29500], np.uint64)
    )  # token 38 of it has the last of the 2^24 numbers
    assert int(draw_noise(worst.seeds, worst.positions, 1000, torch.device("cpu")).argmax()) == 38
    logits = torch.zeros(1, 1000)
    logits[0, 7], logits[0, 38] = 30.0, -30.0
    assert sample_tokens(logits, worst)[0] == [7]
