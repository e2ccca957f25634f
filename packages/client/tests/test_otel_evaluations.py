"""Evaluations in an agent's own telemetry (`gen_ai.evaluation.result`) reach the call that they are of, else the
rollout."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from lightningrl.records import Lease
from lightningrl.types import Outcome, Trajectory
from lightningrl_client.control.client import ServerClient
from lightningrl_credit.rewards import ReportedReward, ReportedTurnReward
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_testing.store_conformance import make_call, make_spec
from lightningrl_testing.whole_path import WholePath, running_services

HERE = Path(__file__).parent
START = 1_700_000_000_000_000_000


class Scene:
    """A server with one leased attempt, whose three calls have answered."""

    def __init__(self, client: ServerClient, http: httpx.AsyncClient, lease: Lease) -> None:
        self.client, self.http, self.lease = client, http, lease

    async def export(self, *spans: dict[str, Any]) -> None:
        body = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "mine"}, "spans": list(spans)}]}]}
        headers = {"authorization": f"Bearer {self.lease.key}", "content-type": "application/json"}
        content = json.dumps(body)
        answer = await self.http.post("/api/v1/rollouts/a/attempts/1/v1/traces", content=content, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {})

    async def finished(self) -> Trajectory:
        await self.client.finish_attempt("a", 1, Outcome.SUCCEEDED)
        (trajectory,) = await self.client.trajectories(["a"])
        return trajectory


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key="the-run-key")
    async with (
        serving(app, ws="none") as url,
        ServerClient(url, "the-run-key") as client,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        await client.create_rollouts([make_spec("a")])
        lease = await client.lease("w", 60.0)
        assert lease is not None
        await store.append_call(make_call(lease, "c0", [1], [2], tool_call_ids=("call_7",), span_id="bb" * 8))
        await store.append_call(make_call(lease, "c1", [3], [4], span_id="cc" * 8))
        await store.append_call(make_call(lease, "c2", [5], [6]))
        yield Scene(client, http, lease)
    await store.close()


def value_of(value: Any) -> dict[str, Any]:
    kind = {bool: "boolValue", int: "intValue", float: "doubleValue"}.get(type(value), "stringValue")
    return {kind: value}


def attributes_of(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value_of(value)} for key, value in said.items()]


def span(name: str, span_id: str, parent: str = "", *told: dict[str, Any], **said: Any) -> dict[str, Any]:
    """As an SDK in another language writes it; each of `told` is an evaluation event. `a__b` stands for the attribute
    `a.b`."""
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": span_id * 8,
        "parentSpanId": parent * 8,
        "name": name,
        "startTimeUnixNano": str(START),
        "endTimeUnixNano": str(START + 1),
        "attributes": attributes_of({key.replace("__", "."): value for key, value in said.items()}),
        "events": [
            {"name": "gen_ai.evaluation.result", "timeUnixNano": str(START), "attributes": attributes_of(one)}
            for one in told
        ],
    }


def told(name: Any, score: Any = None, *, label: str | None = None, answer: str | None = None) -> dict[str, Any]:
    said = {"name": name, "score.value": score, "score.label": label}
    found = {f"gen_ai.evaluation.{key}": value for key, value in said.items() if value is not None}
    return found if answer is None else {**found, "gen_ai.response.id": answer}


async def test_an_evaluation_finds_its_call_by_the_answers_id_then_by_the_spans_around_it(scene: Scene) -> None:
    await scene.export(
        span("invoke_agent", "aa", "", told("by id", 0.5, answer="chatcmpl-c2"), told("whole", 0.75)),
        span("chat", "bb", "aa", told("by span", 1.0), told("other id", 0.125, answer="c1")),
        span("evaluate", "dd", "cc", told("by the span around", -2)),
        span(
            "execute_tool",
            "ee",
            "aa",
            told("by tool", 3.0),
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__call__id="call_7",
        ),
        span("gen_ai.evaluation.result", "ff", "bb", **told("a span of its own", 4.0)),
    )
    trajectory = await scene.finished()
    first, second, third = trajectory.transitions
    assert first.reported == {"by span": 1.0, "by tool": 3.0, "a span of its own": 4.0}
    assert second.reported == {"by the span around": -2.0, "other id": 0.125}
    assert third.reported == {"by id": 0.5}
    assert trajectory.reported == {"whole": 0.75}
    assert ReportedTurnReward(name="by span")(trajectory) == [1.0, None, None]
    assert ReportedReward(name="whole")(trajectory.task, None, trajectory) == 0.75


async def test_an_evaluation_within_a_tool_is_of_the_call_that_asked_whatever_id_the_tools_span_has(
    tmp_path: Path,
) -> None:
    """By the tool's item in a response (Agno), or by its name where it has no id."""
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        asked = "".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("look", "add")
        )
        gateway.engine.enqueue(asked)
        tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("look", "add")]
        headers = {"authorization": f"Bearer {attempt.key}"}
        async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
            body = {"model": "m", "input": "hi", "tools": tools}
            items = (await http.post(f"{attempt.base_url}/responses", json=body)).json()["output"]
            of_tool = {"gen_ai__operation__name": "execute_tool"}
            named = {"gen_ai__tool__name": "look", "gen_ai__tool__call__id": items[0]["id"]}
            spans = [
                span("execute_tool look", "aa", "", told("by item", 1.0), **of_tool, **named),
                span("execute_tool add", "bb", "", told("by name", 0.5), **of_tool, gen_ai__tool__name="add"),
            ]
            export = {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "agno"}, "spans": spans}]}]}
            url = f"{gateway.url}/api/v1/rollouts/{attempt.rollout_id}/attempts/1/v1/traces"
            assert (await http.post(url, json=export)).status_code == 200
            ended = await http.post(url.replace("v1/traces", "result"), json={"outcome": "succeeded"})
            assert ended.status_code < 300, ended.text
        (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    (call,) = trajectory.transitions
    assert call.reported == {"by item": 1.0, "by name": 0.5}


async def test_an_answer_that_this_attempt_was_not_given_is_looked_for_around_the_span(scene: Scene) -> None:
    await scene.export(span("chat", "bb", "", told("relevant", 1.0, answer="chatcmpl-of-another")))
    assert [call.reported for call in (await scene.finished()).transitions] == [{"relevant": 1.0}, {}, {}]


async def test_a_score_is_a_number_or_a_label_that_everybody_knows_and_what_is_neither_says_nothing(
    scene: Scene,
) -> None:
    kept = {"int": 1, "text": "0.5", "yes": True}
    labels = {"passed": "pass", "failed": "Fail", "right": "correct", "beside": "not_relevant"}
    nonsense = [
        told("", 1.0),
        told("none"),
        told("word", "good"),
        told("nan", "nan"),
        told("inf", "inf"),
        told("huge", 1e300),
    ]
    await scene.export(
        span("a", "aa", "", *(told(name, score) for name, score in kept.items())),
        span(
            "b", "dd", "", *(told(name, label=label) for name, label in labels.items()), told("odd", label="excellent")
        ),
        span("c", "ee", "ee", *nonsense, told("n" * 201, 1.0), told("\ud800", 1.0)),
    )
    reported = (await scene.finished()).reported
    assert reported == {
        "int": 1.0,
        "text": 0.5,
        "yes": 1.0,
        "passed": 1.0,
        "failed": 0.0,
        "right": 1.0,
        "beside": 0.0,
        "\ufffd": 1.0,
    }


async def test_the_last_of_one_name_stands_also_when_an_export_is_repeated(scene: Scene) -> None:
    for _ in range(2):
        await scene.export(span("chat", "bb", "", told("relevant", 1.0), told("relevant", 0.5)))
    assert (await scene.finished()).transitions[0].reported == {"relevant": 0.5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    async with running_services(tmp_path_factory.mktemp("whole")) as path:
        yield path


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_agents_own_evaluations_come_with_its_spans(path: WholePath) -> None:
    path.engine.enqueue("one", "four", "five")
    async with path.workers("evaluating_agents.py:answers", adapters=["opentelemetry"], base_dir=HERE):
        trajectory = await path.run_one("answers", "what?")
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert [call.reported for call in trajectory.transitions] == [{"relevant": 0.25}, {"brief": 0.25}]
    assert trajectory.reported == {"done": 1.0}
    async with path.workers("evaluating_agents.py:says_nothing_else", adapters=["opentelemetry"], base_dir=HERE):
        trajectory = await path.run_one("nothing-else", "what?")
    assert trajectory.reported == {"relevant": 0.5}, "an attempt whose own span is all there is"


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_evaluations_as_log_records_are_of_the_span_that_was_current(path: WholePath) -> None:
    path.engine.enqueue("eight")
    async with path.workers("evaluating_agents.py:logs", adapters=["opentelemetry"], base_dir=HERE):
        trajectory = await path.run_one("logs", "what?")
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert [call.reported for call in trajectory.transitions] == [{"brief": 0.125}]
    assert trajectory.reported == {"whole": 0.125}
