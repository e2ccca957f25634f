"""Tool messages that no tool wrote, and those that a tool wraps: what the model is told is the status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallLimitMiddleware, wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from lightningrl import conventions
from lightningrl.types import ToolStatus
from lightningrl_langchain import LangChainAdapter
from lightningrl_langchain.tools import status_of_error
from lightningrl_testing.adapter_conformance import InstrumentedProcess, by_operation

model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")  # type: ignore[arg-type]
ADD = 'TOOL=add ARGS={"a": 1, "b": 2}'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def book(tool_call_id: Annotated[str, InjectedToolCallId], is_free: bool) -> Command[Any]:
    """Book a room: a state update, with the message for the model and one that stood there before."""
    earlier = ToolMessage("no such room", tool_call_id="an-earlier-call", status="error")
    told = ToolMessage(
        "booked" if is_free else "taken", tool_call_id=tool_call_id, status="success" if is_free else "error"
    )
    return Command(update={"messages": [earlier, told]})


@wrap_tool_call
def cached(request: Any, handler: Any) -> ToolMessage:
    return ToolMessage("3, as before", tool_call_id=request.tool_call["id"])


@wrap_tool_call
def forbidden(request: Any, handler: Any) -> ToolMessage:
    return ToolMessage("not allowed", tool_call_id=request.tool_call["id"], status="error")


@pytest.fixture
def process() -> Iterator[InstrumentedProcess]:
    with InstrumentedProcess(LangChainAdapter()) as process:
        yield process


def tools_of(process: InstrumentedProcess, agent: Any, text: str) -> list[tuple[str, str, str]]:
    """Of each tool call its name, status and result."""
    (rollout,) = process.run_many(lambda text: agent.invoke({"messages": [("user", text)]}), 1, text)
    told = [span.attributes for span in by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)]
    return sorted(
        (one[conventions.TOOL_NAME], one[conventions.TOOL_STATUS], one[conventions.TOOL_CALL_RESULT]) for one in told
    )


def test_a_tool_in_flight_when_the_time_is_over_is_no_error(process: InstrumentedProcess) -> None:
    has_begun = asyncio.Event()

    @tool
    async def wait(seconds: int) -> None:
        """Wait."""
        has_begun.set()
        await asyncio.sleep(seconds)

    agent: Any = create_agent(model, [wait])

    async def is_cut(text: str) -> None:
        running = asyncio.create_task(agent.ainvoke({"messages": [("user", text)]}))
        await has_begun.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    (rollout,) = process.run_many(is_cut, 1, 'TOOL=wait ARGS={"seconds": 1000}')
    (told,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
    assert told.attributes[conventions.TOOL_STATUS] == "unknown"
    assert status_of_error(asyncio.CancelledError()) is ToolStatus.UNKNOWN


def test_a_call_beyond_a_limit_is_an_error_and_no_unknown_tool(process: InstrumentedProcess) -> None:
    agent = create_agent(model, [add], middleware=[ToolCallLimitMiddleware(run_limit=1)])
    (refused, ran) = sorted(tools_of(process, agent, f"{ADD} {ADD}"), key=lambda told: told[1])
    assert (refused[1], ran) == ("error", ("add", "ok", "3"))


def test_what_a_middleware_answers_in_a_tools_place_is_recorded(process: InstrumentedProcess) -> None:
    assert tools_of(process, create_agent(model, [add], middleware=[cached]), ADD) == [("add", "ok", "3, as before")]


def test_a_middleware_that_refuses_a_tool_is_an_error(process: InstrumentedProcess) -> None:
    agent = create_agent(model, [add], middleware=[forbidden])
    assert tools_of(process, agent, f"{ADD} TOOL=nonsense ARGS={{}}") == [
        ("add", "error", "not allowed"),
        ("nonsense", "unknown_tool", "not allowed"),
    ]


@pytest.mark.parametrize(("is_free", "status", "result"), [("true", "ok", "booked"), ("false", "error", "taken")])
def test_a_tool_that_returns_a_command_has_the_status_of_its_own_message(
    process: InstrumentedProcess, is_free: str, status: str, result: str
) -> None:
    told = tools_of(process, create_agent(model, [book]), f'TOOL=book ARGS={{"is_free": {is_free}}}')
    assert told == [("book", status, result)]


def test_a_tool_that_a_node_calls_itself_is_told_once(process: InstrumentedProcess) -> None:
    """The node's message has the id of the call; the tool was called without it."""

    def node(state: MessagesState) -> dict[str, Any]:
        answer = model.bind_tools([add]).invoke(state["messages"])
        said = [ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]
        return {"messages": [answer, *said]}

    graph = StateGraph(MessagesState).add_node("work", node).add_edge(START, "work").compile()
    assert tools_of(process, graph, ADD) == [("add", "ok", "3")]
