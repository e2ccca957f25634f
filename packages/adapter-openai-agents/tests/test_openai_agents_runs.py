"""Handoffs, sub-agents, guardrails, and everything that can become of a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agents
import openai
import pytest
from agents import Agent, Runner
from agents.tool import function_tool
from starlette.responses import JSONResponse

from lightningrl import conventions
from lightningrl.loading import load_callable
from lightningrl.types import ToolStatus
from lightningrl_openai_agents import OpenAIAgentsAdapter
from lightningrl_testing.adapter_conformance import InstrumentedProcess, by_operation, said
from lightningrl_testing.scripted_server import RecordedSpan

HAS_TIMEOUTS = hasattr(agents.exceptions, "ToolTimeoutError")
HAS_FORGIVENESS = hasattr(agents.RunConfig(), "tool_not_found_behavior")
WRITE = "TOOL=transfer_to_writer ARGS={}"
CONSULT = 'TOOL=consult ARGS={"input": "RID=consult-0 why?"}'


def load(name: str) -> Callable[[str], Any]:
    return load_callable(f"sdk_agents.py:{name}", Path(__file__).parent)


@pytest.fixture(autouse=True, scope="module")
def _agents_are_imported_once() -> None:
    """As in a worker; what is imported within a test is gone after it."""
    load("answer")


@pytest.fixture(params=["responses", "chat_completions"])
def process(request: pytest.FixtureRequest) -> Iterator[InstrumentedProcess]:
    agents.set_default_openai_api(request.param)
    with InstrumentedProcess(OpenAIAgentsAdapter()) as process:
        yield process
    agents.set_default_openai_api("responses")


def run(
    process: InstrumentedProcess, agent: str, text: str = "", *, raises: type[Exception] | None = None
) -> list[RecordedSpan]:
    """One rollout; its spans."""
    function, rollouts = load(agent), []
    if agent.endswith("_streamed"):

        async def go_async(prompt: str) -> None:
            rollouts.append(process.scope.current())
            if raises is None:
                await function(prompt)
                return
            with pytest.raises(raises):
                await function(prompt)

        process.run_many(go_async, 1, text)
    else:

        def go(prompt: str) -> None:
            rollouts.append(process.scope.current())
            if raises is None:
                function(prompt)
                return
            with pytest.raises(raises):
                function(prompt)

        process.run_many(go, 1, text)
    assert rollouts[0] is not None
    spans = process.spans(rollouts[0])
    assert {span.parent_id for span in spans} - {span.span_id for span in spans} == {""}
    assert [call for call in process.server.calls if call.agent != (said(call, "ROLE") or call.agent)] == []
    return spans


def outcome(spans: list[RecordedSpan], name: str) -> tuple[str, str, str | None]:
    """Status, result and error type of the one call of that tool."""
    (tool,) = [
        span for span in by_operation(spans, conventions.EXECUTE_TOOL) if span.attributes[conventions.TOOL_NAME] == name
    ]
    return (
        tool.attributes[conventions.TOOL_STATUS],
        tool.attributes[conventions.TOOL_CALL_RESULT],
        tool.attributes.get(conventions.ERROR_TYPE),
    )


@pytest.mark.parametrize("agent", ["hand_over", "hand_over_streamed"])
def test_after_a_handoff_the_other_agent_speaks(process: InstrumentedProcess, agent: str) -> None:
    spans = run(process, agent, WRITE)
    assert [call.agent for call in process.server.calls] == ["triage", "writer"]
    turns = {
        span.span_id: span.attributes[conventions.AGENT_NAME] for span in by_operation(spans, conventions.INVOKE_AGENT)
    }
    assert sorted(turns.values()) == ["triage", "writer"]
    chats = by_operation(spans, conventions.CHAT)
    assert [turns[chat.parent_id] for chat in chats] == ["triage", "writer"]
    (tool,) = by_operation(spans, conventions.EXECUTE_TOOL)
    assert tool.parent_id == chats[0].span_id
    assert (tool.attributes[conventions.TOOL_NAME], tool.attributes[conventions.TOOL_STATUS]) == (
        "transfer_to_writer",
        "ok",
    )
    assert json.loads(tool.attributes[conventions.TOOL_CALL_RESULT]) == {"assistant": "writer"}


@pytest.mark.parametrize("agent", ["hand_over", "hand_over_streamed"])
def test_a_handoff_with_input_it_does_not_take_is_reported(process: InstrumentedProcess, agent: str) -> None:
    spans = run(
        process, agent, 'TOOL=transfer_to_editor ARGS={"reason": 7}', raises=agents.exceptions.ModelBehaviorError
    )
    assert outcome(spans, "transfer_to_editor")[0] == ToolStatus.INVALID_ARGUMENTS
    (turn,) = by_operation(spans, conventions.INVOKE_AGENT)
    assert turn.is_error


@pytest.mark.parametrize("agent", ["consult", "consult_streamed"])
def test_an_agent_that_is_a_tool_speaks_for_itself_below_that_tool(process: InstrumentedProcess, agent: str) -> None:
    spans = run(process, agent, CONSULT)
    assert [call.agent for call in process.server.calls] == ["boss", "writer", "boss"]
    (tool,) = by_operation(spans, conventions.EXECUTE_TOOL)
    assert tool.attributes[conventions.AGENT_NAME] == "boss"
    (writer,) = [
        span
        for span in by_operation(spans, conventions.INVOKE_AGENT)
        if span.attributes[conventions.AGENT_NAME] == "writer"
    ]
    assert writer.parent_id == tool.span_id


def test_sub_agents_run_side_by_side_without_mixing(process: InstrumentedProcess) -> None:
    delegate = 'TOOL=delegate ARGS={"input": "RID=consult-0 again?"}'
    spans = run(process, "consult", f"{CONSULT} {delegate} {CONSULT}")
    assert sorted(call.agent or "" for call in process.server.calls) == ["boss", "boss", "worker", "writer", "writer"]
    tools = {
        span.span_id: span.attributes[conventions.TOOL_NAME] for span in by_operation(spans, conventions.EXECUTE_TOOL)
    }
    below = [
        (span.attributes[conventions.AGENT_NAME], tools[span.parent_id])
        for span in by_operation(spans, conventions.INVOKE_AGENT)
        if span.parent_id in tools
    ]
    assert sorted(below) == [("worker", "delegate"), ("writer", "consult"), ("writer", "consult")]


def test_a_guardrails_calls_do_not_take_the_name_or_the_span_of_the_call_beside(process: InstrumentedProcess) -> None:
    spans = run(process, "be_guarded")
    assert {(call.agent, said(call, "BARE"), call.span_id is None) for call in process.server.calls} == {
        ("guarded", None, False),
        ("guard", None, False),
        ("guarded", "yes", True),  # the bare client in it: nobody's chat span, the agent's turn
    }
    called = [call.span_id for call in process.server.calls if call.span_id is not None]
    assert sorted(called) == sorted(span.span_id for span in by_operation(spans, conventions.CHAT))


def test_a_bare_client_in_a_tool_is_named_after_the_agent(process: InstrumentedProcess) -> None:
    run(process, "use_tools", 'TOOL=ask_bare ARGS={"question": "RID=use_tools-0 why?"}')
    assert [(call.agent, call.span_id is None) for call in process.server.calls] == [
        ("worker", False),
        ("worker", True),
        ("worker", False),
    ]


@pytest.mark.parametrize("agent", ["use_tools", "use_tools_streamed"])
@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [
        ('TOOL=add ARGS={"a": 1, "b": 2}', ToolStatus.OK, None),
        ("TOOL=fail ARGS={}", ToolStatus.ERROR, "ValueError"),
        ("TOOL=fail_politely ARGS={}", ToolStatus.ERROR, "ValueError"),
        ("TOOL=fail_hard ARGS={}", ToolStatus.ERROR, "ValueError"),
        ("TOOL=time_out ARGS={}", ToolStatus.TIMEOUT, "TimeoutError"),
        ('TOOL=add ARGS={"a": 1}', ToolStatus.INVALID_ARGUMENTS, "ModelBehaviorError"),
        ('TOOL=add_hard ARGS={"a": 1}', ToolStatus.INVALID_ARGUMENTS, "ModelBehaviorError"),
        ("TOOL=add ARGS={no json}", ToolStatus.INVALID_ARGUMENTS, "ModelBehaviorError"),
        ("TOOL=nonsense ARGS={}", ToolStatus.UNKNOWN_TOOL, "unknown_tool"),
    ],
)
def test_a_tools_outcome_is_what_happened_not_what_the_model_is_told(
    process: InstrumentedProcess, agent: str, asked: str, status: ToolStatus, error: str | None
) -> None:
    name = asked.partition(" ")[0].removeprefix("TOOL=")
    ends = {"fail_hard": agents.UserError, "add_hard": agents.ModelBehaviorError, "nonsense": agents.ModelBehaviorError}
    spans = run(process, agent, asked, raises=ends.get(name))
    found, result, error_type = outcome(spans, name)
    assert (found, error_type) == (status, error)
    assert result
    if name == "fail_politely":
        assert result == "sorry: the tool is broken"


@pytest.mark.skipif(not HAS_TIMEOUTS, reason="tools have no timeout in this version of the SDK")
@pytest.mark.parametrize(
    ("name", "said"), [("sleep", "timed out"), ("sleep_politely", "too slow, sorry"), ("sleep_hard", "timed out")]
)
def test_a_tool_that_runs_out_of_time_is_a_timeout(process: InstrumentedProcess, name: str, said: str) -> None:
    raises = getattr(agents, "ToolTimeoutError", None) if name == "sleep_hard" else None
    status, result, error = outcome(run(process, "use_tools", f"TOOL={name} ARGS={{}}", raises=raises), name)
    assert (status, error) == (ToolStatus.TIMEOUT, "ToolTimeoutError")
    assert said in result


@pytest.mark.skipif(not HAS_FORGIVENESS, reason="an unknown tool always ends the run in this version of the SDK")
def test_an_unknown_tool_that_the_model_is_told_about_is_reported_beside_the_tools_that_ran(
    process: InstrumentedProcess,
) -> None:
    spans = run(process, "use_tools_forgiving", 'TOOL=nonsense ARGS={} TOOL=add ARGS={"a": 1, "b": 2}')
    assert outcome(spans, "nonsense")[0] == ToolStatus.UNKNOWN_TOOL
    assert outcome(spans, "add")[:2] == (ToolStatus.OK, "3")


def test_parallel_calls_of_one_tool_keep_their_own_outcomes(process: InstrumentedProcess) -> None:
    asked = 'TOOL=add ARGS={"a": 1} TOOL=add ARGS={"a": 1, "b": 2} TOOL=fail ARGS={} TOOL=add ARGS={"a": 2, "b": 2}'
    tools = by_operation(run(process, "use_tools", asked), conventions.EXECUTE_TOOL)
    found = sorted(
        (tool.attributes[conventions.TOOL_CALL_ARGUMENTS], tool.attributes[conventions.TOOL_STATUS]) for tool in tools
    )
    assert found == [
        ('{"a": 1, "b": 2}', "ok"),
        ('{"a": 1}', "invalid_arguments"),
        ('{"a": 2, "b": 2}', "ok"),
        ("{}", "error"),
    ]
    assert len({tool.attributes[conventions.TOOL_CALL_ID] for tool in tools}) == 4
    assert len({tool.parent_id for tool in tools}) == 1


def test_a_sub_agents_failure_is_the_error_of_the_tool_that_ran_it(process: InstrumentedProcess) -> None:
    inner = 'TOOL=delegate ARGS={"input": "RID=consult-0 TOOL=nonsense ARGS={} "}'
    process.server.answer = lambda body: nest(body)
    spans = run(process, "consult", inner)
    assert outcome(spans, "nonsense")[0] == ToolStatus.UNKNOWN_TOOL
    assert outcome(spans, "delegate")[::2] == (ToolStatus.ERROR, "ModelBehaviorError")


def nest(body: dict[str, Any]) -> dict[str, Any]:
    """The boss delegates; the worker asks for a tool that nobody has."""
    text = json.dumps(body["messages"])
    if any(message["role"] == "tool" for message in body["messages"]):
        return {"content": "done"}
    name, arguments = (
        ("nonsense", "{}") if "ROLE=worker" in text else ("delegate", json.dumps({"input": "RID=go-0 do it"}))
    )
    call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


def test_the_users_own_hooks_still_hear_everything(process: InstrumentedProcess) -> None:
    heard: list[str] = []

    class Listening(agents.RunHooks[Any]):
        async def on_agent_start(self, context: Any, agent: Any) -> None:
            heard.append(f"start {agent.name}")

        async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
            heard.append("answer")

        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
            heard.append(f"{tool.name} {result}")

    agent = Agent(name="heard", model="gpt-4o-mini", tools=[function_tool(lambda: "pong", name_override="ping")])

    def listen(text: str) -> None:
        Runner.run_sync(agent, text, hooks=Listening())

    process.run_many(listen, 1, "TOOL=ping ARGS={}")
    assert heard == ["start heard", "answer", "ping pong", "answer"]


def test_a_model_class_of_the_users_own_is_recorded(process: InstrumentedProcess) -> None:
    class Counting(agents.OpenAIChatCompletionsModel):
        """Made after the adapter was switched on; calls its base class."""

        asked = 0

        async def get_response(self, *args: Any, **kwargs: Any) -> Any:
            Counting.asked += 1
            return await super().get_response(*args, **kwargs)

    client = openai.AsyncOpenAI(api_key="sk-the-users-own")
    agent = Agent(name="counting", instructions="ROLE=counting", model=Counting("gpt-4o-mini", client))

    def count(text: str) -> None:
        Runner.run_sync(agent, text)

    (rollout,) = process.run_many(count, 1)
    (call,) = process.server.calls
    (chat,) = by_operation(process.spans(rollout), conventions.CHAT)
    assert (Counting.asked, call.agent, call.span_id) == (1, "counting", chat.span_id)


def test_a_call_that_fails_leaves_a_failed_chat_span(process: InstrumentedProcess) -> None:
    process.server.answer = lambda body: (400, "context_length_exceeded", "too long")
    spans = run(process, "use_tools", raises=openai.BadRequestError)
    (chat,) = by_operation(spans, conventions.CHAT)
    assert (chat.is_error, chat.attributes[conventions.ERROR_TYPE]) == (True, "BadRequestError")
    (turn,) = by_operation(spans, conventions.INVOKE_AGENT)
    assert turn.is_error


def test_a_call_outside_of_any_rollout_is_refused(process: InstrumentedProcess) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        agents.Runner.run_sync(Agent(name="nobody", model="gpt-4o-mini"), "hello")
    (call,) = process.server.calls
    assert (call.rollout_id, call.status, call.agent) == (None, 403, None)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_that_its_guardrail_refuses_is_an_error(process: InstrumentedProcess, is_streamed: bool) -> None:
    if not hasattr(agents, "tool_input_guardrail"):
        pytest.skip("no guardrails of tools in this version of the SDK")

    @agents.tool_input_guardrail
    def refuse(_: Any) -> Any:
        return agents.ToolGuardrailFunctionOutput.reject_content("not today")

    def spend() -> str:
        return "spent"

    spending = function_tool(spend)
    spending.tool_input_guardrails = [refuse]
    agent = Agent(name="buyer", model="gpt-4o-mini", tools=[spending])

    async def buy(text: str) -> None:
        if not is_streamed:
            await Runner.run(agent, text)
            return
        async for _ in Runner.run_streamed(agent, text).stream_events():
            pass

    (rollout,) = process.run_many(buy, 1, "TOOL=spend ARGS={}")
    spans = process.spans(rollout)
    (tool,) = by_operation(spans, conventions.EXECUTE_TOOL)
    assert (tool.attributes[conventions.TOOL_STATUS], tool.attributes[conventions.TOOL_CALL_RESULT]) == (
        "error",
        "not today",
    )
    assert tool.parent_id == process.server.calls[0].span_id


def test_a_websocket_model_is_refused_rather_than_missed(process: InstrumentedProcess) -> None:
    found = pytest.importorskip("agents.models.openai_responses")
    if not hasattr(found, "OpenAIResponsesWSModel"):
        pytest.skip("no websocket transport in this version of the SDK")
    model = found.OpenAIResponsesWSModel("gpt-4o-mini", openai.AsyncOpenAI(api_key="sk-the-users-own"))

    def speak(text: str) -> None:
        with pytest.raises(agents.UserError, match="set_default_openai_responses_transport"):
            Runner.run_sync(Agent(name="socket", model=model), text)

    process.run_many(speak, 1)
    assert process.server.calls == []


@pytest.mark.parametrize("process", ["responses"], indirect=True)
def test_hosted_tools_in_an_answer_are_reported(process: InstrumentedProcess) -> None:
    found = {
        "id": "ws_1",
        "type": "web_search_call",
        "status": "completed",
        "action": {"type": "search", "query": "weather"},
    }
    failed = {
        "id": "mcp_1",
        "type": "mcp_call",
        "name": "book",
        "server_label": "x",
        "arguments": "{}",
        "error": "sold out",
    }
    text = {"type": "output_text", "text": "sunny", "annotations": []}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    rest = {
        "created_at": 0,
        "model": "gpt-4o-mini",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
    }
    answer = {"id": "resp_1", "object": "response", "output": [found, failed, said], **rest}
    process.server.answer = lambda body: JSONResponse(answer)  # a provider's own, which our gateway never gives
    search, book = by_operation(run(process, "use_tools"), conventions.EXECUTE_TOOL)
    assert (search.attributes[conventions.TOOL_NAME], search.attributes[conventions.TOOL_STATUS]) == (
        "web_search",
        "ok",
    )
    assert "weather" in search.attributes[conventions.TOOL_CALL_ARGUMENTS]
    assert (book.attributes[conventions.TOOL_NAME], book.attributes[conventions.TOOL_STATUS]) == ("book", "error")
    assert book.attributes[conventions.TOOL_CALL_RESULT] == "sold out"
