"""What the server ingests goes to the user's own collector as well, and a collector that is down is nobody's problem
but its own."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, ServerError
from lightningrl.instrumentation import close_tool_span, make_tracer, open_chat_span, open_tool_span
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import TelemetryConfig
from lightningrl.types import Outcome, ToolStatus
from lightningrl_client.control.client import ServerClient
from lightningrl_client.recipe_file import with_settings
from lightningrl_client.telemetry.spans import encode_otlp
from lightningrl_server import forwarding
from lightningrl_server.app import create_app
from lightningrl_server.asked_calls import read_kept_answers
from lightningrl_server.forwarding import ExportForwarder, Forwarders, create_forwarders
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.settings import ServerSettings
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.store_conformance import make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer

RUN_KEY = "the-run-key"
NOBODY = "http://127.0.0.1:9/v1/traces"


class Collector:
    """A small OTLP collector on a free port."""

    def __init__(self, *statuses: int) -> None:
        """It answers with these statuses in turn, then with 200."""
        self.statuses = list(statuses)
        self.received: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        self.logs: list[tuple[str, dict[str, str], ExportLogsServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = collector.statuses.pop(0) if collector.statuses else 200
                headers = {key.lower(): value for key, value in self.headers.items()}
                if status == 200 and self.path == "/v1/logs":
                    collector.logs.append(
                        (self.path, headers, ExportLogsServiceRequest.FromString(gzip.decompress(body)))
                    )
                elif status == 200:
                    collector.received.append(
                        (self.path, headers, ExportTraceServiceRequest.FromString(gzip.decompress(body)))
                    )
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def names(self) -> list[str]:
        return [span.name for _, _, request in self.received for span in spans_of(request)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "BATCH_WAIT_S", 0.05)
    monkeypatch.setattr(forwarding, "FIRST_PAUSE_S", 0.02)


def spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def make_request(*names: str) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number, name in enumerate(names):
        scope.spans.add(name=name, span_id=bytes([1, 1, 1, 1, 1, 1, 1, number + 1]), trace_id=b"\1" * 16)
    return request


async def until(claim: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not claim():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------- the whole way


async def test_the_servers_spans_and_log_records_reach_the_collector(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTOR_TOKEN", "Bearer secret")
    telemetry = TelemetryConfig(forward=collector.url, headers_env={"Authorization": "COLLECTOR_TOKEN"})
    settings = ServerSettings(store_url=f"sqlite:///{tmp_path}/store.db", run_key=RUN_KEY, telemetry=telemetry)
    async with (
        ServerProcess(settings, log_path=tmp_path / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
    ):
        await export(server.url, client, "a", make_request("one", "two").SerializeToString())
        await until(lambda: collector.received)
        status = await client.status()
        assert (status.spans_forwarded, status.spans_not_forwarded) == (2, 0)
        logs = ExportLogsServiceRequest()
        logs.resource_logs.add().scope_logs.add().log_records.add(event_name="told")
        await export(server.url, client, "b", logs.SerializeToString(), "logs")
        await until(lambda: collector.logs)
    ((path, _, sent),) = collector.logs
    assert (path, sent.resource_logs[0].scope_logs[0].log_records[0].event_name) == ("/v1/logs", "told")
    assert sent.resource_logs[0].resource.attributes[0].value.string_value == "b"
    ((path, headers, request),) = collector.received
    assert (path, headers["authorization"], headers["content-type"]) == (
        "/v1/traces",
        "Bearer secret",
        "application/x-protobuf",
    )
    assert [span.name for span in spans_of(request)] == ["one", "two"]
    resource = {one.key: one.value for one in request.resource_spans[0].resource.attributes}
    assert (resource["lightningrl.rollout.id"].string_value, resource["lightningrl.attempt"].int_value) == ("a", 1)


async def test_rollouts_do_not_notice_that_the_collector_is_down(tmp_path: Path) -> None:
    settings = ServerSettings(
        store_url=f"sqlite:///{tmp_path}/store.db",
        run_key=RUN_KEY,
        telemetry=TelemetryConfig(forward="http://127.0.0.1:9/v1/traces"),
    )
    async with (
        ServerProcess(settings, log_path=tmp_path / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
    ):
        for number in range(20):
            await export(server.url, client, f"r{number}", make_request("one").SerializeToString())
        assert (await client.status()).counts.outcomes == {Outcome.SUCCEEDED: 20}
    log = (tmp_path / "server.log").read_text()
    assert log.count("spans do not reach 'http://127.0.0.1:9/v1/traces': ConnectError") == 1
    assert "0 spans reached 'http://127.0.0.1:9/v1/traces', 20 did not" in log


async def export(url: str, client: ServerClient, rollout_id: str, body: bytes, signal: str = "traces") -> None:
    await client.create_rollouts([make_spec(rollout_id)])
    lease = await client.lease("w", 60.0)
    assert lease is not None
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"authorization": f"Bearer {lease.key}", "content-type": "application/x-protobuf"}
        answer = await http.post(
            f"{url}/api/v1/rollouts/{rollout_id}/attempts/1/v1/{signal}", content=body, headers=headers
        )
        assert answer.status_code == 200
    await client.finish_attempt(rollout_id, 1, Outcome.SUCCEEDED)


# ---------------------------------------------------------------------- batches, bounds, outages


async def test_exports_are_sent_together(collector: Collector) -> None:
    forwarder = ExportForwarder(collector.url)
    for number in range(50):
        forwarder.offer(make_request(f"span {number}"), f"r{number}", 1)
    await until(lambda: forwarder.forwarded == 50)
    assert len(collector.received) == 1
    assert collector.names == [f"span {number}" for number in range(50)]
    await forwarder.close()


async def test_what_waits_is_sent_when_the_server_stops(collector: Collector) -> None:
    forwarder = ExportForwarder(collector.url)
    forwarder.offer(make_request("last"), "r", 1)
    await forwarder.close()
    forwarder.offer(make_request("late"), "r", 1)
    assert (collector.names, forwarder.forwarded) == (["last"], 1)


async def test_a_busy_collector_is_asked_again(collector: Collector) -> None:
    collector.statuses += [503, 429]
    forwarder = ExportForwarder(collector.url)
    forwarder.offer(make_request("one"), "r", 1)
    await until(lambda: forwarder.forwarded == 1)
    assert forwarder.failed == 0
    await forwarder.close()


async def test_an_outage_is_logged_once_and_counted(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.statuses += [400, 401]
    forwarder = ExportForwarder(collector.url)
    for number, count in ((0, 1), (1, 3)):
        forwarder.offer(make_request(*["lost"] * (number + 1)), "r", 1)
        await until(lambda count=count: forwarder.failed == count)
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        f"telemetry: spans do not reach {collector.url!r}: it answered 400: ''"
    ]
    forwarder.offer(make_request("found"), "r", 1)
    await until(lambda: forwarder.forwarded == 1)
    collector.statuses += [400]
    forwarder.offer(make_request("lost"), "r", 1)
    await until(lambda: forwarder.failed == 4)
    assert len(caplog.records) == 2  # it had come back
    await forwarder.close()


async def test_what_waits_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    forwarder = ExportForwarder(NOBODY, queue_bytes=2_000)
    for _ in range(1_000):
        forwarder.offer(make_request("one"), "r", 1)
    assert forwarder.failed > 900
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "2000 bytes of spans wait already" in caplog.text
    await forwarder.close()
    assert (forwarder.forwarded, forwarder.failed) == (0, 1_000)


async def test_a_collector_that_never_answers_does_not_hold_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "CLOSE_S", 0.2)
    monkeypatch.setattr(forwarding, "TIMEOUT_S", None)  # so that closing alone ends the wait
    silent = socket.create_server(("127.0.0.1", 0))
    forwarder = ExportForwarder(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces")
    forwarder.offer(make_request("one"), "r", 1)
    await forwarder.close()
    assert (forwarder.forwarded, forwarder.failed) == (0, 1)
    silent.close()


# ---------------------------------------------------------------------- settings


def test_a_collector_without_a_path_is_asked_at_the_usual_one(collector: Collector) -> None:
    assert create_forwarders(None, {}) == create_forwarders(TelemetryConfig(), {}) == Forwarders()
    usual = ("http://c:4318/v1/traces", "http://c:4318/v1/logs")
    given: dict[str, tuple[str, str | None]] = {
        "http://c:4318": usual,
        "http://c:4318/v1/traces": usual,
        "http://c/otlp": ("http://c/otlp", None),
    }
    for forward, (spans, logs) in given.items():
        found = create_forwarders(TelemetryConfig(forward=forward), {})
        assert found.spans is not None and found.spans._url == spans
        assert (None if found.logs is None else found.logs._url) == logs


async def test_a_header_whose_variable_is_not_set_ends_the_start(tmp_path: Path) -> None:
    telemetry = TelemetryConfig(forward="http://c:4318", headers_env={"x-api-key": "NOT_SET_ANYWHERE"})
    says = "telemetry.headers_env.'x-api-key': the environment variable 'NOT_SET_ANYWHERE' is not set; set it to the header's value"
    with pytest.raises(ConfigError, match=says):
        create_forwarders(telemetry, {})
    settings = ServerSettings(store_url=f"sqlite:///{tmp_path}/store.db", run_key=RUN_KEY, telemetry=telemetry)
    with pytest.raises(ServerError, match=says):
        await ServerProcess(settings, log_path=tmp_path / "server.log").start()


@pytest.mark.parametrize(
    "table", [{"forward": "collector:4318"}, {"forwards": "http://c"}, {"headers_env": {"a": "no variable"}}]
)
def test_a_recipe_says_what_is_wrong_with_its_telemetry(table: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(
        {"agent": "a:b", "tasks": {"train": "a:c"}, "policy": {"model": "m"}, "rewards": {"r": {"use": "a:d"}}}
    )
    with pytest.raises(ConfigError, match="telemetry"):
        with_settings(recipe, {"telemetry": table})


# ---------------------------------------------------------------------- what a viewer of traces shows of them


async def test_spans_arrive_with_what_the_server_knows_of_their_calls(tmp_path: Path, collector: Collector) -> None:
    """The spans of our adapters' own functions, the calls of the real gateway."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = make_tracer(provider, "lightningrl_langchain")
    forwarders = Forwarders(spans=ExportForwarder(f"{collector.url}/v1/traces"))
    renderers = {"policy": PolicyRenderer(tiny_tokenizer())}
    async with live_gateway(tmp_path) as gateway:
        app = create_app(
            gateway.store,
            gateway.engines,
            run_key="the-run-key",
            forwarders=forwarders,
            read_asked=read_kept_answers(gateway.store, renderers),
        )
        attempt = await gateway.attempt()
        headers = {"authorization": f"Bearer {attempt.key}"}
        gateway.engine.enqueue("good day", "good evening")
        chat = open_chat_span(tracer, "gpt-4o", "planner", None)
        parent = chat.get_span_context()
        body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello there"}], "n": 2}
        async with httpx.AsyncClient(trust_env=False) as http:
            traceparent = f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01"
            answer = await http.post(
                f"{attempt.base_url}/chat/completions", json=body, headers={**headers, "traceparent": traceparent}
            )
        usage = answer.raise_for_status().json()["usage"]
        tool = open_tool_span(tracer, "look", '{"q": 1}', call_id="c", role="planner", below=set_span_in_context(chat))
        close_tool_span(tool, ToolStatus.ERROR, "no such thing", "LookupError")
        chat.end()
        path = f"/api/v1/rollouts/{attempt.rollout_id}/attempts/{attempt.attempt}/v1/traces"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            spans = encode_otlp(memory.get_finished_spans())
            sent = await http.post(path, content=spans, headers={**headers, "content-type": "application/x-protobuf"})
        assert sent.status_code == 200, sent.text
        call, other = await attempt.transitions()
        await forwarders.close()
    ((_, _, request),) = collector.received
    (scope,) = [scope for resource in request.resource_spans for scope in resource.scope_spans]
    assert scope.scope.version and scope.schema_url.startswith("https://opentelemetry.io/schemas/")
    by_name = {span.name.split()[0]: span for span in scope.spans}
    said = {pair.key: pair.value for pair in by_name["chat"].attributes}
    assert by_name["chat"].kind == 3, "a client's"
    assert (said["gen_ai.provider.name"].string_value, said["gen_ai.request.model"].string_value) == (
        "lightningrl",
        "gpt-4o",
    )
    assert said["gen_ai.response.id"].string_value == min(call.id, other.id), "the answer's"
    assert said["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert [one.string_value for one in said["gen_ai.response.finish_reasons"].array_value.values] == ["stop"] * 2
    assert "hello there" in said["gen_ai.input.messages"].string_value
    output = said["gen_ai.output.messages"].string_value
    assert "good day" in output and "good evening" in output
    for_viewers = {key: said[key].int_value for key in ("llm.token_count.prompt", "llm.token_count.completion")}
    assert list(for_viewers.values()) == [usage["prompt_tokens"], usage["completion_tokens"]]
    assert said["openinference.span.kind"].string_value == "LLM" and "good day" in said["output.value"].string_value
    of_tool = {pair.key: pair.value.string_value for pair in by_name["execute_tool"].attributes}
    assert (of_tool["openinference.span.kind"], of_tool["input.value"], of_tool["output.value"]) == (
        "TOOL",
        '{"q": 1}',
        "no such thing",
    )
    assert by_name["execute_tool"].status.message == "LookupError"
