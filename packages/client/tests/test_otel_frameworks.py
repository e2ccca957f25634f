"""smolagents, LlamaIndex and CrewAI: roles, and tools that belong to the calls that asked, from spans that the real
packages made.

`recorded_spans.json` says with which versions; one run of each: a search that works, one that fails, an answer. The
calls of the policy go through a real gateway.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.conventions import SpanState, read_span
from lightningrl.types import Outcome, ToolCall, ToolStatus, Trajectory
from lightningrl_server.app import create_app
from lightningrl_server.asked_calls import AnsweredCall, join_to_answers, read_kept_answers
from lightningrl_server.records import ToolCallRecord
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.tokenizers import tiny_tokenizer

RECORDED = json.loads(Path(__file__).with_name("recorded_spans.json").read_text())
TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object", "properties": {}}}}
Span = dict[str, Any]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


def server_of(gateway: LiveGateway) -> httpx.AsyncClient:
    renderers = {gateway.engine.policy: PolicyRenderer(tiny_tokenizer())}
    app = create_app(
        gateway.store, gateway.engines, run_key="the-run-key", read_asked=read_kept_answers(gateway.store, renderers)
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def ask(
    gateway: LiveGateway, attempt: LiveAttempt, span_id: str, *calls: tuple[str, dict[str, Any]]
) -> list[str]:
    """A call of the policy within a span, answered with these tool calls; their ids."""
    markup = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )
    gateway.engine.enqueue(markup or "done")
    offered = [{"type": "function", "function": {**TOOL["function"], "name": name}} for name in dict(calls)]  # type: ignore[dict-item]
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": span_id}],
        **({"tools": offered} if offered else {}),
    }
    headers = {"authorization": f"Bearer {attempt.key}", "traceparent": f"00-{'1' * 32}-{span_id}-01"}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{attempt.base_url}/chat/completions", json=body, headers=headers)
    message = answer.raise_for_status().json()["choices"][0]["message"]
    return [call["id"] for call in message.get("tool_calls") or ()]


async def export(http: httpx.AsyncClient, attempt: LiveAttempt, spans: list[Span]) -> None:
    def written(span: Span) -> Span:
        return {
            "spanId": span["id"],
            "parentSpanId": span["parent"],
            "name": span["name"],
            "startTimeUnixNano": str(span["start_us"] * 1000 + 10**18),
            "endTimeUnixNano": str(span["end_us"] * 1000 + 10**18),
            "status": {"code": 2 if span["error"] else 1},
            "attributes": [
                {"key": key, "value": {"stringValue": str(value)}} for key, value in span["attributes"].items()
            ],
        }

    body = {
        "resourceSpans": [
            {"scopeSpans": [{"scope": {"name": span["scope"]}, "spans": [written(span)]} for span in spans]}
        ]
    }
    url = f"/api/v1/rollouts/{attempt.rollout_id}/attempts/{attempt.attempt}/v1/traces"
    answer = await http.post(url, json=body, headers={"authorization": f"Bearer {attempt.key}"})
    assert answer.status_code == 200, answer.text


def asked_in(span: Span) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for key, name in span["attributes"].items():
        if key.endswith(".tool_call.function.name"):
            calls.append((name, json.loads(span["attributes"][key.removesuffix("name") + "arguments"])))
    return calls


def with_ids(span: Span, ids: list[str]) -> Span:
    """The model's span with the ids that the gateway gave."""
    keys = [key for key in span["attributes"] if key.endswith(".tool_call.id")]
    return {**span, "attributes": {**span["attributes"], **dict(zip(keys, ids, strict=True))}}


async def trajectory_of(gateway: LiveGateway, attempt: LiveAttempt) -> Trajectory:
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED, "x")
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    return trajectory


def who_asked(trajectory: Trajectory) -> list[tuple[str, str, ToolStatus, int | None]]:
    """Of each tool call: name, arguments, status, the call that asked."""
    places = {one.id: one.index for one in trajectory.transitions}
    return [
        (call.name, call.arguments, call.status, places.get(call.transition_id or "")) for call in trajectory.tool_calls
    ]


