"""Spans of tools are paired by id and name: twice the spans are twice the work, and an export has a bound."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightningrl.conventions import Kind, SpanReading
from lightningrl.errors import ServerError
from lightningrl_server import app as server_app
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.routes import LONG_BYTES
from lightningrl_server.spans import otlp, tool_spans
from lightningrl_server.spans.otlp import PROTOBUF, ParsedExport, parse_export
from lightningrl_server.spans.tool_spans import SeenSpan, distinct_tools, read_tools
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import leased, make_spec

COUNT = 3000
MOST_COMPARISONS = 100 * COUNT
"""Each with each would be 4,500,000."""


def tool(
    number: int, scope: str = "one", *, at: tuple[int, int] = (0, 1), parent: str | None = None, **reading: str
) -> SeenSpan:
    return SeenSpan(
        span_id=f"{number:016x}",
        parent_span_id=parent,
        started_ns=at[0],
        ended_ns=at[1],
        scope=scope,
        attributes={},
        reading=SpanReading(kind=Kind.TOOL, **{"tool": "search", **reading}),  # type: ignore[arg-type]
    )


def model(number: int, at: tuple[int, int], call_id: str, arguments: Any) -> SeenSpan:
    stem = "llm.output_messages.0.message.tool_calls.0.tool_call."
    told = {"id": call_id, "function.name": "search", "function.arguments": json.dumps(arguments)}
    attributes = {stem + key: value for key, value in told.items()}
    reading = SpanReading(kind=Kind.MODEL)
    return SeenSpan(
        span_id=f"{number:016x}",
        parent_span_id=None,
        started_ns=at[0],
        ended_ns=at[1],
        scope="m",
        attributes=attributes,
        reading=reading,
    )


SCENES: dict[str, list[SeenSpan]] = {
    "two instrumentations, one after the other": [
        tool(2 * number + side, f"scope-{side}", at=(10 * number, 10 * number + 5))
        for number in range(COUNT // 2)
        for side in (0, 1)
    ],
    "two instrumentations, all at once": [
        tool(number, f"scope-{number % 2}", at=(0, 10**6)) for number in range(COUNT)
    ],
    "each its own instrumentation": [
        tool(number, f"scope-{number}", at=(10 * number, 10 * number + 5)) for number in range(COUNT)
    ],
    "all of one id": [tool(number, f"scope-{number % 2}", tool_call_id="call_1") for number in range(COUNT)],
    "all inside of one": [
        tool(number, parent=None if number == 0 else f"{0:016x}", at=(number, number)) for number in range(COUNT)
    ],
    "all of one span id": [tool(1, f"scope-{number % 3}", parent=f"{1:016x}") for number in range(COUNT)],
}


@pytest.mark.parametrize("name", SCENES)
def test_each_span_is_compared_with_a_few_others(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    compared = 0
    is_same = tool_spans._is_same

    def counted(one: SeenSpan, other: SeenSpan) -> bool:
        nonlocal compared
        compared += 1
        return is_same(one, other)

    monkeypatch.setattr(tool_spans, "_is_same", counted)
    read_tools(SCENES[name])
    assert compared <= MOST_COMPARISONS


def test_each_tools_arguments_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    comparable = tool_spans.comparable

    def counted(arguments: str) -> str:
        nonlocal read
        read += 1
        return comparable(arguments)

    monkeypatch.setattr(tool_spans, "comparable", counted)
    spans: list[SeenSpan] = []
    for number in range(500):
        arguments = {"q": number % 7}
        spans.append(model(2 * number, (100 * number, 100 * number + 1), f"call_{number}", arguments))
        spans.append(tool(2 * number + 1, at=(100 * number + 2, 100 * number + 3), arguments=json.dumps(arguments)))
    records = read_tools(spans).records
    assert [record.tool_call.id for record in records] == [f"call_{number}" for number in range(500)]
    assert read == 1000


def test_many_calls_that_two_instrumentations_tell_of_are_paired_as_they_ran() -> None:
    one, two = (
        [tool(2 * number + side, f"scope-{side}", at=(10 * number + side, 10 * number + 5)) for number in range(500)]
        for side in (0, 1)
    )
    assert [span.span_id for span in distinct_tools([*one, *two])] == [span.span_id for span in one]


def test_an_export_of_too_many_spans_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MOST_SPANS", 3)
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(4):
        scope.spans.add(span_id=bytes([number + 1] * 8), name="f")
    with pytest.raises(ServerError, match="the export has 4 spans, more than 3; export fewer at a time"):
        parse_export(request.SerializeToString(), PROTOBUF, "", 10**6)
    del scope.spans[0]
    assert parse_export(request.SerializeToString(), PROTOBUF, "", 10**6).rejected == 0


async def test_a_long_export_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def seen(*args: Any) -> ParsedExport:
        threads.append(threading.current_thread())
        return parse_export(*args)

    monkeypatch.setattr(server_app, "parse_export", seen)
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    app = create_app(store, EngineRegistry(), run_key="the-run-key")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        url = "/api/v1/rollouts/a/attempts/1/v1/traces"
        export = ExportTraceServiceRequest()
        export.resource_spans.add().scope_spans.add().scope.name = "x" * LONG_BYTES
        answer = await http.post(
            url, content=export.SerializeToString(), headers={"authorization": f"Bearer {lease.key}"}
        )
    await store.close()
    assert answer.status_code == 200 and threads and threading.main_thread() not in threads
