"""The AutoGen adapter meets the specification of an adapter, and names roles in teams, societies and agents as
tools."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_core import BaseAgent, SingleThreadedAgentRuntime
from autogen_core.tools import BaseTool
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from opentelemetry import trace
from sizes import sized

from lightningrl import conventions
from lightningrl.loading import load_callable
from lightningrl.types import ToolStatus
from lightningrl_autogen import AutoGenAdapter
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_testing.adapter_conformance import (
    AdapterConformance,
    InstrumentedProcess,
    by_operation,
    play_tools,
    said,
)

pytestmark = pytest.mark.filterwarnings("ignore:Resolved model mismatch")  # AutoGen asks OpenAI for the dated name

KINDS = {"sync": "synchronous", "async": "asynchronous"}
HERE = Path(__file__).parent


def load(name: str) -> Any:
    return load_callable(f"autogen_agents.py:{name}", HERE)


def play(body: dict[str, Any]) -> dict[str, Any]:
    """The scripted model, which can also select a speaker, and asks for tools in every turn but a reflection."""
    if "ROLE=SelectorGroupChatManager" in str(body["messages"]):
        return {"content": "writer"}
    return play_tools(body) if body.get("tools") else {"content": "one two three"}


def needs(module: str, name: str) -> bool:
    """Whether this AutoGen has it."""
    try:
        return hasattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return False


has_workbench = pytest.mark.skipif(
    not needs("autogen_core.tools", "StaticWorkbench"), reason="AutoGen has StaticWorkbench since 0.5.5"
)
has_team_tools = pytest.mark.skipif(
    not needs("autogen_agentchat.tools", "TeamTool"), reason="AutoGen has AgentTool and TeamTool since 0.5.4"
)
has_shared_runtimes = pytest.mark.skipif(
    not load("takes_runtimes")(), reason="teams take a runtime since AutoGen 0.4.9"
)


@pytest.fixture(autouse=True, scope="module")
def _agents_are_imported_once() -> None:
    """As in a worker; what is imported within a test is gone after it."""
    load("synchronous")


@pytest.fixture
def imported_anew() -> None:
    """A runtime that is shared is of the event loop in which it was started."""
    sys.modules.pop("autogen_agents")


@pytest.fixture
def process() -> Iterator[InstrumentedProcess]:
    with InstrumentedProcess(AutoGenAdapter()) as process:
        process.server.answer = play
        yield process


class TestAutoGenAdapter(AdapterConformance):
    rollouts: ClassVar[int] = sized(16, 40)

    def create_adapter(self) -> AutoGenAdapter:
        return AutoGenAdapter()

    def agent(self, kind: str) -> Callable[[str], Any]:
        return load(KINDS.get(kind, kind))  # type: ignore[no-any-return]

    def tool_agent(self) -> Callable[[str], Any]:
        return load("use_tools")  # type: ignore[no-any-return]


TEAMS = {
    "round_robin": ["writer", "critic", "writer"],
    "selector": ["SelectorGroupChatManager", "writer"] * 2,
    "swarm": ["boss", "helper", "helper"],
    "society": ["writer", "critic", "writer", "society"],
    "bare_client": ["raw", "review"],
}
SHARED = {"shared": ["writer", "critic", "writer"], "shared_selector": ["SelectorGroupChatManager", "writer"] * 2}
AS_TOOLS = {"consult": ["boss", "helper", "boss"], "consult_team": ["boss", "writer", "critic", "writer", "boss"]}
TOOL_TEXTS = {
    "swarm": "TOOL=transfer_to_helper ARGS={}",
    "consult": 'TOOL=helper ARGS={"task": "RID=consult-NUMBER why?"}',
    "consult_team": 'TOOL=ask_team ARGS={"task": "RID=consult_team-NUMBER why?"}',
}


def check_rollouts(process: InstrumentedProcess, kind: str, roles: list[str]) -> None:
    """Twenty at once: whose each call is, in which role, under a chat span of its own in the rollout's one trace."""
    rollouts = run_numbered(process, kind)
    calls = process.server.calls
    assert [(call.rollout_id, said(call, "RID")) for call in calls if call.rollout_id != said(call, "RID")] == []
    assert [(call.agent, said(call, "ROLE")) for call in calls if call.agent != said(call, "ROLE")] == []
    for rollout in rollouts:
        own = [call for call in calls if call.rollout_id == rollout.rollout_id]
        assert [call.agent for call in own] == roles
        spans = process.spans(rollout)
        chats = {
            chat.span_id: chat.attributes[conventions.AGENT_NAME] for chat in by_operation(spans, conventions.CHAT)
        }
        assert {call.span_id: call.agent for call in own if call.span_id} == chats
        assert len(chats) == len([call for call in own if call.agent != "raw"])
        assert len({span.trace_id for span in spans}) == 1
        assert {span.parent_id for span in spans} - {span.span_id for span in spans} == {""}


