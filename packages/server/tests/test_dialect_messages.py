"""Anthropic messages through the official SDK: what an agent sees, and that the store has exactly what was sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from lightningrl.types import FinishReason
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway

TOOLS: Any = [
    {"name": name, "description": "d", "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
    for name in ("search", "lookup")
]
CALLS = '<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
USER: Any = {"role": "user", "content": "What is 6*7?"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


def client_of(attempt: LiveAttempt, **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, **{"max_retries": 0, **options}
    )


async def ask(client: AsyncAnthropic, stream: bool, **request: Any) -> Any:
    request = {"model": "m", "max_tokens": 200, **request}
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_plain_answer(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("It is 42 — été 🙂.")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        message = await ask(
            client,
            stream,
            messages=[USER],
            system="Be brief.",
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.1},
        )
    (transition,) = await attempt.transitions()
    assert message.id == f"msg_{transition.id}"
    assert [(block.type, getattr(block, "text", None)) for block in message.content] == [("text", "It is 42 — été 🙂.")]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "m")
    assert message.usage.input_tokens == len(transition.prompt_ids)
    assert message.usage.output_tokens == len(transition.completion_ids)
    prompt = gateway.engine.tokenizer.decode(transition.prompt_ids.tolist())
    assert (
        prompt
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert transition.sampling.temperature == 1.0, "the run's temperature stands, the agent's does not"


async def test_text_comes_in_pieces_and_events_in_order(gateway: LiveGateway) -> None:
    text = "Grüße 🙂 aus < der > Stadt."
    gateway.engine.enqueue(f"<think>hm hm</think>{text}\n{CALLS}")
    attempt = await gateway.attempt()
    kinds: list[str] = []
    pieces: list[str] = []
    async with (
        client_of(attempt) as client,
        client.messages.stream(
            model="m", max_tokens=500, messages=[USER], tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024}
        ) as events,
    ):
        async for event in events:
            kinds.append(event.type)
            if event.type == "text":
                pieces.append(event.text)
    assert "".join(pieces) == text
    assert len(pieces) > 10
    order = [
        kind
        for kind, following in pairwise([*kinds, ""])
        if kind != following and kind not in ("text", "thinking", "signature", "input_json")
    ]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    collapsed = [kind for kind, following in pairwise([*order, ""]) if kind != following]
    assert collapsed == ["message_start", *block * 4, "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_with_parallel_calls_never_breaks(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue(f"Let me see.\n{CALLS}", "Both say 42.", "Yes.")
    attempt = await gateway.attempt()
    messages: list[Any] = [USER]
    async with client_of(attempt) as client:
        for _ in range(3):
            message = await ask(
                client, stream, messages=messages, tools=TOOLS, system=[{"type": "text", "text": "Use tools."}]
            )
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                messages.append(
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}],
                    }
                )
                continue
            assert message.stop_reason == "tool_use"
            assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
            assert [(call.name, call.input) for call in calls] == [("search", {"q": "ü"}), ("lookup", {})]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "42 ✓"}]}
            ]
            results.append(
                {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such key", "is_error": True}
            )
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
    transitions = await attempt.transitions()
    assert [transition.is_break for transition in transitions] == [False] * 3
    assert [transition.parent_id for transition in transitions] == [None, transitions[0].id, transitions[1].id]
    for parent, child in pairwise(transitions):
        past = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
        assert child.prompt_ids.tolist()[: len(past)] == past
    text = gateway.engine.tokenizer.decode(transitions[1].prompt_ids.tolist())
    assert text.endswith(
        "<tool_response>\n42 ✓\n</tool_response>\n<tool_response>\nError: no such key\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_shown_to_those_who_ask_for_it(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue(*["<think>6*7 is 42</think>\n\n42"] * 3)
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        plain = await ask(client, stream, messages=[USER])
        assert [block.type for block in plain.content] == ["text"]
        message = await ask(client, stream, messages=[USER], thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "6*7 is 42"
        await ask(client, stream, messages=[USER, {"role": "assistant", "content": message.content}, USER])
    first, second, third = await attempt.transitions()
    assert first.completion_ids.tolist() == second.completion_ids.tolist()
    assert third.parent_id == second.id and not third.is_break


@pytest.mark.parametrize("stream", [False, True])
async def test_why_an_answer_ended(gateway: LiveGateway, stream: bool) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        gateway.engine.enqueue("SELECT 1; -- END and more")
        stopped = await ask(client, stream, messages=[USER], stop_sequences=["END"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
            "stop_sequence",
            "END",
            "SELECT 1; -- ",
        )
        gateway.engine.enqueue("abcdefgh")
        cut = await ask(client, stream, messages=[USER], max_tokens=4)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abcd")
        gateway.engine.enqueue("")
        empty = await ask(client, stream, messages=[USER])
        assert (empty.stop_reason, empty.content[0].text) == ("end_turn", "")
    assert [transition.finish_reason for transition in await attempt.transitions()] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]


async def test_tool_choice_none_and_one_at_a_time(gateway: LiveGateway) -> None:
    gateway.engine.enqueue(CALLS, CALLS)
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        text = await ask(client, False, messages=[USER], tools=TOOLS, tool_choice={"type": "none"})
        assert [block.type for block in text.content] == ["text"]
        one = await ask(
            client, False, messages=[USER], tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [block.type for block in one.content] == ["tool_use"]


async def test_count_tokens_is_the_length_of_the_prompt_and_records_nothing(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        counted = await client.messages.count_tokens(model="m", messages=[USER], tools=TOOLS, system="s")
        assert await attempt.transitions() == ()
        message = await ask(client, False, messages=[USER], tools=TOOLS, system="s")
        assert counted.input_tokens == message.usage.input_tokens
        history = [USER, {"role": "assistant", "content": message.content}, USER]
        longer = await client.messages.count_tokens(model="m", messages=history, tools=TOOLS, system="s")
        assert (
            await ask(client, False, messages=history, tools=TOOLS, system="s")
        ).usage.input_tokens == longer.input_tokens
    assert len(await attempt.transitions()) == 2


class Verdict(pydantic.BaseModel):
    answer: int


async def test_structured_output_is_parsed_by_the_sdk(gateway: LiveGateway) -> None:
    gateway.engine.enqueue('{"answer": 42}')
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        message = await client.messages.parse(model="m", max_tokens=100, messages=[USER], output_format=Verdict)
    assert message.parsed_output == Verdict(answer=42)
    (transition,) = await attempt.transitions()
    assert "fits this JSON schema" in gateway.engine.tokenizer.decode(transition.prompt_ids.tolist())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_tool_runner_drives_the_policy(gateway: LiveGateway, stream: bool) -> None:
    @beta_async_tool
    async def search(q: str) -> str:
        """Search.

        Args:
            q: what for
        """
        return f"found {q}"

    gateway.engine.enqueue('<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>', "It is 42.")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="m", max_tokens=200, messages=[USER], tools=[search], stream=stream
        )
        if stream:
            async for events in runner:
                last = await events.get_final_message()
        else:
            last = await runner.until_done()
    assert last.content[0].text == "It is 42."
    first, second = await attempt.transitions()
    assert second.parent_id == first.id and not second.is_break
    assert "found ü" in gateway.engine.tokenizer.decode(second.prompt_ids.tolist())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_is_one_transition(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("first", "second")
    attempt = await gateway.attempt()
    async with client_of(attempt, default_headers={"x-lightningrl-call-id": "c1"}) as client:
        answers = [await ask(client, stream, messages=[USER]) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(await attempt.transitions()) == 1


async def test_a_bearer_key_is_as_good(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with AsyncAnthropic(
        base_url=attempt.base_url.removesuffix("/v1"), api_key=None, auth_token=attempt.key
    ) as client:
        (block,) = (await ask(client, False, messages=[USER])).content
    assert block.type == "text" and block.text == "ok"


def looked_up(count: int) -> list[Any]:
    """A conversation with so many tool uses, each after a thought."""
    messages: list[Any] = [USER]
    for number in range(count):
        use = {"type": "tool_use", "id": f"c{number}", "name": "search", "input": {}}
        messages.append(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, use]}
        )
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"c{number}", "content": "r"}]}
        )
    return messages


CLEAR_TOOLS = "clear_tool_uses_20250919"
CLEAR_THINKING = "clear_thinking_20251015"
TURNS = [
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"}],
    },
    USER,
]


@pytest.mark.parametrize("stream", [False, True])
async def test_edits_of_the_context_that_are_not_reached_are_taken_and_none_is_done(
    gateway: LiveGateway, stream: bool
) -> None:
    attempt = await gateway.attempt()
    edits: list[Any] = [
        {"type": CLEAR_THINKING, "keep": "all"},
        {"type": CLEAR_THINKING},
        {"type": CLEAR_TOOLS},
        {"type": CLEAR_TOOLS, "trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 0}},
        {
            "type": CLEAR_TOOLS,
            "trigger": {"type": "input_tokens", "value": 1},
            "keep": {"type": "tool_uses", "value": 4},
        },
        {"type": CLEAR_TOOLS, "trigger": {"type": "tool_uses", "value": 1}, "exclude_tools": ["search"]},
        {"type": "compact_20260112"},
    ]
    async with client_of(attempt) as client:
        asked: dict[str, Any] = {
            "model": "m",
            "max_tokens": 200,
            "messages": looked_up(4),
            "tools": TOOLS,
            "betas": ["context-management-2025-06-27"],
        }
        configs: Any = ({"edits": edits}, {"edits": []}, {})
        for config in configs:
            if stream:
                async with client.beta.messages.stream(context_management=config, **asked) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.beta.messages.create(context_management=config, **asked)
            assert message.content[0].text == "ok" and message.context_management.applied_edits == []
    assert len(await attempt.transitions()) == 3


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        ({"type": CLEAR_TOOLS, "trigger": {"type": "input_tokens", "value": 100}}, looked_up(4)),
        ({"type": CLEAR_TOOLS, "trigger": {"type": "tool_uses", "value": 3}}, looked_up(4)),
        ({"type": CLEAR_THINKING}, [USER, *TURNS, *TURNS]),
        ({"type": CLEAR_THINKING, "keep": {"type": "thinking_turns", "value": 1}}, [USER, *TURNS, *TURNS]),
        ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 100}}, looked_up(4)),
    ],
)
async def test_an_edit_of_the_context_that_is_reached_is_refused_by_its_name(
    gateway: LiveGateway, edit: Any, messages: Any
) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        asked: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "tools": TOOLS,
            "context_management": {"edits": [edit]},
        }
        for call in (client.beta.messages.create(max_tokens=9, **asked), client.beta.messages.count_tokens(**asked)):
            with pytest.raises(
                anthropic.BadRequestError, match=f"asks for '{edit['type']}', which would now change the prompt"
            ):
                await call
    assert await attempt.transitions() == ()


async def test_what_asks_for_nothing_is_taken(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    nothing: dict[str, Any] = {
        "container": {"id": None, "skills": []},
        "mcp_servers": [],
        "context_management": None,
        "compaction": None,
        "thread": None,
        "service_tier": "auto",
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "cache_control": {"type": "ephemeral"},
        "inference_geo": "us",
        "speed": "fast",
        "fallbacks": [],
    }
    async with client_of(
        attempt, default_headers={"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    ) as client:
        message = await ask(client, False, messages=[USER], extra_body=nothing)
    assert message.content[0].text == "ok" and "context_management" not in message.model_dump()


@pytest.mark.parametrize("empty", ["", " ", "null", None, [], {}])
async def test_an_input_that_is_empty_in_any_spelling_is_an_empty_object(gateway: LiveGateway, empty: Any) -> None:
    attempt = await gateway.attempt()
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "search", "input": empty}]}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "nothing"}]}
    async with client_of(attempt) as client:
        message = await ask(
            client, False, messages=[USER, asked, told], tools=TOOLS, extra_body={"tool_choice": "auto"}
        )
    assert message.content[0].text == "ok"
    (call,) = await attempt.transitions()
    assert '{"name": "search", "arguments": {}}' in gateway.engine.tokenizer.decode(call.prompt_ids.tolist())
