"""Answers with a structure that are asked for as tools (`ToolStrategy`): each is a record with a status, whatever
becomes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lightningrl.types import Outcome, ToolStatus
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, running_services

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent
GOOD = '<tool_call>\n{"name": "Place", "arguments": {"city": "Rome", "year": 2000}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "Place", "arguments": {"city": "Rome", "year": "no number"}}\n</tool_call>'
TABLES = '<tool_call>\n{"name": "tables", "arguments": {}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server and one worker for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer())
    async with (
        running_services(tmp_path_factory.mktemp("structured"), engine=engine) as path,
        path.workers("structured_agents.py:answer", adapters=["langchain"], base_dir=HERE),
    ):
        yield path


async def statuses(
    path: WholePath, name: str, *said: str, handle_errors: bool = True
) -> tuple[Outcome, list[tuple[str, ToolStatus, int]]]:
    """How the rollout ended; of each tool call its name, its status and the call that asked."""
    path.engine.enqueue(
        *(text.removeprefix("<tool_call>\n") for text in said)
    )  # LangChain asks for a tool: the call is begun
    trajectory = await path.run_one(name, {"handle_errors": handle_errors})
    places = {transition.id: transition.index for transition in trajectory.transitions}
    assert trajectory.outcome is Outcome.SUCCEEDED or not handle_errors, trajectory.error
    return trajectory.outcome, [
        (call.name, call.status, places[call.transition_id or ""]) for call in trajectory.tool_calls
    ]


async def test_a_structured_answer_is_recorded_beside_the_tools_that_ran(path: WholePath) -> None:
    assert await statuses(path, "good", TABLES, GOOD) == (
        Outcome.SUCCEEDED,
        [("tables", ToolStatus.OK, 0), ("Place", ToolStatus.OK, 1)],
    )


async def test_one_that_does_not_fit_is_invalid_arguments(path: WholePath) -> None:
    assert await statuses(path, "bad", BAD, GOOD) == (
        Outcome.SUCCEEDED,
        [("Place", ToolStatus.INVALID_ARGUMENTS, 0), ("Place", ToolStatus.OK, 1)],
    )


async def test_several_at_once_are_errors(path: WholePath) -> None:
    assert await statuses(path, "twice", f"{GOOD}\n{GOOD}", GOOD) == (
        Outcome.SUCCEEDED,
        [("Place", ToolStatus.ERROR, 0), ("Place", ToolStatus.ERROR, 0), ("Place", ToolStatus.OK, 1)],
    )


async def test_one_that_ends_the_run_is_recorded_too(path: WholePath) -> None:
    assert await statuses(path, "raised", BAD, handle_errors=False) == (
        Outcome.AGENT_ERROR,
        [("Place", ToolStatus.INVALID_ARGUMENTS, 0)],
    )
