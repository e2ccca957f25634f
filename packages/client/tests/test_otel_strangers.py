"""Strands, Haystack, Google's ADK and DSPy: who called, and what became of each tool, from spans that the real packages
made.

`strangers_spans.json` is a rollout of each agent in tests/frameworks (`scripts/try_frameworks.py NAME --spans FILE`),
less what nobody reads. The calls of the policy go through a real gateway, the spans to a real server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.types import Outcome, Trajectory
from lightningrl_server.app import create_app
from lightningrl_server.asked_calls import read_kept_answers
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.tokenizers import tiny_tokenizer

RECORDED = json.loads(Path(__file__).with_name("strangers_spans.json").read_text())
CITY = {"city": "city-0"}
Calls = list[tuple[str, list[tuple[str, dict[str, Any]]]]]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


async def ask(
    gateway: LiveGateway, attempt: LiveAttempt, span_id: str, calls: list[tuple[str, dict[str, Any]]]
) -> list[str]:
    """A call of the policy within a span, answered with these tool calls; their ids."""
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    gateway.engine.enqueue("\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts) or "done")
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name, _ in calls]
    body = {"model": "any", "messages": [{"role": "user", "content": span_id}], **({"tools": tools} if tools else {})}
    headers = {"authorization": f"Bearer {attempt.key}", "traceparent": f"00-{'1' * 32}-{span_id}-01"}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(f"{attempt.base_url}/chat/completions", json=body, headers=headers)
    return [call["id"] for call in answer.raise_for_status().json()["choices"][0]["message"].get("tool_calls") or ()]


def otlp(span: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    def listed(attributes: dict[str, Any]) -> list[dict[str, Any]]:
        values = {key: ids.get(value, value) if isinstance(value, str) else value for key, value in attributes.items()}
        kinds = {bool: "boolValue", int: "intValue", str: "stringValue"}
        return [{"key": key, "value": {kinds[type(value)]: value}} for key, value in values.items()]

    return {
        "spanId": span["id"],
        "parentSpanId": span["parent"],
        "name": span["name"],
        "startTimeUnixNano": str(span["start_us"] * 1000 + 10**18),
        "endTimeUnixNano": str(span["end_us"] * 1000 + 10**18),
        "status": {"code": 2} if span["error"] else {},
        "attributes": listed(span["attributes"]),
        "events": [{"name": event["name"], "attributes": listed(event["attributes"])} for event in span["events"]],
    }


async def replayed(gateway: LiveGateway, framework: str, calls: Calls) -> Trajectory:
    """The rollout again: the policy's calls by the names of the spans that they were made in, in order; then the
    spans."""
    spans = RECORDED[framework]["spans"]
    attempt = await gateway.attempt()
    given: list[str] = []
    waiting = list(spans)
    for name, tools in calls:
        span = next(span for span in waiting if span["name"] == name)
        waiting = waiting[waiting.index(span) + 1 :]
        given += await ask(gateway, attempt, span["id"], tools)
    recorded = [
        span["attributes"]["gen_ai.tool.call.id"] for span in spans if "gen_ai.tool.call.id" in span["attributes"]
    ]
    ids = dict(zip(recorded, given, strict=False))
    scopes = [{"scope": {"name": span["scope"]}, "spans": [otlp(span, ids)]} for span in spans]
    renderers = {gateway.engine.policy: PolicyRenderer(tiny_tokenizer())}
    app = create_app(
        gateway.store, gateway.engines, run_key="the-run-key", read_asked=read_kept_answers(gateway.store, renderers)
    )
    url = f"http://server/api/v1/rollouts/{attempt.rollout_id}/attempts/{attempt.attempt}/v1/traces"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        answer = await http.post(
            url, json={"resourceSpans": [{"scopeSpans": scopes}]}, headers={"authorization": f"Bearer {attempt.key}"}
        )
    assert answer.status_code == 200, answer.text
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED, "x")
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    return trajectory


def what_became(trajectory: Trajectory) -> list[tuple[str, str, str, str, int | None]]:
    """Of each tool call: name, arguments, status, result, the call that asked."""
    places = {one.id: one.index for one in trajectory.transitions}
    return [
        (call.name, call.arguments, call.status.value, call.result, places.get(call.transition_id or ""))
        for call in trajectory.tool_calls
    ]


async def test_strands_tells_arguments_and_results_in_events(gateway: LiveGateway) -> None:
    table = {"request": "a table in city-0"}
    calls: Calls = [
        ("chat", [("get_weather", CITY), ("host", table)]),
        ("chat", [("book_table", CITY)]),
        ("chat", []),
        ("chat", []),
    ]
    trajectory = await replayed(gateway, "strands", calls)
    assert what_became(trajectory) == [
        ("get_weather", json.dumps(CITY), "ok", '[{"text": "It is sunny in city-0."}]', 0),
        ("host", json.dumps(table), "ok", '[{"text": "Nothing free in city-0.\\n"}]', 0),
        ("book_table", json.dumps(CITY), "error", '[{"text": "Error: no table in city-0"}]', 1),
    ]
    assert [call.agent for call in trajectory.transitions] == ["Planner", "Host", "Host", "Planner"]


async def test_haystacks_components_are_roles_and_its_tools_belong_to_the_calls_that_asked(
    gateway: LiveGateway,
) -> None:
    step = "haystack.agent.step.llm"
    calls: Calls = [(step, [("get_weather", CITY)]), (step, [("book_table", CITY)]), (step, []), (step, [])]
    trajectory = await replayed(gateway, "haystack", calls)
    refused = "Failed to invoke Tool `book_table` with parameters {'city': 'city-0'}. Error: no table in city-0"
    assert what_became(trajectory) == [
        ("get_weather", json.dumps(CITY), "ok", "It is sunny in city-0.", 0),
        ("book_table", json.dumps(CITY), "error", json.dumps({"error": refused}), 1),
    ]
    assert [call.agent for call in trajectory.transitions] == ["planner", "planner", "planner", "reviewer"]


async def test_arguments_that_google_adk_leaves_out_are_those_that_were_asked(gateway: LiveGateway) -> None:
    chat = "generate_content openai/gpt-4o-mini"
    host = {"agent_name": "host"}
    calls: Calls = [
        (chat, [("get_weather", CITY)]),
        (chat, [("transfer_to_agent", host)]),
        (chat, [("book_table", CITY)]),
    ]
    trajectory = await replayed(gateway, "google_adk", calls)
    assert what_became(trajectory) == [
        ("get_weather", json.dumps(CITY), "ok", "", 0),
        ("transfer_to_agent", json.dumps(host), "ok", "", 1),
        ("book_table", json.dumps(CITY), "error", "", 2),
    ]
    assert [call.agent for call in trajectory.transitions] == ["planner", "planner", "host"]


async def test_tools_of_dspy_have_their_own_names(gateway: LiveGateway) -> None:
    trajectory = await replayed(gateway, "dspy", [])
    assert [told[:3] for told in what_became(trajectory)] == [
        ("get_weather", json.dumps(CITY), "ok"),
        ("book_table", json.dumps(CITY), "error"),
        ("finish", "{}", "ok"),
    ]