def run_numbered(process: InstrumentedProcess, kind: str) -> list[ActiveRollout]:
    agent = load(kind)

    async def numbered(text: str) -> None:
        number = text.split()[0].rpartition("-")[2]
        await agent(f"{text} {TOOL_TEXTS.get(kind, '').replace('NUMBER', number)}")

    numbered.__name__ = kind
    return process.run_many(numbered, 20)


@pytest.mark.parametrize("kind", TEAMS)
def test_teams_are_attributed_and_named(process: InstrumentedProcess, kind: str) -> None:
    check_rollouts(process, kind, TEAMS[kind])


@has_shared_runtimes
@pytest.mark.usefixtures("imported_anew")
@pytest.mark.parametrize("kind", SHARED)
def test_a_runtime_that_the_first_rollout_started_and_all_share_keeps_them_apart(
    process: InstrumentedProcess, kind: str
) -> None:
    check_rollouts(process, kind, SHARED[kind])


@has_team_tools
@pytest.mark.parametrize("kind", AS_TOOLS)
def test_agents_and_teams_that_are_tools_speak_for_themselves(process: InstrumentedProcess, kind: str) -> None:
    check_rollouts(process, kind, AS_TOOLS[kind])


@has_team_tools
@pytest.mark.parametrize("kind", AS_TOOLS)
def test_what_an_agent_does_as_a_tool_hangs_below_the_tool(process: InstrumentedProcess, kind: str) -> None:
    for rollout in run_numbered(process, kind):
        spans = process.spans(rollout)
        (tool,) = by_operation(spans, conventions.EXECUTE_TOOL)
        chats = by_operation(spans, conventions.CHAT)
        assert tool.attributes[conventions.AGENT_NAME] == "boss"
        assert tool.parent_id == chats[0].span_id
        assert {chat.attributes[conventions.AGENT_NAME] for chat in chats if chat.parent_id != tool.span_id} == {"boss"}
        assert "one two three" in tool.attributes[conventions.TOOL_CALL_RESULT]


