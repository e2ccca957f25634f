"""A stream that the agent leaves early: what it was sent is a call like any other, exact to the token; what it was not
sent is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sizes import PATIENCE_S

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.types import FinishReason, Outcome, Transition
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine, pseudo_logprobs
from lightningrl_testing.tokenizers import tiny_tokenizer

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("search", "lookup")
]


class StuckEngine(ScriptedEngine):
    """Samples some tokens of each request, and then no more."""

    def __init__(self, *, after: int = 10**9, chunk_tokens: int = 1) -> None:
        super().__init__(tiny_tokenizer(), chunk_tokens=chunk_tokens)
        self.after = after
        self.stuck = asyncio.Event()
        """Whoever reads has had all of the tokens."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        count = 0
        async for chunk in super().generate(request):
            yield chunk
            count += len(chunk.token_ids)
            if count >= self.after:
                self.stuck.set()
                await asyncio.Event().wait()


async def read_until(
    attempt: LiveAttempt, path: str, body: dict[str, Any], is_enough: Callable[[str], bool], **headers: str
) -> str:
    """Stream, and leave as soon as what came is enough."""
    text = ""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream(
            "POST",
            f"{attempt.base_url}/{path}",
            json={"model": "m", "stream": True, **body},
            headers={"Authorization": f"Bearer {attempt.key}", **named},
        ) as answer,
    ):
        async for chunk in answer.aiter_text():
            text += chunk
            if is_enough(text):
                return text
    raise AssertionError(text)


def content(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {") and line.endswith("}")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def recorded(attempt: LiveAttempt, count: int = 1) -> tuple[Transition, ...]:
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await attempt.transitions()) < count:
            await asyncio.sleep(0.005)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def said(engine: ScriptedEngine, transition: Transition) -> str:
    return str(engine.tokenizer.decode(transition.completion_ids.tolist()))


async def test_a_stream_that_the_agent_leaves_is_recorded_as_far_as_it_was_sent(tmp_path: Path) -> None:
    engine = StuckEngine(after=len("Action: look"))
    engine.enqueue("Action: look\nObservation: made up")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        await read_until(
            attempt, "chat/completions", {"messages": [USER]}, lambda text: content(text) == "Action: look"
        )
        (transition,) = await recorded(attempt)
        assert said(engine, transition) == "Action: look"
        assert transition.finish_reason is FinishReason.BROKEN_OFF
        assert transition.trainable
        assert tuple(transition.logprobs.tolist()) == pseudo_logprobs(transition.completion_ids.tolist())
        assert tuple(transition.prompt_ids.tolist()) == engine.requests[0].prompt_ids
        assert engine.cancelled == [transition.id]

        engine.after = 10**9
        history = [
            USER,
            {"role": "assistant", "content": "Action: look"},
            {"role": "user", "content": "Observation: 42"},
        ]
        await read_until(attempt, "chat/completions", {"messages": history}, lambda text: "[DONE]" in text)
        first, second = await recorded(attempt, 2)
        assert second.parent_id == first.id and not second.is_break


@pytest.mark.parametrize(
    ("script", "stop", "sent"),
    [("Hello STO", ["STOP"], "Hello"), ("Hello   ", [], "Hello"), ("Hello <tool_c", [], "Hello")],
    ids=["half a stop string", "spaces", "half a marker"],
)
async def test_tokens_whose_text_was_held_back_are_not_recorded(
    tmp_path: Path, script: str, stop: list[str], sent: str
) -> None:
    engine = StuckEngine(after=len(script), chunk_tokens=len(script))
    engine.enqueue(script + " and more than was sampled")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        await read_until(
            attempt, "chat/completions", {"messages": [USER], "stop": stop}, lambda text: content(text) == sent
        )
        (transition,) = await recorded(attempt)
        assert said(engine, transition) == sent


@pytest.mark.parametrize("path", ["responses", "messages"])
async def test_it_is_so_in_every_dialect(tmp_path: Path, path: str) -> None:
    engine = StuckEngine(after=5)
    engine.enqueue("Hello world")
    body: dict[str, Any] = {"input": "hi"} if path == "responses" else {"messages": [USER], "max_tokens": 99}
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        await read_until(
            attempt, path, body, lambda text: text.count("_delta" if path == "messages" else "output_text.delta\n") >= 5
        )
        (transition,) = await recorded(attempt)
        assert said(engine, transition) == "Hello"


