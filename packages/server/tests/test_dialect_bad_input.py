"""Bad input, by dialect: refused in the dialect's own format with what, which and what next; a typed outcome; nothing
trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from lightningrl.types import OtherCallKind, Outcome, RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_credit.metrics import describe_rollouts
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

CONTEXT = 400
RUN_KEY = "the-run-key"
DIALECTS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
USER: Any = {"role": "user", "content": "hi"}
NO_PARAMETERS = {"type": "object", "properties": {"q": {"type": "strnig"}}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat_call(call_id: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


CHAT_RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}

# dialect, what is bad, the request, and what the sentence says: what, which and what next
BAD: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    (
        "chat",
        "unsupported part",
        {"messages": [user({"type": "video", "video": "x"})]},
        ("messages[0]", "'video'", "reads text only"),
    ),
    (
        "responses",
        "unsupported item",
        {"input": [{"type": "computer_call"}]},
        ("input[0]", "'computer_call'", "the policy reads message"),
    ),
    (
        "messages",
        "unsupported block",
        {"messages": [user({"type": "search_result"})]},
        ("messages[0]", "'search_result'", "holds no text", "send the document's text"),
    ),
    (
        "chat",
        "invalid schema",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": NO_PARAMETERS}}]},
        ("tools[0] ('f')", "has the type 'strnig'", "known are array"),
    ),
    (
        "responses",
        "invalid schema",
        {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": NO_PARAMETERS}]},
        ("tools[0] ('f')", "has the type 'strnig'", "known are array"),
    ),
    (
        "messages",
        "invalid schema",
        {"messages": [USER], "tools": [{"name": "f", "input_schema": NO_PARAMETERS}]},
        ("tools[0] ('f')", "has the type 'strnig'", "known are array"),
    ),
    (
        "chat",
        "provider's tool",
        {"messages": [USER], "tools": [{"type": "web_search"}]},
        ("tools[0]", "no function", "only functions are supported"),
    ),
    (
        "responses",
        "provider's tool",
        {"input": "hi", "tools": [{"type": "web_search"}]},
        ("tools[0]", "'web_search'", "give the agent"),
    ),
    (
        "messages",
        "provider's tool",
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        ("tools[0]", "'bash_20250124'", "give it with an input_schema"),
    ),
    (
        "chat",
        "id of two calls",
        {"messages": [USER, chat_call("c"), chat_call("c"), CHAT_RESULT, CHAT_RESULT]},
        ("tool-call id 'c'", "used by two calls", "give each its own"),
    ),
    (
        "responses",
        "id of two calls",
        {"input": [USER, CALL, OUTPUT, CALL, OUTPUT]},
        ("tool-call id 'c'", "used by two calls", "give each its own"),
    ),
    (
        "messages",
        "id of two calls",
        {"messages": [USER, USE, USE, user(RESULT)]},
        ("tool-call id 'c'", "used by two calls", "give each its own"),
    ),
    (
        "chat",
        "two results",
        {"messages": [USER, chat_call("c"), CHAT_RESULT, CHAT_RESULT]},
        ("'c'", "two results", "send one"),
    ),
    ("responses", "two results", {"input": [USER, CALL, OUTPUT, OUTPUT]}, ("'c'", "two results", "send one")),
    ("messages", "two results", {"messages": [USER, USE, user(RESULT, RESULT)]}, ("'c'", "two results", "send one")),
    (
        "chat",
        "image",
        {"messages": [user({"type": "image_url", "image_url": {"url": "data:"}})]},
        ("messages[0]", "'image_url'", "reads text only"),
    ),
    (
        "responses",
        "image",
        {"input": [user({"type": "input_image", "image_url": "data:"})]},
        ("input[0]", "'input_image'", "reads text only"),
    ),
    (
        "messages",
        "image",
        {"messages": [user({"type": "image", "source": {"type": "url", "url": "https://x"}})]},
        ("messages[0].content[0]", "'image'", "the policy reads text"),
    ),
    (
        "chat",
        "audio",
        {"messages": [user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})]},
        ("messages[0]", "'input_audio'", "reads text only"),
    ),
    (
        "chat",
        "audio it said",
        {"messages": [USER, {"role": "assistant", "audio": {"id": "audio_1"}}, USER]},
        ("messages[1]", "speaks in audio", "send its text"),
    ),
    (
        "responses",
        "audio",
        {"input": [user({"type": "input_audio", "input_audio": {}})]},
        ("input[0]", "'input_audio'", "reads text only"),
    ),
    (
        "messages",
        "audio",
        {"messages": [user({"type": "audio", "source": {}})]},
        ("messages[0].content[0]", "'audio'", "the policy reads text"),
    ),
    (
        "chat",
        "file",
        {"messages": [user({"type": "file", "file": {"file_id": "f"}})]},
        ("messages[0]", "'file'", "reads text only"),
    ),
    (
        "responses",
        "file",
        {"input": [user({"type": "input_file", "file_id": "f"})]},
        ("input[0]", "'input_file'", "reads text only"),
    ),
    (
        "messages",
        "file",
        {"messages": [user({"type": "document", "source": {"type": "file", "file_id": "f"}})]},
        ("messages[0]", "'document'", "the policy reads text only"),
    ),
    (
        "chat",
        "previous response",
        {"messages": [USER], "extra_body": {"previous_response_id": "resp_1"}},
        ("chat completions", "previous_response_id", "send the whole history"),
    ),
    (
        "responses",
        "previous response",
        {"input": "hi", "previous_response_id": "resp_1"},
        ("no previous response 'resp_1'", "in this attempt", "or the whole input"),
    ),
    (
        "messages",
        "previous response",
        {"messages": [USER], "extra_body": {"previous_response_id": "resp_1"}},
        ("a message", "previous_response_id", "send the whole history"),
    ),
    (
        "chat",
        "too long",
        {"messages": [{"role": "user", "content": "x" * 500}]},
        ("context length is 400", "your messages", "shorten them"),
    ),
    (
        "responses",
        "too long",
        {"input": "x" * 500},
        ("context length is 400", "your messages and tools take", "shorten them"),
    ),
    (
        "messages",
        "too long",
        {"messages": [{"role": "user", "content": "x" * 500}]},
        ("prompt is too long", "context length is 400", "shorten them"),
    ),
    (
        "chat",
        "a call that cannot be forced",
        {"messages": [USER], "tool_choice": "required"},
        ("tool_choice", "no tools are offered", "send tools"),
    ),
    (
        "responses",
        "a call that cannot be forced",
        {"input": "hi", "tool_choice": "required"},
        ("tool_choice", "no tools", "send tools"),
    ),
    (
        "messages",
        "a call that cannot be forced",
        {"messages": [USER], "tool_choice": {"type": "any"}},
        ("tool_choice", "no tools are offered", "send tools"),
    ),
]
CODES = {"too long": "context_length_exceeded", "previous response": "previous_response_not_found"}
each_bad_input = pytest.mark.parametrize(
    ("dialect", "kind", "body", "sentence"), [pytest.param(*row, id=f"{row[0]}: {row[1]}") for row in BAD]
)


def code_of(dialect: str, kind: str) -> str:
    return (
        "invalid_request"
        if kind == "previous response" and dialect != "responses"
        else CODES.get(kind, "invalid_request")
    )


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path, engine=ScriptedEngine(tiny_tokenizer(), context_length=CONTEXT)) as running:
        yield running


async def send(attempt: LiveAttempt, dialect: str, body: dict[str, Any], stream: bool) -> Any:
    if dialect == "messages":
        async with anthropic.AsyncAnthropic(
            base_url=attempt.base_url.removesuffix("/v1"), api_key=attempt.key, max_retries=0
        ) as claude:
            return await claude.messages.create(**{"model": "m", "max_tokens": 20, "stream": stream, **body})
    async with openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        create: Any = client.responses.create if dialect == "responses" else client.chat.completions.create
        return await create(**{"model": "m", "stream": stream, **body})


@each_bad_input
async def test_bad_input_is_refused_as_the_dialect_does_it_and_kept_with_the_attempt(
    gateway: LiveGateway, dialect: str, kind: str, body: dict[str, Any], sentence: tuple[str, ...]
) -> None:
    attempt = await gateway.attempt()
    for stream in (False, True):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await send(attempt, dialect, body, stream)
        error: Any = caught.value
        if dialect == "messages":
            assert caught.type is anthropic.BadRequestError
            assert (error.body["type"], error.body["error"]["type"]) == ("error", "invalid_request_error")
        else:
            assert caught.type is openai.BadRequestError
            assert (error.type, error.code) == ("invalid_request_error", code_of(dialect, kind))
            assert error.param
        assert all(part in str(error) for part in sentence), str(error)
    assert gateway.engine.requests == []
    assert await attempt.transitions() == ()
    assert await gateway.gateway.is_overflowed(attempt.rollout_id, attempt.attempt) is (kind == "too long")
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED, "swallowed")
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    assert trajectory.tool_calls == (), "no reward of tools sees them"
    assert [(call.kind, call.path, call.code, call.status) for call in trajectory.other_calls] == [
        (OtherCallKind.REFUSED, DIALECTS[dialect], code_of(dialect, kind), 400)
    ] * 2
    assert all(part in trajectory.other_calls[0].message for part in sentence if part != "prompt is too long")
    assert describe_rollouts([trajectory])["calls_refused"] == 2


async def test_two_results_of_one_call_are_told_also_where_the_call_is_in_an_earlier_response(
    gateway: LiveGateway,
) -> None:
    gateway.engine.enqueue('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    attempt = await gateway.attempt()
    tools = [{"type": "function", "name": "f"}]
    first = await send(attempt, "responses", {"input": "hi", "tools": tools}, False)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "x"}
    with pytest.raises(openai.BadRequestError, match="two results; send one"):
        await send(
            attempt, "responses", {"input": [output, output], "previous_response_id": first.id, "tools": tools}, False
        )
    await send(attempt, "responses", {"input": [output], "previous_response_id": first.id, "tools": tools}, False)
    assert len(await attempt.transitions()) == 2


async def test_an_agent_that_asks_again_and_again_does_not_fill_the_store(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with httpx.AsyncClient(base_url=attempt.base_url, headers={"x-api-key": attempt.key}) as client:
        for _ in range(105):
            assert (await client.post("/chat/completions", json={})).status_code == 400
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED, "swallowed")
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    assert len(trajectory.other_calls) == 100


@asynccontextmanager
async def working(folder: Path, agent: str) -> AsyncIterator[tuple[ServerClient, ScriptedEngine]]:
    engine = ScriptedEngine(tiny_tokenizer(), context_length=CONTEXT)
    engine.tokenizer.save_pretrained(folder / "policy")
    policies = {engine.policy: PolicySettings(model=folder / "policy")}
    settings = ServerSettings(store_url=f"sqlite:///{folder}/store.db", run_key=RUN_KEY, policies=policies)
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
        EngineLink(engine, server.url, RUN_KEY),
        WorkerPool(server.url, RUN_KEY, agent, workers=1, base_dir=Path(__file__).parent, log_folder=folder),
    ):
        yield client, engine


GOOD = {"chat": {"messages": [USER]}, "responses": {"input": "hi"}, "messages": {"messages": [USER]}}


@pytest.mark.slow
async def test_an_agent_that_raises_is_typed_and_one_that_swallows_a_refusal_leaves_a_trace(tmp_path: Path) -> None:
    """Each bad input after a call that was answered: a real worker, a real server, the official SDKs."""
    tasks = [
        Task(
            id=f"{ending}-{index}",
            input={"dialect": dialect, "bodies": [GOOD[dialect], body], "swallows": ending == "swallows"},
        )
        for ending in ("raises", "swallows")
        for index, (dialect, _, body, _) in enumerate(BAD)
    ]
    async with working(tmp_path, "bad_input_agents.py:act") as (client, engine):
        await client.create_rollouts([RolloutSpec(id=task.id, task=task, group_id="g") for task in tasks])
        await client.wait([task.id for task in tasks], 900)
        trajectories = await client.trajectories([task.id for task in tasks])
    for place, trajectory in enumerate(trajectories):
        dialect, kind, _, sentence = BAD[place % len(BAD)]
        if place < len(BAD):
            assert trajectory.outcome is (Outcome.CONTEXT_OVERFLOW if kind == "too long" else Outcome.AGENT_ERROR), (
                trajectory.error
            )
            assert all(part in (trajectory.error or "") for part in sentence), trajectory.error
        else:
            assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "I did what I could")
        assert len(trajectory.transitions) == 1, "what was answered is there, what was refused is not"
        (refused,) = trajectory.other_calls
        assert (refused.path, refused.code) == (DIALECTS[dialect], code_of(dialect, kind))
    assert len(engine.requests) == len(tasks)