async def replayed(gateway: LiveGateway, spans: list[Span], *, with_model_spans: bool) -> Trajectory:
    """The recorded run again: its calls through the gateway, its spans to the server."""
    attempt = await gateway.attempt()
    sent = []
    for span in spans:
        calls = asked_in(span)
        is_model = span["attributes"].get("openinference.span.kind") == "LLM"
        if calls:
            span = with_ids(span, await ask(gateway, attempt, span["id"], *calls))
        if with_model_spans or not is_model:
            sent.append(span)
    async with server_of(gateway) as http:
        await export(http, attempt, sent)
    return await trajectory_of(gateway, attempt)


@pytest.mark.parametrize("with_model_spans", [True, False])
async def test_tools_of_smolagents_belong_to_the_calls_that_asked(gateway: LiveGateway, with_model_spans: bool) -> None:
    trajectory = await replayed(gateway, RECORDED["smolagents"]["spans"], with_model_spans=with_model_spans)
    assert who_asked(trajectory) == [
        ("search", '{"query": "x"}', ToolStatus.OK, 1),
        ("search", '{"query": "bad", "count": 1}', ToolStatus.ERROR, 2),
        ("final_answer", '{"answer": "it is x"}', ToolStatus.OK, 3),
        ("final_answer", '{"answer": "x"}', ToolStatus.OK, 4),
    ]
    if with_model_spans:
        assert [one.agent for one in trajectory.transitions] == [
            "ToolCallingAgent",
            *["web_agent"] * 3,
            "ToolCallingAgent",
        ]
        assert [one.agent for one in trajectory.tool_calls] == [*["web_agent"] * 3, "ToolCallingAgent"]


@pytest.mark.parametrize("with_model_spans", [True, False])
async def test_tools_and_agents_of_llama_index_belong_to_the_calls_that_asked(
    gateway: LiveGateway, with_model_spans: bool
) -> None:
    trajectory = await replayed(gateway, RECORDED["llama_index"]["spans"], with_model_spans=with_model_spans)
    assert who_asked(trajectory) == [
        ("handoff", '{"to_agent": "writer", "reason": "r"}', ToolStatus.OK, 0),
        ("search", '{"query": "x"}', ToolStatus.OK, 1),
        ("search", '{"query": "bad", "count": 1}', ToolStatus.ERROR, 2),
    ]
    assert trajectory.tool_calls[1].result == "found x"
    if with_model_spans:
        assert [one.agent for one in trajectory.transitions] == ["planner", "writer", "writer"]


async def test_tools_of_crewai_which_makes_no_model_spans_belong_to_the_calls_that_asked(gateway: LiveGateway) -> None:
    spans = RECORDED["crewai"]["spans"]
    (agent,) = [span["id"] for span in spans if span["attributes"].get("openinference.span.kind") == "AGENT"]
    attempt = await gateway.attempt()
    await ask(gateway, attempt, agent, ("search", {"query": "x"}))
    await ask(gateway, attempt, agent, ("search", {"count": 1, "query": "bad"}))
    await ask(gateway, attempt, agent)
    async with server_of(gateway) as http:
        await export(http, attempt, spans)
        await export(http, attempt, spans)  # again, as an exporter does whose answer was lost
    trajectory = await trajectory_of(gateway, attempt)
    assert who_asked(trajectory) == [
        ("search", '{"query": "x"}', ToolStatus.OK, 0),
        ("search", '{"query": "bad", "count": 1}', ToolStatus.ERROR, 1),
    ]
    assert [one.agent for one in trajectory.transitions] == ["Researcher"] * 3
    assert [one.agent for one in trajectory.tool_calls] == ["Researcher"] * 2


async def test_what_an_earlier_export_told_of_is_not_joined_again(gateway: LiveGateway) -> None:
    first, second = [span for span in RECORDED["crewai"]["spans"] if span["name"] == "search.run"]
    second = {**second, "attributes": first["attributes"]}
    attempt = await gateway.attempt()
    async with server_of(gateway) as http:
        await ask(gateway, attempt, "a" * 16, ("search", {"query": "x"}))
        await export(http, attempt, [first])
        await ask(gateway, attempt, "b" * 16, ("search", {"query": "x"}))
        await export(http, attempt, [second])
    trajectory = await trajectory_of(gateway, attempt)
    assert [place for _, _, _, place in who_asked(trajectory)] == [0, 1]


