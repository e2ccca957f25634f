"""Evaluations that an agent in any language exports as OTLP log records: a stock exporter finds its attempt by its
environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, LogRecordExportResult, SimpleLogRecordProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext

from lightningrl.records import Lease
from lightningrl.types import Outcome, ToolStatus, Trajectory
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.environment import telemetry_environment
from lightningrl_credit.rewards import ReportedTurnReward
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.spans.otlp import JSON, PROTOBUF
from lightningrl_server.store import SqlStore
from lightningrl_testing.loopback import serving
from lightningrl_testing.store_conformance import make_call, make_spec
from lightningrl_testing.whole_path import whole_path

HERE = Path(__file__).parent
LIMIT = 2**20
EVENT = "gen_ai.evaluation.result"


class Scene:
    """A server with one leased attempt, whose two calls have answered; the second one's span is known."""

    def __init__(self, url: str, client: ServerClient, http: httpx.AsyncClient, lease: Lease) -> None:
        self.url, self.client, self.http, self.lease = url, client, http, lease

    @property
    def environment(self) -> dict[str, str]:
        """What a program of this attempt gets."""
        rollout = ActiveRollout(rollout_id="a", attempt=1, base_path=self.lease.base_path, key=self.lease.key)
        return telemetry_environment(self.url, rollout, {})

    async def export(self, body: Any, content_type: str = JSON, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        whole = {"authorization": f"Bearer {self.lease.key}", "content-type": content_type, **headers}
        return await self.http.post("/api/v1/rollouts/a/attempts/1/v1/logs", content=content, headers=whole)

    async def finished(self) -> Trajectory:
        await self.client.finish_attempt("a", 1, Outcome.SUCCEEDED)
        (trajectory,) = await self.client.trajectories(["a"])
        return trajectory


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key="the-run-key", max_body_bytes=LIMIT)
    async with (
        serving(app, ws="none") as url,
        ServerClient(url, "the-run-key") as client,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        await client.create_rollouts([make_spec("a")])
        lease = await client.lease("w", 60.0)
        assert lease is not None
        await store.append_call(make_call(lease, "c0", [1], [2]))
        await store.append_call(make_call(lease, "c1", [3], [4], span_id="cc" * 8))
        yield Scene(url, client, http, lease)
    await store.close()


def within(span_id: str) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(SpanContext(1, int(span_id, 16), is_remote=False)))


def record(said: Mapping[str, str | float], span_id: str = "", **fields: Any) -> dict[str, Any]:
    """As an SDK in JavaScript writes it."""
    kinds = {str: "stringValue", float: "doubleValue"}
    attributes = [{"key": key, "value": {kinds[type(value)]: value}} for key, value in said.items()]
    return {
        "timeUnixNano": "1",
        "traceId": "5b" * 16,
        "spanId": span_id,
        "eventName": EVENT,
        "attributes": attributes,
        **fields,
    }


def export(*records: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"scope": {"name": "mine"}, "logRecords": list(records)}]}]}


def told(name: str, score: float, **more: str) -> dict[str, str | float]:
    return {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": score, **more}


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_a_stock_exporter_reports_evaluations_and_a_repeated_export_counts_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    for name, value in {**scene.environment, "OTEL_EXPORTER_OTLP_COMPRESSION": compression}.items():
        monkeypatch.setenv(name, value)
    emitted = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(emitted))
    events = provider.get_logger("my.agent")
    events.emit(event_name=EVENT, attributes=told("by id", 0.5, **{"gen_ai.response.id": "chatcmpl-c0"}))
    events.emit(event_name=EVENT, attributes=told("by span", 0.25), context=within("cc" * 8))
    events.emit(event_name=EVENT, attributes=told("of another span", 2.0), context=within("dd" * 8))
    events.emit(
        event_name=EVENT, attributes={"gen_ai.evaluation.name": "label", "gen_ai.evaluation.score.label": "Pass"}
    )
    events.emit(attributes={"event.name": EVENT, **told("by an older SDK", 4.0)})
    events.emit(event_name="something.else", attributes=told("not an evaluation", 1.0))
    events.emit(body="a line of the log")
    exporter = OTLPLogExporter()
    for _ in range(2):
        assert await asyncio.to_thread(exporter.export, emitted.get_finished_logs()) is LogRecordExportResult.SUCCESS
    exporter.shutdown()  # type: ignore[no-untyped-call]
    trajectory = await scene.finished()
    assert [call.reported for call in trajectory.transitions] == [{"by id": 0.5}, {"by span": 0.25}]
    assert trajectory.reported == {"of another span": 2.0, "label": 1.0, "by an older SDK": 4.0}
    assert ReportedTurnReward(name="by id")(trajectory) == [0.5, None]


