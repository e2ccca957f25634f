"""The whole way of an unmodified agent: worker, redirection, adapter, real gateway, real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.server.client import ServerClient
from lightningrl.testing.scripted_engine import ScriptedEngine
from lightningrl.testing.tokenizers import tiny_tokenizer
from lightningrl.testing.whole_path import whole_path
from lightningrl.types import Outcome, RolloutSpec, Task, ToolStatus, Trajectory


def asking(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def working(folder: Path, engine: ScriptedEngine, agent: str) -> AsyncIterator[ServerClient]:
    async with whole_path(
        folder, f"sdk_agents.py:{agent}", engine=engine, adapters=["openai-agents"], base_dir=Path(__file__).parent
    ) as path:
        yield path.client


async def run(client: ServerClient, rollout_id: str, task_input: Any) -> Trajectory:
    await client.create_rollouts([RolloutSpec(id=rollout_id, task=Task(id=rollout_id, input=task_input), group_id="g")])
    await client.wait([rollout_id], 60)
    (trajectory,) = await client.trajectories([rollout_id])
    return trajectory


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_agents_and_spans_reach_the_recorded_transitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    monkeypatch.setenv("API", api)
    async with working(tmp_path, ScriptedEngine(tiny_tokenizer()), "answer") as client:
        for kind in ("sync", "async", "stream", "async_stream"):
            trajectory = await run(client, kind, {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [transition.agent for transition in trajectory.transitions] == ["draft", "review"]
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == 2


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_a_tool_call_is_joined_to_the_transition_that_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    monkeypatch.setenv("API", api)
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asking("add", '{"a": 20, "b": 22}'), "the sum is 42")
    async with working(tmp_path, engine, "add_with_tools") as client:
        trajectory = await run(client, "r1", "what is 20 + 22?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    (tool,) = trajectory.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "worker")
    assert tool.transition_id == trajectory.transitions[0].id
    assert tool.id in trajectory.transitions[0].tool_call_ids


async def test_a_handoff_is_joined_to_the_transition_that_asked(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asking("transfer_to_writer", "{}"), "a poem")
    async with working(tmp_path, engine, "answer") as client:
        trajectory = await run(client, "r1", {"kind": "handoff", "text": "write"})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert [transition.agent for transition in trajectory.transitions] == ["triage", "writer"]
    (tool,) = trajectory.tool_calls
    assert (tool.name, tool.status, tool.transition_id) == ("transfer_to_writer", ToolStatus.OK, trajectory.transitions[0].id)


async def test_an_unknown_tool_is_recorded_with_the_failed_attempt(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asking("nonsense", "{}"))
    async with working(tmp_path, engine, "add_with_tools") as client:
        trajectory = await run(client, "r1", "what is 20 + 22?")
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert [(tool.name, tool.status) for tool in trajectory.tool_calls] == [("nonsense", ToolStatus.UNKNOWN_TOOL)]
