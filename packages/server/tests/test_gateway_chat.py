"""Chat completions through the official OpenAI SDK: what an agent sees, and that the store has exactly what was
sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI

from lightningrl.types import FinishReason, Transition
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    for name in ("search", "lookup")
]
CALLS = '<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
USER: Any = {"role": "user", "content": "What is 6*7?"}


def dumped(message: Any) -> Any:
    """An answer's message as an agent sends it back."""
    return message.model_dump()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as running:
        yield running


def client_of(attempt: LiveAttempt, **options: object) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, **{"max_retries": 0, **options})  # type: ignore[arg-type]


def assert_exact(engine: ScriptedEngine, transition: Transition) -> None:
    emission = engine.emissions[transition.id]
    assert tuple(transition.prompt_ids.tolist()) == emission.request.prompt_ids
    assert tuple(transition.completion_ids.tolist()) == emission.token_ids
    assert transition.logprobs.dtype == np.float32
    assert tuple(transition.logprobs.tolist()) == emission.logprobs
    assert transition.policy_version == emission.policy_version
    assert transition.finish_reason is emission.finish_reason
    assert transition.sampling == emission.request.sampling


async def test_a_plain_answer_is_recorded_exactly_as_sampled(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("It is 42 — été 🙂.")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await client.chat.completions.create(model="gpt-4o", messages=[USER], user="u", store=False)
    assert answer.choices[0].message.content == "It is 42 — été 🙂."
    assert answer.choices[0].finish_reason == "stop"
    (transition,) = await attempt.transitions()
    assert_exact(gateway.engine, transition)
    assert answer.id == f"chatcmpl-{transition.id}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(transition.prompt_ids)
    assert answer.usage.completion_tokens == len(transition.completion_ids)
    assert answer.system_fingerprint == "policy@0"


async def test_the_sync_client_works_too(gateway: LiveGateway) -> None:
    import asyncio

    gateway.engine.enqueue("42")
    attempt = await gateway.attempt()

    def call() -> str | None:
        with OpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            return client.chat.completions.create(model="m", messages=[USER]).choices[0].message.content

    assert await asyncio.to_thread(call) == "42"


async def test_streamed_text_comes_in_pieces_and_is_recorded_like_a_whole_answer(gateway: LiveGateway) -> None:
    text = "Grüße 🙂 aus < der > Stadt. "
    gateway.engine.enqueue(text, text)
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        whole = await client.chat.completions.create(model="m", messages=[USER])
        stream = await client.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == text == whole.choices[0].message.content
    assert len(pieces) > 10
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "stop"
    first, second = await attempt.transitions()
    assert_exact(gateway.engine, first)
    assert_exact(gateway.engine, second)
    assert first.completion_ids.tolist() == second.completion_ids.tolist()
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_parallel_tool_calls_a_tool_loop_and_no_breaks(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue(f"Let me see.\n{CALLS}", "Both say 42.", "Yes.")
    attempt = await gateway.attempt()
    messages: list[Any] = [{"role": "system", "content": "Use tools."}, USER]
    async with client_of(attempt) as client:
        for _ in range(3):
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                completion = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
                message = completion.choices[0].message  # type: ignore[assignment]
            messages.append(message.model_dump(exclude={"parsed"}))
            calls = message.tool_calls or []
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "42 ✓"} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": "Sure?"})
            else:
                assert message.content == "Let me see."
                assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
                    ("search", {"q": "ü"}),
                    ("lookup", {}),
                ]
                assert len({call.id for call in calls}) == 2
    transitions = await attempt.transitions()
    assert [transition.is_break for transition in transitions] == [False] * 3
    assert [transition.parent_id for transition in transitions] == [None, transitions[0].id, transitions[1].id]
    for transition in transitions:
        assert_exact(gateway.engine, transition)
    for parent, child in pairwise(transitions):
        past = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
        assert child.prompt_ids.tolist()[: len(past)] == past
    assert len(transitions[0].tool_call_ids) == 2
    # What was bridged is what the template would have written, up to the canonical spelling of the calls.
    text = gateway.engine.tokenizer.decode(transitions[1].prompt_ids.tolist())
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42 ✓\n</tool_response>\n"
        "<tool_response>\n42 ✓\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


