"""The whole way: a worker, somebody else's instrumentation, the real gateway, the real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lightningrl.types import Outcome, ToolStatus, Trajectory
from lightningrl_testing.whole_path import WholePath, running_services

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).parent


def asks(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    async with running_services(tmp_path_factory.mktemp("whole")) as path:
        yield path


async def run(path: WholePath, rollout_id: str, task_input: str) -> Trajectory:
    trajectory = await path.run_one(rollout_id, task_input)
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    return trajectory


@pytest.mark.parametrize("adapters", [["opentelemetry"], ["opentelemetry", "langchain"]])
async def test_langgraph_through_openinference(path: WholePath, adapters: list[str]) -> None:
    """Alone, or beside the adapter that knows LangGraph: the same roles and the same tool calls, each once."""
    path.engine.enqueue(asks("add", '{"a": 20, "b": 22}'), "it is 42", asks("fail", "{}"), "it is not")
    name = "-".join(adapters)
    async with path.workers("otel_agents.py:openinference_langgraph", adapters=adapters, base_dir=HERE):
        good, bad = await run(path, f"{name}-good", "what is 20 + 22?"), await run(path, f"{name}-bad", "fail, please")
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


async def test_pydantic_ai_through_its_own_spans(path: WholePath) -> None:
    path.engine.enqueue(
        asks("nonsense", "{}"), asks("add", '{"a": "x"}'), asks("consult", '{"question": "why?"}'), "because", "done"
    )
    async with path.workers("otel_agents.py:pydantic_ai", adapters=["opentelemetry"], base_dir=HERE):
        trajectory = await run(path, "pydantic_ai", "why?")
    assert [call.agent for call in trajectory.transitions] == ["boss", "boss", "boss", "helper", "boss"]
    assert {(tool.name, tool.status) for tool in trajectory.tool_calls} == {
        ("nonsense", ToolStatus.UNKNOWN_TOOL),
        ("add", ToolStatus.INVALID_ARGUMENTS),
        ("consult", ToolStatus.OK),
    }
    asked = {call_id: call.id for call in trajectory.transitions for call_id in call.tool_call_ids}
    assert all(tool.transition_id == asked[tool.id] and tool.agent == "boss" for tool in trajectory.tool_calls)


async def test_an_answer_by_a_tool_is_a_record_and_one_that_does_not_fit_is_invalid(path: WholePath) -> None:
    path.engine.enqueue(asks("final_result", '{"city": 5}'), asks("final_result", '{"city": "Rome"}'))
    async with path.workers("otel_agents.py:pydantic_ai_structured", adapters=["opentelemetry"], base_dir=HERE):
        trajectory = await run(path, "pydantic_ai_structured", "where?")
    assert trajectory.output == "Rome"
    first, second = trajectory.transitions
    assert [(tool.name, tool.status, tool.agent, tool.transition_id) for tool in trajectory.tool_calls] == [
        ("final_result", ToolStatus.INVALID_ARGUMENTS, "guide", first.id),
        ("final_result", ToolStatus.OK, "guide", second.id),
    ]
