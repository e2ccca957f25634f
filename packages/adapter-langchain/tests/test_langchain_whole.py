"""The whole way of an unmodified LangGraph agent: worker, redirection, adapter, real gateway, real store."""

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

TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 22}}\n</tool_call>'


@asynccontextmanager
async def working(folder: Path, engine: ScriptedEngine, agent: str) -> AsyncIterator[ServerClient]:
    async with whole_path(
        folder, f"graph_agents.py:{agent}", engine=engine, adapters=["langchain"], base_dir=Path(__file__).parent
    ) as path:
        yield path.client


async def run(client: ServerClient, rollout_id: str, task_input: Any) -> Trajectory:
    await client.create_rollouts([RolloutSpec(id=rollout_id, task=Task(id=rollout_id, input=task_input), group_id="g")])
    await client.wait([rollout_id], 60)
    (trajectory,) = await client.trajectories([rollout_id])
    return trajectory


async def test_roles_and_spans_reach_the_recorded_transitions(tmp_path: Path) -> None:
    async with working(tmp_path, ScriptedEngine(tiny_tokenizer()), "answer") as client:
        for kind in ("sync", "async", "stream", "async_stream", "threads"):
            trajectory = await run(client, kind, {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            each = 3 if kind == "threads" else 1
            assert [transition.agent for transition in trajectory.transitions] == ["draft"] * each + ["review"] * each
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == 2 * each


async def test_a_tool_call_is_joined_to_the_transition_that_asked(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(TOOL_CALL, "the sum is 42")
    async with working(tmp_path, engine, "add_with_tools") as client:
        trajectory = await run(client, "r1", "what is 20 + 22?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "the sum is 42"), trajectory.error
    (tool,) = trajectory.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "model")
    assert tool.transition_id == trajectory.transitions[0].id
    assert tool.id in trajectory.transitions[0].tool_call_ids


async def test_a_prompt_beyond_the_context_ends_as_context_overflow(tmp_path: Path) -> None:
    async with working(tmp_path, ScriptedEngine(tiny_tokenizer(), context_length=64), "answer") as client:
        trajectory = await run(client, "r1", {"kind": "sync", "text": "a long story " * 50})
    assert trajectory.outcome is Outcome.CONTEXT_OVERFLOW
    assert trajectory.transitions == ()
