"""Text before and after a call reaches the client of each dialect, and the history that it sends back joins without a
break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from lightningrl_testing.live_gateway import LiveAttempt, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: Any = {"name": "weather", "description": "d", "parameters": SCHEMA}
SAID = 'Look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "a"}}\n</tool_call>\nDone.'


async def chat(attempt: LiveAttempt, stream: bool) -> str:
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        options: Any = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        if stream:
            async with client.chat.completions.stream(**options) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**options)).choices[0].message
        call = (message.tool_calls or [])[0]
        sent = message.model_dump(
            exclude_none=True, exclude={"tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}
        )
        messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
        await client.chat.completions.create(**options)
        return str(message.content)


async def messages(attempt: LiveAttempt, stream: bool) -> str:
    async with AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key) as client:
        turns: list[Any] = [{"role": "user", "content": "hi"}]
        tools = [{"name": "weather", "input_schema": SCHEMA}]
        options: Any = {"model": "m", "messages": turns, "tools": tools, "max_tokens": 200}
        if stream:
            async with client.messages.stream(**options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**options)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "7"}
        turns += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        await client.messages.create(**options)
        return "".join(block.text for block in message.content if block.type == "text")


async def responses(attempt: LiveAttempt, stream: bool) -> str:
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
        items: list[Any] = [{"role": "user", "content": "hi"}]
        options: Any = {"model": "m", "input": items, "tools": [{"type": "function", **FUNCTION}]}
        if stream:
            async with client.responses.stream(**options) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.responses.create(**options)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
        await client.responses.create(**options)
        return str(answer.output_text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [chat, messages, responses], ids=lambda ask: ask.__name__)
async def test_text_around_a_call_is_kept_and_sent_back_without_a_break(tmp_path: Path, ask: Any, stream: bool) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(SAID, "done")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        text = await ask(attempt, stream)
        first, second = await attempt.transitions()
    assert "".join(text.split()) == "Look.Done."
    assert second.parent_id == first.id and not second.is_break