async def test_json_says_the_same_and_what_is_no_score_says_nothing(scene: Scene) -> None:
    nonsense = [
        record({"gen_ai.evaluation.name": "none"}),
        record(told("huge", 1e300)),
        record(told("n" * 201, 1.0)),
        record({}),
    ]
    body = export(record(told("by span", 0.25), "cc" * 8), record(told("no span", 0.5), "not hexadecimal"), *nonsense)
    answer = await scene.export(body)
    assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, JSON, {})
    surrogate = json.dumps(export(record(told("LONE", 1.0)))).replace("LONE", "\\ud800")
    assert (await scene.export(surrogate.encode())).status_code == 200
    trajectory = await scene.finished()
    assert trajectory.transitions[1].reported == {"by span": 0.25}
    assert trajectory.reported == {"no span": 0.5, "\ufffd": 1.0}


async def test_an_empty_export_is_answered_in_its_own_form(scene: Scene) -> None:
    answer = await scene.export(ExportLogsServiceRequest().SerializeToString(), PROTOBUF)
    assert (answer.status_code, answer.headers["content-type"]) == (200, PROTOBUF)
    assert ExportLogsServiceResponse.FromString(answer.content) == ExportLogsServiceResponse()


async def test_what_is_no_export_or_too_much_is_refused_with_a_sentence(scene: Scene) -> None:
    many = ExportLogsServiceRequest()
    records = many.resource_logs.add().scope_logs.add().log_records
    for _ in range(20_001):
        records.add()
    refused: list[tuple[bytes, str, int, str]] = [
        (b"<logs/>", "text/xml", 415, "content-type 'text/xml' is no OTLP"),
        (b"\xff\xff\xff", PROTOBUF, 400, "the body is no OTLP ExportLogsServiceRequest; export with OTLP over HTTP"),
        (b"[]", JSON, 400, "the body is no OTLP in JSON (it is a list, not an object)"),
        (b'{"resourceLogs": 3}', JSON, 400, "the body is no OTLP in JSON ("),
        (b"[" * 100_000, JSON, 400, "the body is no OTLP in JSON ("),
        (
            many.SerializeToString(),
            PROTOBUF,
            400,
            "the export has 20001 log records, more than 20000; export fewer at a time",
        ),
        (b"x" * (LIMIT + 1), PROTOBUF, 413, f"the request body is larger than {LIMIT} bytes"),
    ]
    for body, content_type, status, sentence in refused:
        answer = await scene.export(body, content_type)
        assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (status, True), answer.text
    await scene.client.finish_attempt("a", 1, Outcome.SUCCEEDED)
    late = await scene.export(export(record(told("late", 1.0))))
    assert (late.status_code, late.json()["error"]["code"]) == (409, "attempt_over")


def test_a_signal_that_somebody_has_pointed_elsewhere_stays_there() -> None:
    rollout = ActiveRollout(rollout_id="g/1", attempt=2, base_path="/rollouts/g%2F1/attempts/2/v1", key="k e y")
    found = telemetry_environment(
        "http://s:1/", rollout, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://mine/v1/traces"}
    )
    assert found == {
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://s:1/api/v1/rollouts/g%2F1/attempts/2/v1/logs",
        "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "authorization=Bearer%20k%20e%20y",
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
    }
    assert telemetry_environment("http://s:1", rollout, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://mine:4318"}) == {}


@pytest.mark.slow
async def test_a_program_with_a_stock_sdk_reports_spans_and_evaluations_of_its_own_rollout(tmp_path: Path) -> None:
    async with whole_path(tmp_path, "stock_telemetry_agent.py:answer", base_dir=HERE, concurrency=2) as path:
        path.engine.enqueue("one", "two")
        trajectories = await path.run({"r1": "what?", "r2": "why?"})
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        assert [call.reported for call in trajectory.transitions] == [{"Relevance": 0.5}]
        assert trajectory.reported == {"Done": 1.0}
        assert [(tool.name, tool.status) for tool in trajectory.tool_calls] == [("look", ToolStatus.OK)]
