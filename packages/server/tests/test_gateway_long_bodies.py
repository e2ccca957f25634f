"""One agent's body, however long, wide or deep: refused or answered, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.errors import ContextOverflow
from lightningrl.types import SamplingSettings
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import QuickTokenizer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
LONG = {"role": "user", "content": "word " * 8_000}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path, engine=ScriptedEngine(tiny_tokenizer(), context_length=1000)) as running:
        yield running


async def post(attempt: LiveAttempt, path: str = "chat/completions", **body: Any) -> tuple[int, str]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(
            f"{attempt.base_url}/{path}",
            headers={"Authorization": f"Bearer {attempt.key}"},
            json={"model": "m", **body},
        )
    return answer.status_code, answer.text


class WaitingRenderer(PolicyRenderer):
    """Renders a long prompt only once another call was answered."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer())
        self.answered = threading.Event()

    def render(self, messages: Any, tools: Any, context_length: int | None = None) -> tuple[int, ...]:
        if len(messages[0]["content"]) > 1000:
            assert self.answered.wait(PATIENCE_S), "the event loop was held"
        return super().render(messages, tools, context_length)


async def test_a_long_prompt_is_rendered_while_other_calls_are_answered(tmp_path: Path) -> None:
    renderer = WaitingRenderer()
    engine = ScriptedEngine(tiny_tokenizer(), context_length=100_000)
    async with live_gateway(tmp_path, engine=engine, renderer=renderer) as gateway:
        long = asyncio.create_task(post(await gateway.attempt(), messages=[LONG]))
        assert (await post(await gateway.attempt(), messages=[USER]))[0] == 200
        renderer.answered.set()
        assert (await long)[0] == 200


