"""What the responses and messages dialects refuse: each in its own error format, with a sentence, and nothing
recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightningrl.types import Outcome
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    engine = ScriptedEngine(tiny_tokenizer(), context_length=300)
    async with live_gateway(tmp_path, engine=engine, settings=GatewaySettings(max_body_bytes=10_000)) as running:
        yield running


async def post(
    attempt: LiveAttempt, path: str, body: Any, *, raw: bytes | None = None, **headers: str
) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        named = headers or {"x-api-key": attempt.key}
        sent: Any = {"content": raw} if raw is not None else {"json": body}
        return await client.post(
            f"{attempt.base_url}/{path}", headers={key.replace("_", "-"): value for key, value in named.items()}, **sent
        )


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": 5}, "Expected `array`, got `int`"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0] has the role 'robot'; known are user, assistant, system",
        ),
        (
            {"messages": [user({"type": "image", "source": {}})]},
            "messages[0].content[0] is a block of type 'image'; the policy reads text",
        ),
        ({"messages": [user({"type": "document", "source": {}})]}, "a part of type 'document' that holds no text"),
        (
            {"messages": [USER, assistant({"type": "server_tool_use"}), USER]},
            "messages[1].content[0] is a block of type 'server_tool_use'",
        ),
        (
            {"messages": [user({**RESULT, "content": [{"type": "image"}]})]},
            "part of type 'image'; the policy reads text only",
        ),
        ({"messages": [user({"type": "tool_result", "content": "x"})]}, "has no tool_use_id"),
        ({"messages": [USER, assistant({**USE, "input": "q"}), USER]}, "has an input that is no object"),
        ({"messages": [USER, assistant({"type": "tool_use", "input": {}}), USER]}, "has no name"),
        ({"messages": [USER, assistant(USE, USE), user(RESULT)]}, "tool-call id 'c' is used by two calls"),
        ({"messages": [USER, assistant(USE), user(RESULT, RESULT)]}, "the tool call 'c' has two results"),
        (
            {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]},
            "the last message is the assistant's",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a tool call, but no tools are offered"),
        (
            {"tool_choice": {"type": "some"}},
            "tool_choice {'type': 'some'} is not supported; use 'auto', 'none', 'any', or 'tool'",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools[0] is of type 'web_search_20250305'; only tools of the agent's own",
        ),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "its parameters have the type 'array'"),
        ({"tools": [{"name": "f", "input_schema": {"properties": []}}, {}]}, "tools[1] is no function with a name"),
        ({"tools": [{"name": "f", "input_schema": {"properties": ["a"]}}]}, "has properties that are no object"),
        ({"tools": [{"input_schema": {}}]}, "tools[0] is no function with a name"),
        ({"mcp_servers": [{}]}, "mcp_servers are not supported"),
        ({"thread": {"type": "create"}}, "threads are not kept here"),
        (
            {"context_management": {"edits": [{}]}},
            "context_management.edits[0] is of type None, which nobody here knows; known are clear_tool",
        ),
        ({"context_management": {"edits": 5}}, "context_management has edits that are no list of objects"),
        (
            {
                "context_management": {
                    "edits": [{"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 5}}]
                }
            },
            "context_management.edits[0].trigger is {'type': 'tool_uses', 'value': 5}; send an object with type 'input_tokens'",
        ),
        (
            {
                "context_management": {
                    "edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": "x"}}]
                }
            },
            "context_management.edits[0].trigger.value is 'x'; it must be a whole number",
        ),
        ({"compaction": {"type": "summarize"}}, "compaction is not supported"),
        ({"container": "c1"}, "containers are not supported"),
        ({"container": {"skills": [{"skill_id": "pptx"}]}}, "containers are not supported"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format has no schema"),
        ({"system": [{"type": "image"}]}, "system has a part of type 'image'"),
    ],
)
async def test_messages_that_cannot_be_honoured_are_refused_with_a_sentence(
    gateway: LiveGateway, change: dict[str, Any], message: str
) -> None:
    attempt = await gateway.attempt()
    answer = await post(attempt, "messages", {"model": "m", "max_tokens": 10, "messages": [USER], **change})
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]
    assert await attempt.transitions() == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": []}, "no input"),
        ({"input": ""}, "no input"),
        ({"input": 5}, "no responses request"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0] has the role 'robot'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "part of type 'input_image'; the policy",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "part of type 'input_file'"),
        (
            {"input": [{"type": "computer_call"}]},
            "input[0] is an item of type 'computer_call'; the policy reads message, reasoning",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0] refers to the item 'x', which no answer of this",
        ),
        ({"input": [{"content": "x"}]}, "an item of type None"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0] has no call_id"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0] has no arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0] has no output"),
        ({"input": [{**OUTPUT, "output": [{"type": "input_image"}]}]}, "part of type 'input_image'"),
        ({"input": [USER, CALL, OUTPUT, CALL, OUTPUT]}, "tool-call id 'c' is used by two calls"),
        ({"input": [USER, CALL, OUTPUT, OUTPUT]}, "the tool call 'c' has two results"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is of type 'web_search'; only functions are supported"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": 5}}]}, "its parameters have the type 5"),
        ({"tools": [{"type": "function"}]}, "tools[0] is no function with a name"),
        ({"tool_choice": "required"}, "tool_choice asks for a tool call, but no tools are offered"),
        (
            {"tool_choice": {"type": "mcp", "server_label": "s"}},
            "is not supported; use 'auto', 'none', 'required' or a function by its name",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "the format 'grammar' is not supported"),
        ({"background": True}, "background responses are not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported; use previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt templates are not kept here"),
        ({"truncation": "middle"}, "truncation is 'middle'; it may be 'auto' or 'disabled'"),
        ({"truncation": "auto", "input": "x" * 900}, "300 tokens"),
        (
            {"context_management": [{"type": "clear"}]},
            "context_management[0] is of type 'clear', which nobody here knows; known are compaction",
        ),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 3}]},
            "asks for 'compaction', which would now change the prompt",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    ],
)
async def test_responses_that_cannot_be_honoured_are_refused_with_a_sentence(
    gateway: LiveGateway, change: dict[str, Any], message: str
) -> None:
    attempt = await gateway.attempt()
    answer = await post(attempt, "responses", {"model": "m", "input": "hi", **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert await attempt.transitions() == ()


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff\xfe",
        b"",
        b"[" * 5000,
    ],
)
async def test_a_body_that_is_no_json_is_told(gateway: LiveGateway, path: str, raw: bytes) -> None:
    attempt = await gateway.attempt()
    answer = await post(attempt, path, None, raw=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert await attempt.transitions() == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_history_that_is_too_long_is_told_and_typed(gateway: LiveGateway, stream: bool) -> None:
    long = "x" * 400
    first, second = await gateway.attempt(), await gateway.attempt()
    async with anthropic.AsyncAnthropic(base_url=first.base_url.removesuffix("/v1"), api_key=first.key) as client:
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long.*maximum context length is 300 tokens"
        ):
            await client.messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": long}], stream=stream
            )
    async with openai.AsyncOpenAI(base_url=second.base_url, api_key=second.key) as other:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 300 tokens") as caught:
            await other.responses.create(model="m", input=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    for attempt in (first, second):
        assert await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt)
        assert await attempt.transitions() == ()


async def test_keys_and_places_in_the_format_of_the_dialect(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    body = {"model": "m", "max_tokens": 5, "messages": [USER]}
    wrong = await post(attempt, "messages", body, x_api_key="nonsense")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    none = await post(attempt, "messages", body, accept="*/*")
    assert none.status_code == 401 and "x-api-key" in none.json()["error"]["message"]
    large = await post(attempt, "messages", {**body, "system": "x" * 20_000})
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    doubled = await post(attempt, "v1/messages", body)
    assert doubled.status_code == 404 and "leave /v1 out of the client's base URL" in doubled.json()["error"]["message"]
    retrieved = await post(attempt, "responses/resp_1/cancel", {})
    assert (retrieved.status_code, retrieved.json()["error"]["code"]) == (404, "unknown_path")
    async with httpx.AsyncClient() as client:
        closed = await client.post(f"{gateway.url}/v1/messages", json=body)
        assert (closed.status_code, closed.json()["error"]["type"]) == (403, "permission_error")
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
    late = await post(attempt, "messages", body)
    assert (late.status_code, late.json()["error"]["type"]) == (410, "invalid_request_error")


async def test_an_error_in_mid_stream_is_raised_by_the_sdk(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("a long answer")
    gateway.engine.token_delay_s = 0.05
    attempt = await gateway.attempt()
    async with anthropic.AsyncAnthropic(base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key) as client:
        with pytest.raises(anthropic.APIStatusError, match="attempt 1"):
            async with client.messages.stream(
                model="m", max_tokens=50, messages=[{"role": "user", "content": "a"}]
            ) as events:
                async for event in events:
                    if event.type == "text":
                        await gateway.store.finish_attempt(attempt.rollout_id, 1, Outcome.TIMEOUT)
    assert await attempt.transitions() == ()


async def test_a_policy_without_tool_markup_is_offered_no_tools_in_any_dialect(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    renderer = PolicyRenderer(tiny_tokenizer(chat_template=plain))
    async with live_gateway(tmp_path, renderer=renderer) as gateway:
        attempt = await gateway.attempt()
        tools = {"messages": [{"name": "f"}], "responses": [{"type": "function", "name": "f"}]}
        for path, offered in tools.items():
            body = {"model": "m", "max_tokens": 5, "max_output_tokens": 5, "messages": [USER], "input": "hi"}
            answer = await post(attempt, path, body | {"tools": offered})
            assert answer.status_code == 400 and "no tool-call markup" in answer.json()["error"]["message"]
