"""The whole way of an unmodified AutoGen agent: worker, redirection, adapter, real gateway, real store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lightningrl.types import Outcome, ToolStatus
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, repeated_calls, running_services

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).parent


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer(), reply=lambda prompt: "writer")
    async with running_services(tmp_path_factory.mktemp("whole"), engine=engine) as path:
        yield path


async def test_roles_and_spans_reach_the_recorded_transitions_and_long_prompts_overflow(path: WholePath) -> None:
    roles = {
        "async": ["draft", "review"],
        "async_stream": ["draft", "review"],
        "round_robin": ["writer", "critic", "writer"],
        "selector": ["SelectorGroupChatManager", "writer"] * 2,
    }
    async with path.workers("autogen_agents.py:answer", adapters=["autogen"], base_dir=HERE):
        for kind, expected in roles.items():
            trajectory = await path.run_one(kind, {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [transition.agent for transition in trajectory.transitions] == expected
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == len(expected)
            for calls in range(len(trajectory.transitions) + 1):
                branch = await path.branch(trajectory, calls)
                assert (branch.outcome, repeated_calls(branch, trajectory.transitions)) == (Outcome.SUCCEEDED, calls), (
                    branch.error
                )
        for kind in ("async", "round_robin"):
            trajectory = await path.run_one(f"long-{kind}", {"kind": kind, "text": "a long story " * 3000})
            assert (trajectory.outcome, trajectory.transitions) == (Outcome.CONTEXT_OVERFLOW, ()), kind


async def test_a_tool_call_is_joined_to_the_transition_that_asked_and_each_way_of_failing_is_told(
    path: WholePath,
) -> None:
    ways = {
        tool_call("fail", "{}"): ToolStatus.ERROR,
        tool_call("add", '{"a": "many"}'): ToolStatus.INVALID_ARGUMENTS,
        tool_call("nonsense", "{}"): ToolStatus.UNKNOWN_TOOL,
    }
    async with path.workers("autogen_agents.py:add_with_tools", adapters=["autogen"], base_dir=HERE):
        path.engine.enqueue(tool_call("add", '{"a": 20, "b": 22}'), "the sum is 42")
        good = await path.run_one("tool", "what is 20 + 22?")
        branches = [await path.branch(good, calls) for calls in range(3)]
        for asked, status in ways.items():
            path.engine.enqueue(asked, "done")
            trajectory = await path.run_one(status.value, "please")
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [(tool.status, tool.transition_id) for tool in trajectory.tool_calls] == [
                (status, trajectory.transitions[0].id)
            ]
    assert [branch.output for branch in branches] == ["writer", "writer", "the sum is 42"]
    assert [repeated_calls(branch, good.transitions) for branch in branches] == [0, 1, 2]
    assert (good.outcome, good.output) == (Outcome.SUCCEEDED, "the sum is 42"), good.error
    (tool,) = good.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "calculator")
    assert tool.transition_id == good.transitions[0].id
    assert tool.id in good.transitions[0].tool_call_ids
