"""A provider's answers are the same rows whether they were streamed or not, in each dialect; the provider is a real
server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.types import Outcome
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_traces.curation.chat_calls import ChatCall
from lightningrl_traces.curation.forwarded import read_forwarded
from lightningrl_traces.reading.streams import join_events

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
