"""The whole way: a worker, somebody else's instrumentation, the real gateway, the real store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightningrl.server.client import ServerClient
from lightningrl.testing.scripted_engine import ScriptedEngine
from lightningrl.testing.tokenizers import tiny_tokenizer
from lightningrl.testing.whole_path import whole_path
from lightningrl.types import Outcome, RolloutSpec, Task, ToolStatus, Trajectory


def asks(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def working(folder: Path, engine: ScriptedEngine, agent: str, adapters: Sequence[str]) -> AsyncIterator[ServerClient]:
    async with whole_path(folder, f"otel_agents.py:{agent}", engine=engine, adapters=adapters, base_dir=Path(__file__).parent) as path:
        yield path.client


async def run(client: ServerClient, rollout_id: str, task_input: Any) -> Trajectory:
    await client.create_rollouts([RolloutSpec(id=rollout_id, task=Task(id=rollout_id, input=task_input), group_id="g")])
    await client.wait([rollout_id], 60)
    (trajectory,) = await client.trajectories([rollout_id])
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    return trajectory


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [["opentelemetry"], ["opentelemetry", "langchain"]])
async def test_langgraph_through_openinference(tmp_path: Path, adapters: list[str]) -> None:
    """Alone, or beside the adapter that knows LangGraph: the same roles and the same tool calls, each once."""
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asks("add", '{"a": 20, "b": 22}'), "it is 42", asks("fail", "{}"), "it is not")
    async with working(tmp_path, engine, "openinference_langgraph", adapters) as client:
        good, bad = await run(client, "good", "what is 20 + 22?"), await run(client, "bad", "fail, please")
    for trajectory, name, status in ((good, "add", ToolStatus.OK), (bad, "fail", ToolStatus.ERROR)):
        first, second = trajectory.transitions
        assert [call.agent for call in trajectory.transitions] == ["draft", "review"]
        assert len({call.span_id for call in trajectory.transitions} - {None}) == 2
        (tool,) = trajectory.tool_calls
        assert (tool.name, tool.status, tool.agent) == (name, status, "draft")
        assert tool.id in first.tool_call_ids
        assert tool.transition_id == first.id != second.id
    assert good.tool_calls[0].result == "42"
    assert bad.tool_calls[0].error_type == "ValueError"


@pytest.mark.slow
async def test_pydantic_ai_through_its_own_spans(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asks("nonsense", "{}"), asks("add", '{"a": "x"}'), asks("consult", '{"question": "why?"}'), "because", "done")
    async with working(tmp_path, engine, "pydantic_ai", ["opentelemetry"]) as client:
        trajectory = await run(client, "r", "why?")
    assert [call.agent for call in trajectory.transitions] == ["boss", "boss", "boss", "helper", "boss"]
    assert {(tool.name, tool.status) for tool in trajectory.tool_calls} == {
        ("nonsense", ToolStatus.UNKNOWN_TOOL),
        ("add", ToolStatus.INVALID_ARGUMENTS),
        ("consult", ToolStatus.OK),
    }
    asked = {call_id: call.id for call in trajectory.transitions for call_id in call.tool_call_ids}
    assert all(tool.transition_id == asked[tool.id] and tool.agent == "boss" for tool in trajectory.tool_calls)


@pytest.mark.slow
async def test_an_answer_by_a_tool_is_no_unknown_tool(tmp_path: Path) -> None:
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue(asks("final_result", '{"city": "Rome"}'))
    async with working(tmp_path, engine, "pydantic_ai_structured", ["opentelemetry"]) as client:
        trajectory = await run(client, "r", "where?")
    assert trajectory.output == "Rome"
    assert [tool for tool in trajectory.tool_calls if tool.status is not ToolStatus.OK] == []