def test_a_handoff_is_a_tool_call(process: InstrumentedProcess) -> None:
    rollout = run_numbered(process, "swarm")[0]
    (tool,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
    found = tool.attributes
    assert (found[conventions.TOOL_NAME], found[conventions.TOOL_STATUS], found[conventions.AGENT_NAME]) == (
        "transfer_to_helper",
        "ok",
        "boss",
    )


OUTCOMES = {
    'TOOL=add ARGS={"a": 20, "b": 22}': ToolStatus.OK,
    "TOOL=fail ARGS={}": ToolStatus.ERROR,
    "TOOL=slow ARGS={}": ToolStatus.TIMEOUT,
    'TOOL=add ARGS={"a": "many"}': ToolStatus.INVALID_ARGUMENTS,
    "TOOL=add ARGS={no json}": ToolStatus.INVALID_ARGUMENTS,
    "TOOL=nonsense ARGS={}": ToolStatus.UNKNOWN_TOOL,
}


@pytest.mark.parametrize("asked", OUTCOMES)
@pytest.mark.parametrize(
    "agent",
    ["use_tools", "use_tools_streaming", "use_tools_in_a_team", pytest.param("use_workbench", marks=has_workbench)],
)
def test_a_tool_reports_its_outcome_wherever_it_runs(process: InstrumentedProcess, agent: str, asked: str) -> None:
    (rollout,) = process.run_many(load(agent), 1, asked)
    (tool,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
    first, second = process.server.calls
    answered = [message for message in second.body["messages"] if message["role"] == "tool"]
    assert tool.attributes[conventions.TOOL_STATUS] == OUTCOMES[asked].value
    assert tool.is_error == (OUTCOMES[asked] is not ToolStatus.OK)
    assert tool.attributes[conventions.TOOL_CALL_ARGUMENTS] == asked.partition("ARGS=")[2]
    assert tool.attributes[conventions.AGENT_NAME] == "calculator"
    assert tool.parent_id == first.span_id
    assert [message["tool_call_id"] for message in answered] == [tool.attributes[conventions.TOOL_CALL_ID]]


@has_workbench
@pytest.mark.parametrize(
    ("asked", "status", "result"),
    [
        ('TOOL=add ARGS={"a": 20, "b": 22}', ToolStatus.OK, "42"),
        ("TOOL=fail ARGS={}", ToolStatus.ERROR, "the server is down"),
        ("TOOL=nonsense ARGS={}", ToolStatus.UNKNOWN_TOOL, "Error: tool 'nonsense' not found in any workbench"),
    ],
)
def test_tools_that_live_in_another_process_report_what_came_back(
    process: InstrumentedProcess, asked: str, status: ToolStatus, result: str
) -> None:
    (rollout,) = process.run_many(load("use_foreign_workbench"), 1, asked)
    (tool,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
    assert (tool.attributes[conventions.TOOL_STATUS], tool.attributes[conventions.TOOL_CALL_RESULT]) == (
        status.value,
        result,
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_streams_that_are_read_in_turns_or_given_up_keep_their_roles_to_themselves(
    process: InstrumentedProcess,
) -> None:
    """AutoGen leaves the response of a stream that is given up to the end of the loop, where asyncio closes nested
    generators at once: now and then one of them refuses, and a socket of the agent's is not closed.
    """
    for rollout in process.run_many(load("interleaved"), 8):
        calls = [call for call in process.server.calls if call.rollout_id == rollout.rollout_id]
        assert Counter(call.agent for call in calls) == {"draft": 1, "review": 1, "quitter": 1, None: 3}
        assert [(call.agent, said(call, "ROLE")) for call in calls if call.agent != said(call, "ROLE")] == []
        chats = by_operation(process.spans(rollout), conventions.CHAT)
        assert {call.span_id for call in calls if call.agent} == {chat.span_id for chat in chats}
        failed = {chat.attributes[conventions.AGENT_NAME] for chat in chats if chat.is_error}
        assert failed <= {"quitter"}  # older AutoGens leave its stream to the end of the loop, which cancels it
    gc.collect()  # what was left open is told here, not in the next test


@has_shared_runtimes
@pytest.mark.usefixtures("imported_anew")
def test_a_message_from_outside_of_all_rollouts_is_refused_on_a_runtime_that_a_rollout_started(
    process: InstrumentedProcess,
) -> None:
    """Its handler runs on a task that has inherited the rollout."""
    shared = load("shared")

    async def run() -> None:
        inside, outside = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            rollout = process._open("first")
            with process.scope.entered(rollout), process.telemetry.attempt_span("agent"):
                await shared("RID=first")
                inside.set()
                await outside.wait()

        task = asyncio.create_task(first())
        await inside.wait()
        with pytest.raises(RuntimeError, match="this call belongs to no rollout"):
            await shared("RID=nobody")
        outside.set()
        await task

    asyncio.run(run())
    refused = [call for call in process.server.calls if call.rollout_id is None]
    assert {said(call, "RID") for call in refused} == {"nobody"}
    assert {(call.status, call.agent, call.span_id) for call in refused} == {(403, None, None)}
    assert {said(call, "RID") for call in process.server.calls if call.rollout_id == "first"} == {"first"}


def test_a_call_after_the_rollouts_end_is_refused(process: InstrumentedProcess) -> None:
    """An agent left a task behind."""
    asynchronous = load("asynchronous")

    async def run() -> None:
        async def later() -> None:
            await over.wait()
            await asynchronous("RID=leaver")

        over = asyncio.Event()
        rollout = process._open("leaver")
        with process.scope.entered(rollout), process.telemetry.attempt_span("agent"):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        over.set()
        with pytest.raises(openai.PermissionDeniedError):
            await task

    asyncio.run(run())
    assert [(call.rollout_id, call.status) for call in process.server.calls] == [(None, 403)]


def test_calls_in_a_core_agents_handler_are_named_after_its_type_and_belong_to_the_sender(
    process: InstrumentedProcess,
) -> None:
    process.run_many(load("core_agents"), 8)
    calls = process.server.calls
    assert [call.rollout_id for call in calls if call.rollout_id != said(call, "RID")] == []
    assert Counter(call.agent for call in calls) == {"asker": 8, "listener": 16}


def test_autogens_own_tool_spans_do_not_double_the_tool_calls(
    process: InstrumentedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        trace, "get_tracer", lambda *names, **options: process.telemetry.provider.get_tracer("autogen-core")
    )
    (rollout,) = process.run_many(load("use_tools_in_a_team"), 1, 'TOOL=add ARGS={"a": 20, "b": 22}')
    (tool,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
    assert tool.attributes[conventions.TOOL_CALL_RESULT] == "42"


def test_uninstrumenting_restores_every_class() -> None:
    owners = [
        BaseAgent,
        SingleThreadedAgentRuntime,
        BaseChatAgent,
        AssistantAgent,
        BaseTool,
        BaseOpenAIChatCompletionClient,
    ]

    def methods() -> list[dict[str, int]]:
        return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]

    before = methods()
    adapter = AutoGenAdapter()
    adapter.instrument()
    assert [now == was for now, was in zip(methods(), before, strict=True)] == [False] * len(owners)
    adapter.uninstrument()
    assert methods() == before
