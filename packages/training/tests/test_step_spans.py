"""The trainer's steps go to whatever collector the user has configured, and nowhere where none is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lightningrl.backends import LearnReport
from lightningrl.errors import BackendError, ConfigError
from lightningrl.recipe_tables import TelemetryConfig
from lightningrl.types import Sample
from lightningrl_credit.samples import build_samples
from lightningrl_testing.groups import make_group
from lightningrl_training.policies import Policies, RunningPolicy
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans, open_spans


class Collector:
    """A small OTLP collector on a free port."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str | None, ExportTraceServiceRequest]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.received.append(
                    (self.path, self.headers["authorization"], ExportTraceServiceRequest.FromString(body))
                )
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def test_spans_reach_the_recipes_collector_with_its_headers(collector: Collector) -> None:
    config = TelemetryConfig(forward=collector.url, headers_env={"Authorization": "TOKEN"})
    with (
        open_spans(config, {"TOKEN": "Bearer 42"}, run="mine") as spans,
        spans.span("step", step=7),
        spans.span("learn", policy="a"),
    ):
        pass
    ((path, authorization, request),) = collector.received
    assert (path, authorization) == ("/v1/traces", "Bearer 42")
    learn, step = spans_of(request)
    assert (learn.name, step.name) == ("lightningrl.learn", "lightningrl.step")
    assert learn.parent_span_id == step.span_id
    assert {one.key: one.value.int_value for one in step.attributes} == {"lightningrl.step": 7}
    resource = {one.key: one.value.string_value for one in request.resource_spans[0].resource.attributes}
    assert resource["lightningrl.run"] == "mine"


def test_spans_go_where_opentelemetrys_own_variables_say(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "nightly"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with open_spans(None, environment, run="mine") as spans, spans.span("validate"):
        pass
    ((path, _, request),) = collector.received
    assert path == "/v1/traces"
    assert [span.name for span in spans_of(request)] == ["lightningrl.validate"]
    resource = {one.key: one.value.string_value for one in request.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "nightly"


def test_without_an_exporter_nothing_is_made(collector: Collector) -> None:
    with open_spans(None, {}, run="mine") as spans:
        assert spans is NO_SPANS
        with spans.span("step") as span:
            assert not span.is_recording()
    with open_spans(TelemetryConfig(), {}, run="mine") as spans:
        assert spans is NO_SPANS


def test_a_collector_that_is_down_keeps_no_run_from_its_end() -> None:
    with open_spans(TelemetryConfig(forward="http://127.0.0.1:9"), {}, run="mine") as spans, spans.span("step"):
        pass


def test_a_header_without_its_variable_is_refused() -> None:
    config = TelemetryConfig(forward="http://127.0.0.1:9", headers_env={"Authorization": "TOKEN"})
    with (
        pytest.raises(ConfigError, match="the environment variable 'TOKEN' is not set"),
        open_spans(config, {}, run="mine"),
    ):
        pass


class Backend:
    """Learns, or does not."""

    def __init__(self, *, serves_while_learning: bool, is_broken: bool = False) -> None:
        self.serves_while_learning = serves_while_learning
        self.is_broken = is_broken
        self.version = 3

    @property
    def engine(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(version=self.version))

    def learn(self, samples: list[Sample]) -> LearnReport:
        if self.is_broken:
            raise BackendError("out of memory")
        self.version += 1
        return LearnReport(policy_version=self.version, tokens=9, seconds=0.0)


class Link:
    call_speed = None

    async def hold(self) -> None: ...

    async def release(self, version: int) -> None: ...


@pytest.mark.parametrize("serves_while_learning", [True, False])
async def test_learning_and_the_swap_of_weights_are_spans_of_their_policy(*, serves_while_learning: bool) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    group = make_group((0.0,), (1.0,))
    credit = tuple(tuple(call.logprobs for call in one.transitions) for one in group.trajectories)
    rows = build_samples([group], [credit])
    backend = Backend(serves_while_learning=serves_while_learning)
    policy = RunningPolicy(name="policy", backend=backend, link=Link(), is_trained=True)  # type: ignore[arg-type]
    policies = Policies([policy], StepSpans(provider.get_tracer("test")))
    await policies.learn(rows)
    learn, swap = exporter.get_finished_spans()
    assert dict(learn.attributes or {}) == {
        "lightningrl.policy": "policy",
        "lightningrl.rows": 2,
        "lightningrl.tokens": 9,
    }
    assert dict(swap.attributes or {}) == {"lightningrl.policy": "policy", "lightningrl.version": 4}
    backend.is_broken = True
    with pytest.raises(BackendError):
        await policies.learn(rows)
    broken = next(span for span in exporter.get_finished_spans()[2:] if span.name == "lightningrl.learn")
    assert not broken.status.is_ok and "out of memory" in (broken.status.description or "")