async def test_n_choices_are_transitions_of_their_own(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("one", "two", "three")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await client.chat.completions.create(model="m", messages=[USER], n=3)
        assert sorted(choice.message.content or "" for choice in answer.choices) == ["one", "three", "two"]
        chosen = answer.choices[1].message
        gateway.engine.enqueue("four")
        await client.chat.completions.create(model="m", messages=[USER, dumped(chosen), USER])
    transitions = await attempt.transitions()
    assert len(transitions) == 4
    assert transitions[3].parent_id == transitions[1].id
    for transition in transitions:
        assert_exact(gateway.engine, transition)


async def test_n_choices_stream_interleaved(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("first answer", "second answer")
    attempt = await gateway.attempt()
    texts = {0: "", 1: ""}
    async with client_of(attempt) as client:
        async for chunk in await client.chat.completions.create(model="m", messages=[USER], n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert sorted(texts.values()) == ["first answer", "second answer"]
    assert len(await attempt.transitions()) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_the_recorded_ones(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("hé")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        if stream:
            entries: list[Any] = []
            async for chunk in await client.chat.completions.create(
                model="m", messages=[USER], logprobs=True, top_logprobs=1, stream=True
            ):
                for choice in chunk.choices:
                    entries += (choice.logprobs.content or []) if choice.logprobs else []
        else:
            answer = await client.chat.completions.create(model="m", messages=[USER], logprobs=True, top_logprobs=1)
            assert answer.choices[0].logprobs is not None
            entries = answer.choices[0].logprobs.content or []
    (transition,) = await attempt.transitions()
    assert [entry.logprob for entry in entries] == transition.logprobs.tolist()
    assert entries[0].token == "h"
    joined = bytes(byte for entry in entries for byte in entry.bytes or ())
    assert joined.decode() == "hé<|im_end|>", "tokens that are parts of a character have their own bytes"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_text_but_not_the_record(gateway: LiveGateway, stream: bool) -> None:
    gateway.engine.enqueue("SELECT 1; -- END and more", "next")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        if stream:
            content = ""
            async for chunk in await client.chat.completions.create(
                model="m", messages=[USER], stop=["END"], stream=True
            ):
                content += chunk.choices[0].delta.content or ""
        else:
            content = (await client.chat.completions.create(model="m", messages=[USER], stop=["END"])).choices[
                0
            ].message.content or ""
        assert content == "SELECT 1; -- "
        await client.chat.completions.create(
            model="m", messages=[USER, {"role": "assistant", "content": content}, USER]
        )
    first, second = await attempt.transitions()
    assert gateway.engine.tokenizer.decode(first.completion_ids.tolist()) == "SELECT 1; -- END"
    assert second.parent_id == first.id
    assert "END<|im_end|>\n<|im_start|>user" in gateway.engine.tokenizer.decode(second.prompt_ids.tolist())


async def test_max_tokens_bounds_and_the_next_turn_closes_what_was_cut(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("abcdefgh", "next")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        answer = await client.chat.completions.create(
            model="m", messages=[USER], max_completion_tokens=4, temperature=0.1, seed=3
        )
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abcd", "length")
        await client.chat.completions.create(model="m", messages=[USER, dumped(answer.choices[0].message), USER])
    first, second = await attempt.transitions()
    assert first.finish_reason is FinishReason.LENGTH
    assert first.sampling.temperature == 1.0, "the run's temperature stands, the agent's does not"
    assert (first.sampling.max_tokens, first.sampling.seed) == (4, 3)
    assert second.parent_id == first.id and not second.is_break
    assert "abcd<|im_end|>\n<|im_start|>user" in gateway.engine.tokenizer.decode(second.prompt_ids.tolist())


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_tool_markup_reaches_the_agent_as_text(gateway: LiveGateway, stream: bool) -> None:
    said = "Hm <tool_call>\nnot json\n</tool_call>"
    gateway.engine.enqueue(said, "next")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        if stream:
            content = ""
            async for chunk in await client.chat.completions.create(
                model="m", messages=[USER], tools=TOOLS, stream=True
            ):
                content += chunk.choices[0].delta.content or ""
        else:
            message = (await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)).choices[0].message
            assert not message.tool_calls
            content = message.content or ""
        assert "<tool_call>\nnot json\n</tool_call>" in content
        history = [USER, {"role": "assistant", "content": content}, USER]
        await client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    first, second = await attempt.transitions()
    assert second.parent_id == first.id and not second.is_break
    (sentence,) = first.malformed
    assert "not json" in sentence and "is no tool call: " in sentence and '"name": "NAME"' in sentence
    assert second.malformed == ()


@pytest.mark.parametrize(
    ("said", "tools", "count"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1', TOOLS, 1),
        ('<tool_call>\n{"arguments": {}}\n</tool_call><tool_call>\nno\n</tool_call>', TOOLS, 2),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', TOOLS, 0),
        ("<tool_call>\nno\n</tool_call>", None, 0),
        ("I would call add.", TOOLS, 0),
    ],
)
async def test_each_tool_call_that_cannot_be_read_is_recorded(
    gateway: LiveGateway, said: str, tools: Any, count: int
) -> None:
    gateway.engine.enqueue(said)
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        await client.chat.completions.create(model="m", messages=[USER], **({"tools": tools} if tools else {}))
    (call,) = await attempt.transitions()
    assert len(call.malformed) == count


async def test_reasoning_is_handed_on_apart_and_kept_in_the_history(gateway: LiveGateway) -> None:
    gateway.engine.enqueue("<think>6*7 is 42</think>\n\n42", "<think>again</think>43")
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        message = (await client.chat.completions.create(model="m", messages=[USER])).choices[0].message
        assert message.content == "42"
        assert message.model_extra == {"reasoning_content": "6*7 is 42", "reasoning": "6*7 is 42"}
        reasoning = other_name = content = ""
        history = [USER, {"role": "assistant", "content": "42"}, USER]
        async for chunk in await client.chat.completions.create(model="m", messages=history, stream=True):
            reasoning += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
            other_name += (chunk.choices[0].delta.model_extra or {}).get("reasoning") or ""
            content += chunk.choices[0].delta.content or ""
        assert (reasoning, other_name, content) == ("again", "again", "43")
    first, second = await attempt.transitions()
    assert second.parent_id == first.id and not second.is_break


async def test_an_edited_answer_is_a_break_and_a_new_conversation_is_not(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        await client.chat.completions.create(model="m", messages=[USER])
        await client.chat.completions.create(
            model="m", messages=[USER, {"role": "assistant", "content": "edited"}, USER]
        )
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "something else"}])
        await client.chat.completions.create(
            model="m", messages=[USER, {"role": "assistant", "content": "ok"}, USER], tools=TOOLS
        )
    assert [(t.is_break, t.parent_id) for t in await attempt.transitions()] == [
        (False, None),
        (True, None),
        (False, None),
        (True, None),
    ]


async def test_identity_headers_reach_the_transition(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    headers = {"x-lightningrl-agent": "write%20%C3%BC", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with client_of(attempt) as client:
        await client.chat.completions.create(model="m", messages=[USER], extra_headers=headers)
    (transition,) = await attempt.transitions()
    assert (transition.agent, transition.span_id) == ("write ü", "b" * 16)


async def test_models_lists_the_policies(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with client_of(attempt) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("org/gpt-4o")).id == "org/gpt-4o", (
            "a policy answers it, whatever the agent calls it"
        )