class CountingTokenizer(QuickTokenizer):
    """Adds up what it is given to tokenise."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer())
        self.characters = 0
        core = self._core

        class Core:
            def encode(_, text: str, **options: Any) -> Any:  # noqa: N805
                self.characters += len(text)
                return core.encode(text, **options)

            def encode_batch_fast(_, texts: list[str], **options: Any) -> Any:  # noqa: N805
                self.characters += sum(map(len, texts))
                return core.encode_batch_fast(texts, **options)

        self._core = Core()


def test_a_text_far_beyond_the_context_is_given_up_after_a_few_contexts() -> None:
    tokenizer = CountingTokenizer()
    with (
        tokenizer.within(1000),
        pytest.raises(ContextOverflow, match=r"maximum context length is 1000 tokens; .* more than 1000"),
    ):
        tokenizer.encode("word " * 1_000_000)
    assert tokenizer.characters < 100_000


def test_many_texts_that_together_are_far_beyond_the_context_are_given_up_too() -> None:
    tokenizer = CountingTokenizer()
    with tokenizer.within(1000), pytest.raises(ContextOverflow):
        for number in range(10_000):
            tokenizer.encode(f"{number} " + "word " * 100)
    assert tokenizer.characters < 100_000


def test_a_text_of_few_tokens_is_within_the_context_however_many_characters_it_has() -> None:
    """Bytes alone say nothing: a token may stand for many."""
    tokenizer = QuickTokenizer(tiny_tokenizer())
    text = "<|im_end|>" * 3_000
    with tokenizer.within(3_000):
        assert len(tokenizer.encode(text)) == 3_000


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
async def test_a_prompt_far_beyond_the_context_is_refused_in_the_dialect(gateway: LiveGateway, path: str) -> None:
    attempt = await gateway.attempt()
    status, text = await post(attempt, path, messages=[{"role": "user", "content": "word " * 100_000}], max_tokens=5)
    assert status == 400
    assert "maximum context length is 1000 tokens; your messages and tools take more than 1000" in text
    assert await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt) == (path != "messages/count_tokens")


def test_prompts_are_remembered_up_to_a_number_of_tokens_and_not_only_of_prompts() -> None:
    renderer = PolicyRenderer(tiny_tokenizer())
    prompts = {letter: [{"role": "user", "content": letter * 400_000}] for letter in "abc"}
    first, *_, last = [renderer.render(messages, None) for messages in prompts.values()]
    assert renderer.render(prompts["c"], None) is last
    assert renderer.render(prompts["a"], None) is not first


async def test_a_refusal_quotes_no_more_than_can_be_read(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    status, text = await post(attempt, messages=[{"role": "r" * 500_000, "content": "x"}])
    assert status == 400 and len(text) < 5_000
    assert "messages[0] has the role 'rrr" in text and "known are system, developer, user, assistant, tool" in text


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def chat_history(arguments: Any) -> list[dict[str, Any]]:
    return [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


@pytest.mark.parametrize("depth", [66, 100_000])
async def test_arguments_nested_too_deeply_are_refused_in_the_dialect(gateway: LiveGateway, depth: int) -> None:
    attempt = await gateway.attempt()
    status, text = await post(attempt, messages=chat_history(nested(depth)))
    assert status == 400 and "messages[1] has a tool call with arguments nested more than 64 deep" in text
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": nested(depth)}
    status, text = await post(attempt, "responses", input=[USER, call])
    assert status == 400 and "arguments nested more than 64 deep" in text


async def test_an_input_nested_too_deeply_is_refused_by_messages(gateway: LiveGateway) -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(nested(70))}
    status, text = await post(
        await gateway.attempt(),
        "messages",
        max_tokens=5,
        messages=[USER, {"role": "assistant", "content": [use]}, USER],
    )
    assert status == 400 and "nested more than 64 deep" in text


async def test_arguments_of_64_levels_are_served(gateway: LiveGateway) -> None:
    assert (await post(await gateway.attempt(), messages=chat_history(nested(64))))[0] == 200


async def test_a_schema_with_a_deep_default_is_refused_or_served_but_no_defect(gateway: LiveGateway) -> None:
    deep: Any = 0
    for _ in range(900):
        deep = [deep]
    parameters = {"type": "object", "properties": {"a": {"type": "string", "default": deep}}}
    status, text = await post(
        await gateway.attempt(),
        messages=[USER],
        tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}],
    )
    assert status == 400, text
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [70, 5_000])
async def test_what_a_policy_nests_too_deeply_is_text_and_no_tool_call(tmp_path: Path, depth: int) -> None:
    said = f'<tool_call>\n{{"name": "f", "arguments": {nested(depth)}}}\n</tool_call>'
    async with live_gateway(tmp_path, engine=ScriptedEngine(tiny_tokenizer(), context_length=100_000)) as gateway:
        gateway.engine.enqueue(said)
        attempt = await gateway.attempt(sampling=SamplingSettings(max_tokens=90_000))
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        status, text = await post(attempt, messages=[USER], tools=tools)
        assert status == 200, text
        message = json.loads(text)["choices"][0]["message"]
        assert not message.get("tool_calls") and '{"a":{"a":' in message["content"]
        assert len(await attempt.transitions()) == 1


async def test_a_tool_named_with_half_a_character_is_text_and_no_tool_call(gateway: LiveGateway) -> None:
    gateway.engine.enqueue('<tool_call>\n{"name": "f\\ud800", "arguments": {}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    status, text = await post(await gateway.attempt(), messages=[USER], tools=tools)
    assert status == 200
    assert not json.loads(text)["choices"][0]["message"].get("tool_calls")


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("chat/completions", {"stop": ["x"] * 17}, "stop has 17 entries; send at most 16"),
        ("chat/completions", {"stop": "é" * 513}, "stop has a text of 1026 bytes; stop at one of at most 1024"),
        ("messages", {"stop_sequences": ["x"] * 17, "max_tokens": 5}, "stop_sequences has 17 entries; send at most 16"),
        ("chat/completions", {"messages": [USER] * 4097}, "messages has 4097 entries; send at most 4096"),
        ("messages", {"messages": [USER] * 4097, "max_tokens": 5}, "messages has 4097 entries; send at most 4096"),
        ("responses", {"input": [USER] * 4097}, "input has 4097 entries; send at most 4096"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]},
            "tools has 1025 entries; send at most 1024",
        ),
    ],
)
async def test_more_than_can_be_read_in_a_moment_is_refused(
    gateway: LiveGateway, path: str, body: dict[str, Any], sentence: str
) -> None:
    first = {} if path == "responses" else {"messages": [USER]}
    status, text = await post(await gateway.attempt(), path, **{**first, **body})
    assert status == 400 and sentence in text


async def test_stop_strings_within_the_bounds_are_honoured(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    assert (await post(attempt, messages=[USER], stop=[f"{i}" * 100 for i in range(16)]))[0] == 200
    (transition,) = await attempt.transitions()
    assert len(transition.sampling.stop) == 16


async def test_a_retry_count_of_many_digits_is_no_defect(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{attempt.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {attempt.key}", "x-stainless-retry-count": "9" * 5000},
            json={"model": "m", "messages": [USER]},
        )
    assert answer.status_code == 200
