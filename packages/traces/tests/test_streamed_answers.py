"""A provider's answers are the same rows whether they were streamed or not, in each dialect; the provider is a real
server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from lightningrl.types import Outcome, Trajectory
from lightningrl_runs.foreign.bodies import join_events
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_traces.curation.rules import ChatCall, LeftOut, UnreadCall
from lightningrl_traces.curation.sources import read_forwarded

USER: Any = {"role": "user", "content": "What is 6 times 7?"}
SCHEMA: Any = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION: Any = {"name": "search", "parameters": SCHEMA}
REQUESTS: dict[str, Any] = {
    "chat/completions": {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"input": [USER], "tools": [{"type": "function", **FUNCTION}]},
    "messages": {"messages": [USER], "max_tokens": 200, "tools": [{"name": "search", "input_schema": SCHEMA}]},
}
CALLS = "".join(
    f'<tool_call>\n{{"name": "search", "arguments": {{"q": "{word}"}}}}\n</tool_call>\n' for word in ("ü", "b c")
)
SAID = ("It is 42 ✓.", "Let me look.\n" + CALLS, CALLS)


@asynccontextmanager
async def provided(folder: Path) -> AsyncIterator[tuple[LiveGateway, LiveGateway]]:
    """A gateway, and the provider that answers its calls."""
    (folder / "provider").mkdir()
    (folder / "ours").mkdir()
    async with live_gateway(folder / "provider") as provider:
        asked = await provider.attempt()
        upstream = Upstream(base_url=asked.base_url, api_key=asked.key)
        settings = GatewaySettings(upstream_models={"teacher": upstream})
        async with live_gateway(folder / "ours", settings=settings) as ours:
            yield ours, provider
            await ours.gateway.close()


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_streamed_answer_is_the_row_that_a_whole_one_is(tmp_path: Path, path: str, said: str) -> None:
    async with provided(tmp_path) as (ours, provider):
        attempt = await ours.attempt()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {attempt.key}"}) as client:
            for stream in (False, True):
                provider.engine.enqueue(said)
                body = {"model": "teacher", "stream": stream, **REQUESTS[path]}
                answer = await client.post(f"{attempt.base_url}/{path}", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.headers["content-type"].startswith("text/event-stream") == stream
        await ours.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await ours.store.trajectories([attempt.rollout_id])
    whole, streamed = read_forwarded(trajectory)
    assert isinstance(whole, ChatCall) and isinstance(streamed, ChatCall), (whole, trajectory.other_calls)
    assert [_without_ids(one.answer) for one in (whole, streamed)] == [_without_ids(whole.answer)] * 2
    calls = streamed.answer.get("tool_calls", ())
    assert len(calls) == said.count("<tool_call>") and all(call["id"] for call in calls)
    assert (streamed.prompt, streamed.tools) == (whole.prompt, whole.tools)


@asynccontextmanager
async def streamed(folder: Path, events: Callable[[], AsyncIterator[bytes]]) -> AsyncIterator[Streamed]:
    """A call of chat that a provider answers with these events."""

    async def answer(_: Request) -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    async with serving(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])) as url:
        settings = GatewaySettings(upstream_models={"teacher": Upstream(base_url=f"{url}/v1")})
        async with live_gateway(folder, settings=settings) as gateway:
            attempt = await gateway.attempt()
            headers = {"authorization": f"Bearer {attempt.key}"}
            body = {"model": "teacher", "stream": True, "messages": [USER]}
            async with (
                httpx.AsyncClient(headers=headers) as client,
                client.stream("POST", f"{attempt.base_url}/chat/completions", json=body) as answered,
            ):
                yield Streamed(attempt=attempt, answer=answered)
            await gateway.gateway.close()


@dataclass(frozen=True, kw_only=True)
class Streamed:
    attempt: LiveAttempt
    answer: httpx.Response

    async def end(self) -> Trajectory:
        """End the attempt; what was recorded until then."""
        await self.attempt.store.finish_attempt(self.attempt.rollout_id, self.attempt.attempt, Outcome.SUCCEEDED)
        (trajectory,) = await self.attempt.store.trajectories([self.attempt.rollout_id])
        return trajectory


@pytest.mark.parametrize(("tokens", "kind"), [(1000, ChatCall), (5000, UnreadCall)])
async def test_a_streamed_answer_of_a_thousand_tokens_is_a_row_and_what_is_kept_is_bounded(
    tmp_path: Path, tokens: int, kind: type[ChatCall | UnreadCall]
) -> None:
    words = [f"word{number} " for number in range(tokens)]
    async with streamed(tmp_path, lambda: _events_of(words)) as call:
        sent = await call.answer.aread()
        trajectory = await call.end()
    assert len(sent) > 200 * tokens, "each token has an event of its own, two hundred bytes long"
    (read,), (recorded,) = read_forwarded(trajectory), trajectory.other_calls
    assert isinstance(read, kind), recorded.answer
    if isinstance(read, ChatCall):
        assert read.answer["content"] == "".join(words)
    else:
        assert recorded.answer == {"bytes": len(sent)} and read.reason is LeftOut.UNKEPT


async def test_a_stream_is_recorded_before_its_reader_sees_the_end(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        async for event in _events_of(["42"]):
            yield event
        await held.wait()  # the connection stays open behind the last event

    async with streamed(tmp_path, events) as call:
        async for line in call.answer.aiter_lines():
            if line == "data: [DONE]":
                break
        trajectory = await call.end()
        held.set()
    (read,) = read_forwarded(trajectory)
    assert isinstance(read, ChatCall) and read.answer["content"] == "42"


async def _events_of(words: list[str]) -> AsyncIterator[bytes]:
    """Stream as providers do: a comment while the model thinks, carriage returns, a last event of usage alone."""
    head = {"id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT", "object": "chat.completion.chunk", "created": 1741569952}
    head |= {"model": "gpt-4o-2024-08-06", "service_tier": "default", "system_fingerprint": "fp_50cad350e4"}
    deltas: list[Any] = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
    choices = [[{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}] for delta in deltas]
    choices[-1][0]["finish_reason"] = "stop"
    yield b": keep-alive\r\n\r\n"
    for choice in (*choices, []):
        usage = None if choice else {"prompt_tokens": 9, "completion_tokens": len(words)}
        yield f"data: {json.dumps({**head, 'choices': choice, 'usage': usage})}\r\n\r\n".encode()
    yield b"data: [DONE]\r\n\r\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing of the sort",
        'data: {"choices": [{"index": 0, "delta": {"content": "half an ans',
        'data: {"choices": [{"index": 0, "delta": {"content": "no end"}}]}\n\n',
        'data: {"choices": [1, {"delta": 3}, {"delta": {"tool_calls": [{"index": "x", "function": 1}]}}]}\n\n',
        'data: {"type": "message_start", "message": 4}\n\ndata: {"type": "content_block_delta", "index": 0}\n\n',
        'data: {"type": "response.created", "response": {}}\n\n',
    ],
)
def test_what_is_no_stream_or_broke_off_is_no_answer(text: str) -> None:
    assert join_events(text) is None


def _without_ids(message: Any) -> Any:
    """Ids of calls are drawn anew."""
    calls = [{**call, "id": "", "type": call.get("type", "function")} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}