def tool(number: int, name: str, arguments: str, call_id: str = "") -> ToolCallRecord:
    span_id = f"{number:016x}"
    return ToolCallRecord(
        tool_call=ToolCall(id=call_id or span_id, name=name, arguments=arguments),
        span_id=span_id,
        started_at=float(number),
    )


def asked(number: int, name: str, arguments: str) -> AnsweredCall:
    return AnsweredCall(transition_id=f"t{number}", id=f"call_{number}", name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("tools", "calls", "expected"),
    [
        ([tool(1, "f", '{"a": 1, "b": 2}')], [asked(1, "f", '{"b":2,"a":1}')], ["t1"]),
        ([tool(1, "f", '{"a": 1, "more": 2}')], [asked(1, "f", '{"a": 1}')], ["t1"]),
        ([tool(1, "f", "{}"), tool(2, "f", "{}")], [asked(1, "f", "{}"), asked(2, "f", "{}")], ["t1", "t2"]),
        ([tool(2, "f", "{}"), tool(1, "f", "{}")], [asked(1, "f", "{}"), asked(2, "f", "{}")], ["t2", "t1"]),
        ([tool(1, "f", '{"a": 1}'), tool(2, "f", '{"a": 2}')], [asked(1, "f", '{"a": 3}')], [None, None]),
        ([tool(1, "f", '{"a": 1}')], [asked(1, "f", '{"a": 2}'), asked(2, "f", '{"a": 3}')], [None]),
        ([tool(1, "g", "{}")], [asked(1, "f", "{}")], [None]),
        ([tool(1, "f", "{}", "call_1"), tool(2, "f", "{}")], [asked(1, "f", "{}")], [None, None]),
    ],
    ids=["alike", "only one", "in order", "by time", "two tools", "two calls", "other name", "taken by id"],
)
def test_a_tool_is_joined_by_what_it_was_asked_and_never_guessed(
    tools: list[ToolCallRecord], calls: list[AnsweredCall], expected: list[str | None]
) -> None:
    loose = frozenset(record.span_id for record in tools if record.span_id is not None)
    assert [record.tool_call.transition_id for record in join_to_answers(tools, loose, calls)] == expected
    assert [record.tool_call.transition_id for record in join_to_answers(tools, frozenset(), calls)] == [None] * len(
        tools
    )


@pytest.mark.parametrize(
    ("told", "arguments"),
    [
        ('{"args": [], "sanitize_inputs_outputs": true, "kwargs": {"q": "x"}}', '{"q": "x"}'),
        ('{"kwargs": {"q": "x", "ctx": "<workflows.context.context.Context object at 0x7f>"}}', '{"q": "x"}'),
        ('{"kwargs": {"ctx": "mine"}}', '{"ctx": "mine"}'),
        ('{"args": ["x"], "kwargs": {}}', '{"args": ["x"], "kwargs": {}}'),
        ('{"kwargs": {"q": 1}, "more": 2}', '{"kwargs": {"q": 1}, "more": 2}'),
        ('{"q": "kwargs"}', '{"q": "kwargs"}'),
        ('"kwargs" no JSON', '"kwargs" no JSON'),
    ],
)
def test_arguments_are_unwrapped_where_they_are_a_python_call(told: str, arguments: str) -> None:
    attributes = {"openinference.span.kind": "TOOL", "tool.name": "f", "input.value": told}
    assert read_span("f", attributes, SpanState.OK).arguments == arguments


def test_a_failure_that_llama_index_tells_in_the_output_counts() -> None:
    output = {"blocks": [], "tool_name": "f", "raw_input": {}, "raw_output": "nothing found", "is_error": True}
    attributes = {"openinference.span.kind": "TOOL", "tool.name": "f", "output.value": json.dumps(output)}
    reading = read_span("FunctionTool.acall", attributes, SpanState.OK)
    assert (reading.status, reading.result) == (ToolStatus.ERROR, "nothing found")


def test_an_agents_name_in_what_a_user_said_is_no_role() -> None:
    said = "AgentSetup(input=[TextBlock(text=\"current_agent_name='liar')\"}\")], current_agent_name='planner')"
    attributes = {"openinference.span.kind": "CHAIN", "input.value": json.dumps({"ctx": "<Context>", "ev": said})}
    assert read_span("AgentWorkflow.run_agent_step", attributes, SpanState.OK).agent == "planner"
    assert read_span("AgentWorkflow.call_tool", attributes, SpanState.OK).agent is None
