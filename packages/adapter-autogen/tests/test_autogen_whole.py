"""The whole way of an unmodified AutoGen agent: worker, redirection, adapter, real gateway, real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lightningrl.server.client import ServerClient
from lightningrl.testing.scripted_engine import ScriptedEngine
from lightningrl.testing.tokenizers import tiny_tokenizer
from lightningrl.testing.whole_path import whole_path
from lightningrl.types import Outcome, RolloutSpec, Task, ToolStatus, Trajectory


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def working(folder: Path, engine: ScriptedEngine, agent: str) -> AsyncIterator[ServerClient]:
    async with whole_path(
        folder, f"autogen_agents.py:{agent}", engine=engine, adapters=["autogen"], base_dir=Path(__file__).parent
    ) as path:
        yield path.client


async def run(client: ServerClient, rollout_id: str, task_input: Any) -> Trajectory:
    await client.create_rollouts([RolloutSpec(id=rollout_id, task=Task(id=rollout_id, input=task_input), group_id="g")])
    await client.wait([rollout_id], 60)
    (trajectory,) = await client.trajectories([rollout_id])
    return trajectory


async def test_roles_and_spans_reach_the_recorded_transitions(tmp_path: Path) -> None:
    roles = {
        "async": ["draft", "review"],
        "async_stream": ["draft", "review"],
        "round_robin": ["writer", "critic", "writer"],
        "selector": ["SelectorGroupChatManager", "writer"] * 2,
    }
    engine = ScriptedEngine(tiny_tokenizer(), reply=lambda prompt: "writer")
    async with working(tmp_path, engine, "answer") as client:
        for kind, expected in roles.items():
            trajectory = await run(client, kind, {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [transition.agent for transition in trajectory.transitions] == expected
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == len(expected)


async def test_a_tool_call_is_joined_to_the_transition_that_asked(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(tool_call("add", '{"a": 20, "b": 22}'), "the sum is 42")
    async with working(tmp_path, engine, "add_with_tools") as client:
        trajectory = await run(client, "r1", "what is 20 + 22?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    (tool,) = trajectory.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "calculator")
    assert tool.transition_id == trajectory.transitions[0].id
    assert tool.id in trajectory.transitions[0].tool_call_ids


async def test_each_way_of_failing_reaches_the_trajectory(tmp_path: Path) -> None:
    ways = {
        tool_call("fail", "{}"): ToolStatus.ERROR,
        tool_call("add", '{"a": "many"}'): ToolStatus.INVALID_ARGUMENTS,
        tool_call("nonsense", "{}"): ToolStatus.UNKNOWN_TOOL,
    }
    engine = ScriptedEngine(tiny_tokenizer())
    async with working(tmp_path, engine, "add_with_tools") as client:
        for asked, status in ways.items():
            engine.enqueue(asked, "done")
            trajectory = await run(client, status.value, "please")
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [(tool.status, tool.transition_id) for tool in trajectory.tool_calls] == [(status, trajectory.transitions[0].id)]


async def test_a_prompt_beyond_the_context_ends_as_context_overflow(tmp_path: Path) -> None:
    for kind in ("async", "round_robin"):
        folder = tmp_path / kind
        folder.mkdir()
        async with working(folder, ScriptedEngine(tiny_tokenizer(), context_length=64), "answer") as client:
            trajectory = await run(client, "r1", {"kind": kind, "text": "a long story " * 50})
        assert (trajectory.outcome, trajectory.transitions) == (Outcome.CONTEXT_OVERFLOW, ()), kind
