"""The whole way of an unmodified agent: worker, redirection, adapter, real gateway, real store."""

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


def asking(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer())
    async with running_services(tmp_path_factory.mktemp("whole"), engine=engine) as path:
        yield path


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_agents_spans_and_tools_reach_the_recorded_transitions(
    path: WholePath, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.setenv("API", api)
    async with path.workers("sdk_agents.py:answer", adapters=["openai-agents"], base_dir=HERE):
        for kind in ("sync", "async", "stream", "async_stream"):
            trajectory = await path.run_one(f"{api}-{kind}", {"kind": kind, "text": "hello"})
            assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
            assert [transition.agent for transition in trajectory.transitions] == ["draft", "review"]
            assert len({transition.span_id for transition in trajectory.transitions} - {None}) == 2
            for calls in range(len(trajectory.transitions) + 1):
                branch = await path.branch(trajectory, calls)
                assert (branch.outcome, repeated_calls(branch, trajectory.transitions)) == (Outcome.SUCCEEDED, calls), (
                    branch.error
                )
        path.engine.enqueue(asking("add", '{"a": 20, "b": 22}'), "the sum is 42")
        with_tool = await path.run_one(f"{api}-tool", {"kind": "tools", "text": "what is 20 + 22?"})
        branches = [await path.branch(with_tool, calls) for calls in range(3)]
        path.engine.enqueue(asking("transfer_to_writer", "{}"), "a poem")
        handed_over = await path.run_one(f"{api}-handoff", {"kind": "handoff", "text": "write"})
        path.engine.enqueue(asking("nonsense", "{}"))
        failed = await path.run_one(f"{api}-unknown", {"kind": "tools", "text": "what is 20 + 22?"})
    assert (with_tool.outcome, with_tool.output) == (Outcome.SUCCEEDED, "the sum is 42"), with_tool.error
    (tool,) = with_tool.tool_calls
    assert (tool.name, tool.result, tool.status, tool.agent) == ("add", "42", ToolStatus.OK, "worker")
    assert tool.transition_id == with_tool.transitions[0].id
    assert tool.id in with_tool.transitions[0].tool_call_ids
    assert [branch.output for branch in branches] == ["ok", "ok", "the sum is 42"]
    assert [repeated_calls(branch, with_tool.transitions) for branch in branches] == [0, 1, 2]
    assert handed_over.outcome is Outcome.SUCCEEDED, handed_over.error
    assert [transition.agent for transition in handed_over.transitions] == ["triage", "writer"]
    (tool,) = handed_over.tool_calls
    assert (tool.name, tool.status, tool.transition_id) == (
        "transfer_to_writer",
        ToolStatus.OK,
        handed_over.transitions[0].id,
    )
    assert failed.outcome is Outcome.AGENT_ERROR, "the SDK raises on a tool that it does not know"
    assert [(tool.name, tool.status) for tool in failed.tool_calls] == [("nonsense", ToolStatus.UNKNOWN_TOOL)]