async def test_a_tool_call_that_was_sent_is_recorded_with_its_id(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    engine = StuckEngine(after=len(tiny_tokenizer().encode(call)) + 1)
    engine.enqueue(call + "\n<tool_call>\n")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        events = await read_until(
            attempt,
            "chat/completions",
            {"messages": [USER], "tools": TOOLS},
            lambda text: '"tool_calls"' in text and text.endswith("\n\n"),
        )
        (transition,) = await recorded(attempt)
        assert said(engine, transition) == call
        assert len(transition.tool_call_ids) == 1 and transition.tool_call_ids[0] in events


async def test_reasoning_that_was_not_sent_is_not_recorded(tmp_path: Path) -> None:
    engine = StuckEngine(after=12)
    engine.enqueue("<think>hidden thoughts")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        reading = asyncio.create_task(
            read_until(attempt, "messages", {"max_tokens": 99, "messages": [USER]}, lambda text: False)
        )
        async with asyncio.timeout(PATIENCE_S):
            await engine.stuck.wait()
        reading.cancel()
        await until(lambda: bool(engine.cancelled))
        assert await attempt.transitions() == ()


async def test_every_choice_is_recorded_as_far_as_it_was_sent(tmp_path: Path) -> None:
    engine = StuckEngine(after=3)
    engine.enqueue("one and", "two and")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        await read_until(
            attempt, "chat/completions", {"messages": [USER], "n": 2}, lambda text: len(content(text)) == 6
        )
        transitions = await recorded(attempt, 2)
        assert {said(engine, transition) for transition in transitions} == {"one", "two"}


@pytest.mark.parametrize(
    "headers", [{"x_lightningrl_call_id": "c1"}, {"x_stainless_retry_count": "1"}], ids=["call id", "sdk retry"]
)
async def test_a_retry_of_a_stream_that_was_left_is_a_call_of_its_own(tmp_path: Path, headers: dict[str, str]) -> None:
    engine = StuckEngine(after=3)
    engine.enqueue("one and", "two and")
    first = {name: value for name, value in headers.items() if "call_id" in name}
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        await read_until(
            attempt, "chat/completions", {"messages": [USER]}, lambda text: content(text) == "one", **first
        )
        await recorded(attempt)
        engine.after = 10**9
        text = await read_until(
            attempt, "chat/completions", {"messages": [USER]}, lambda text: "[DONE]" in text, **headers
        )
        assert content(text) == "two and"
        assert [transition.finish_reason for transition in await recorded(attempt, 2)] == [
            FinishReason.BROKEN_OFF,
            FinishReason.STOP,
        ]


async def test_a_stream_that_ends_with_its_attempt_is_not_recorded(tmp_path: Path) -> None:
    engine = StuckEngine(after=3)
    engine.enqueue("one and")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()

        reading = asyncio.Event()
        leave = asyncio.Event()

        async def agent() -> None:
            async with (
                httpx.AsyncClient(timeout=PATIENCE_S) as client,
                client.stream(
                    "POST",
                    f"{attempt.base_url}/chat/completions",
                    json={"model": "m", "stream": True, "messages": [USER]},
                    headers={"Authorization": f"Bearer {attempt.key}"},
                ) as answer,
            ):
                async for _ in answer.aiter_text():
                    reading.set()
                    await leave.wait()
                    return

        working = asyncio.create_task(agent())
        await reading.wait()
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.TIMEOUT)
        leave.set()
        await working
        await until(lambda: bool(engine.cancelled))
        other = await gateway.attempt()
        assert await attempt.transitions() == ()
        engine.after = 10**9
        await read_until(other, "chat/completions", {"messages": [USER]}, lambda text: "[DONE]" in text)


CALLS = '<tool_call>\n{"name": "search", "arguments": {"q": 1}}\n</tool_call>\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("chunk_tokens", [1, 10**6], ids=["token by token", "one chunk"])
async def test_a_streamed_delta_has_one_tool_call_at_most(tmp_path: Path, chunk_tokens: int) -> None:
    """Stock clients read the first of each and lose the others."""
    engine = StuckEngine(chunk_tokens=chunk_tokens)
    engine.enqueue(f"Let me see. {CALLS}")
    async with live_gateway(tmp_path, engine=engine) as gateway:
        attempt = await gateway.attempt()
        body = {"messages": [USER], "tools": TOOLS, "logprobs": True}
        for _ in range(2):  # the second is the recorded answer, sent again
            events = await read_until(
                attempt, "chat/completions", body, lambda text: "[DONE]" in text, x_lightningrl_call_id="c1"
            )
            choices = [json.loads(line[6:])["choices"][0] for line in events.splitlines() if line.startswith("data: {")]
            calls = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
            assert [[(call["index"], call["function"]["name"]) for call in one] for one in calls] == [
                [(0, "search")],
                [(1, "lookup")],
            ]
            assert content(events).strip() == "Let me see."
            logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            (transition,) = await attempt.transitions()
            assert len(logprobs) == len(transition.completion_ids)
