"""Chat completions through the official SDK's helpers: structured output, streaming with a parser, and what the policy
reads of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI

from lightningrl_testing.live_gateway import LiveGateway, live_gateway

USER: Any = {"role": "user", "content": "What is 6*7?"}


class Verdict(pydantic.BaseModel):
    answer: int


class Search(pydantic.BaseModel):
    q: str


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


async def test_structured_output_is_parsed_by_the_sdk(gateway: LiveGateway) -> None:
    gateway.engine.enqueue('{"answer": 42}', '{"answer": 43}', "{}")
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        whole = await client.chat.completions.parse(model="m", messages=[USER], response_format=Verdict)
        async with client.chat.completions.stream(model="m", messages=[USER], response_format=Verdict) as events:
            streamed = await events.get_final_completion()
        await client.chat.completions.create(
            model="m", messages=[{"role": "system", "content": "S"}, USER], response_format={"type": "json_object"}
        )
    assert whole.choices[0].message.parsed == Verdict(answer=42)
    assert streamed.choices[0].message.parsed == Verdict(answer=43)
    first, second, third = await attempt.transitions()
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    text = gateway.engine.tokenizer.decode(first.prompt_ids.tolist())
    assert text.startswith(
        "<|im_start|>system\nAnswer with JSON only, without any text around it, that fits this JSON schema:\n{"
    )
    shown = json.loads(text.partition("schema:\n")[2].partition("<|im_end|>")[0])
    assert shown["properties"] == {"answer": {"title": "Answer", "type": "integer"}}
    assert "S\n\nAnswer with one JSON object only" in gateway.engine.tokenizer.decode(third.prompt_ids.tolist())


async def test_function_arguments_are_parsed_by_the_sdk(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(*['<tool_call>\n{"name": "Search", "arguments": {"q": "ü"}}\n</tool_call>'] * 2)
    attempt = await gateway.attempt()
    tools = [openai.pydantic_function_tool(Search)]
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        whole = await client.chat.completions.parse(model="m", messages=[USER], tools=tools)
        async with client.chat.completions.stream(model="m", messages=[USER], tools=tools) as events:
            done = [event async for event in events if event.type == "tool_calls.function.arguments.done"]
    calls = whole.choices[0].message.tool_calls
    assert calls and calls[0].function.parsed_arguments == Search(q="ü")
    assert [event.parsed_arguments for event in done] == [Search(q="ü")]


async def test_numbers_that_json_does_not_have_make_no_tool_call(gateway: LiveGateway) -> None:
    said = '<tool_call>\n{"name": "Search", "arguments": {"q": NaN}}\n</tool_call>'
    gateway.engine.enqueue(said)
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        message = (
            (
                await client.chat.completions.create(
                    model="m", messages=[USER], tools=[openai.pydantic_function_tool(Search)]
                )
            )
            .choices[0]
            .message
        )
    assert not message.tool_calls and "NaN" in (message.content or "")
