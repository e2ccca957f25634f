"""The streaming, parsing and tool-running helpers of the official SDKs' blocking clients, streamed and whole: one
record either way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic import beta_tool

from lightningrl.types import Transition
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

USER: Any = {"role": "user", "content": "What is 6*7?"}
CALL = 'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"q": "ü 🙂"}}\n</tool_call>'


class Verdict(pydantic.BaseModel):
    """Structured output."""

    answer: int
    reasons: list[str] = []


class Search(pydantic.BaseModel):
    """Arguments of a tool."""

    q: str


@beta_tool
def search(q: str) -> str:
    """Search.

    Args:
        q: what for
    """
    return f"found {q}"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


def openai_client(attempt: LiveAttempt) -> openai.OpenAI:
    return openai.OpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0)


def anthropic_client(attempt: LiveAttempt) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, max_retries=0)


def chat_parse(attempt: LiveAttempt, stream: bool) -> Any:
    with openai_client(attempt) as client:
        request: Any = {"model": "m", "messages": [USER], "response_format": Verdict}
        if not stream:
            return client.chat.completions.parse(**request).choices[0].message.parsed
        with client.chat.completions.stream(**request) as events:
            return events.get_final_completion().choices[0].message.parsed


def responses_parse(attempt: LiveAttempt, stream: bool) -> Any:
    with openai_client(attempt) as client:
        request: Any = {"model": "m", "input": "What is 6*7?", "text_format": Verdict}
        if not stream:
            return client.responses.parse(**request).output_parsed
        with client.responses.stream(**request) as events:
            return events.get_final_response().output_parsed


def messages_parse(attempt: LiveAttempt, stream: bool) -> Any:
    with anthropic_client(attempt) as client:
        request: Any = {"model": "m", "max_tokens": 200, "messages": [USER], "output_format": Verdict}
        if not stream:
            return client.messages.parse(**request).parsed_output
        with client.messages.stream(**request) as events:
            return events.get_final_message().parsed_output


def beta_messages_parse(attempt: LiveAttempt, stream: bool) -> Any:
    with anthropic_client(attempt) as client:
        request: Any = {"model": "m", "max_tokens": 200, "messages": [USER], "output_format": Verdict}
        if not stream:
            return client.beta.messages.parse(**request).parsed_output
        with client.beta.messages.stream(**request) as events:
            return events.get_final_message().parsed_output


Helper = Callable[[LiveAttempt, bool], Any]


def recorded(transition: Transition) -> tuple[Any, ...]:
    return (
        transition.prompt_ids.tolist(),
        transition.completion_ids.tolist(),
        transition.logprobs.tolist(),
        transition.finish_reason,
        transition.sampling,
        transition.is_break,
        len(transition.tool_call_ids),
    )


async def record_both_ways(gateway: LiveGateway, helper: Helper, *said: str) -> list[Any]:
    """What the helper gives, whole and streamed, after a look that both were recorded alike."""
    given: list[Any] = []
    kept: list[list[tuple[Any, ...]]] = []
    for stream in (False, True):
        gateway.engine.enqueue(*said)
        attempt = await gateway.attempt()
        given.append(await asyncio.to_thread(helper, attempt, stream))
        transitions = await attempt.transitions()
        assert [transition.parent_id for transition in transitions] == [
            None,
            *(transition.id for transition in transitions[:-1]),
        ]
        kept.append([recorded(transition) for transition in transitions])
    assert kept[0] == kept[1]
    assert len(kept[0]) == len(said)
    return given


@pytest.mark.parametrize("helper", [chat_parse, responses_parse, messages_parse, beta_messages_parse])
async def test_structured_output_is_parsed_whole_and_streamed(gateway: LiveGateway, helper: Helper) -> None:
    given = await record_both_ways(gateway, helper, '{"answer": 42, "reasons": ["6·7", "🙂"]}')
    assert given == [Verdict(answer=42, reasons=["6·7", "🙂"])] * 2


@pytest.mark.parametrize("helper", [chat_parse, responses_parse, messages_parse, beta_messages_parse])
async def test_an_answer_that_does_not_fit_is_the_parsers_to_refuse_and_is_recorded(
    gateway: LiveGateway, helper: Helper
) -> None:
    for stream in (False, True):
        gateway.engine.enqueue('{"answer": "many"}')
        attempt = await gateway.attempt()
        with pytest.raises(pydantic.ValidationError):
            await asyncio.to_thread(helper, attempt, stream)
        (transition,) = await attempt.transitions()
        assert gateway.engine.tokenizer.decode(transition.completion_ids.tolist()) == '{"answer": "many"}<|im_end|>'


def chat_tools(attempt: LiveAttempt, stream: bool) -> Any:
    with openai_client(attempt) as client:
        messages: list[Any] = [USER]
        tools = [openai.pydantic_function_tool(Search, name="search")]
        while True:
            if stream:
                with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.parse(model="m", messages=messages, tools=tools).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                asked: Any = call.function.parsed_arguments
                messages.append({"role": "tool", "tool_call_id": call.id, "content": search(asked.q)})


def responses_tools(attempt: LiveAttempt, stream: bool) -> Any:
    with openai_client(attempt) as client:
        items: list[Any] = [USER]
        tools: list[Any] = [openai.pydantic_function_tool(Search, name="search")]
        request: Any = {
            "model": "m",
            "input": items,
            "tools": [{"type": "function", **tool["function"]} for tool in tools],
        }
        while True:
            if stream:
                with client.responses.stream(**request) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.parse(**request)
            items += response.output
            calls: list[Any] = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                asked = Search.model_validate_json(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": search(asked.q)})


def tool_runner(attempt: LiveAttempt, stream: bool) -> Any:
    with anthropic_client(attempt) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="m", max_tokens=200, messages=[USER], tools=[search], stream=stream
        )
        last: Any = None
        for step in runner:
            last = step.get_final_message() if stream else step
        return "".join(block.text for block in last.content)


@pytest.mark.parametrize("helper", [chat_tools, responses_tools, tool_runner])
async def test_a_tool_loop_is_one_history_whole_and_streamed(gateway: LiveGateway, helper: Helper) -> None:
    assert await record_both_ways(gateway, helper, CALL, CALL, "It is 42.") == ["It is 42."] * 2
