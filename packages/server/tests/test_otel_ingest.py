"""OTLP over HTTP, in protobuf and in JSON, from any instrumentation: what the server makes of it, and what it
refuses."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from lightningrl.records import Lease
from lightningrl.types import Outcome, ToolStatus, Trajectory
from lightningrl_client.control.client import ServerClient
from lightningrl_runs.queries.rollout_counts import FacetCount, Part
from lightningrl_runs.reader import RunQueries
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.spans.otlp import JSON, PROTOBUF, parse_export
from lightningrl_server.store import SqlStore
from lightningrl_testing.loopback import serving
from lightningrl_testing.store_conformance import make_call, make_spec

RUN_KEY = "the-run-key"
TRACE = "5b8efff798038103d269b633813fc60c"
LIMIT = 2**20
UNNAMED = "37ed7a18-cda0-4c84-897c-25117554ea60"


class Scene:
    """A server with one leased attempt."""

    def __init__(self, client: ServerClient, http: httpx.AsyncClient, store: SqlStore, lease: Lease) -> None:
        self.client, self.http, self.store, self.lease = client, http, store, lease

    async def export(self, body: Any, content_type: str = JSON, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        whole = {"authorization": f"Bearer {self.lease.key}", "content-type": content_type, **headers}
        return await self.http.post("/api/v1/rollouts/a/attempts/1/v1/traces", content=content, headers=whole)

    async def finished(self) -> Trajectory:
        await self.client.finish_attempt("a", 1, Outcome.SUCCEEDED)
        (trajectory,) = await self.client.trajectories(["a"])
        return trajectory


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY, max_body_bytes=LIMIT)
    async with (
        serving(app, ws="none") as url,
        ServerClient(url, RUN_KEY) as client,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        await client.create_rollouts([make_spec("a")])
        lease = await client.lease("w", 60.0)
        assert lease is not None
        yield Scene(client, http, store, lease)
    await store.close()


def span(
    name: str, span_id: str, parent: str = "", at: tuple[float, float] = (0, 1), error: bool = False, **attributes: Any
) -> dict[str, Any]:
    """A span as an SDK in JavaScript writes it; `a__b` stands for the attribute `a.b`."""
    return {
        "traceId": TRACE,
        "spanId": span_id * 8,
        "parentSpanId": parent * 8,
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(int(1_700_000_000_000_000_000 + at[0] * 1e9)),
        "endTimeUnixNano": str(int(1_700_000_000_000_000_000 + at[1] * 1e9)),
        "attributes": [
            {"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()
        ],
        "events": [],
        "status": {"code": 2, "message": "it failed"} if error else {"code": 0},
    }


def export(*spans: dict[str, Any], scope: str = "openinference-instrumentation") -> dict[str, Any]:
    return {
        "resourceSpans": [
            {"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": scope}, "spans": list(spans)}]}
        ]
    }


def joined(*exports: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [resource for one in exports for resource in one["resourceSpans"]]}


# ---------------------------------------------------------------------- what it does


ASKED: dict[str, Any] = {
    "llm.output_messages.0.message.tool_calls.0.tool_call.id": "call_7",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "sql",
    "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"q": 1}',
}


@pytest.mark.parametrize("zipped", [False, True])
async def test_openinference_in_json_gives_roles_and_tools(scene: Scene, zipped: bool) -> None:
    await scene.store.append_call(make_call(scene.lease, "c0", [1], [2], tool_call_ids=("call_7",), span_id="bb" * 8))
    body = export(
        span("writer", "aa", at=(0, 9), openinference__span__kind="AGENT"),
        span(
            "ChatCompletion",
            "bb",
            "aa",
            openinference__span__kind="LLM",
            **ASKED,
        ),
        span(
            "sql",
            "cc",
            "aa",
            (2, 2.5),
            error=True,
            openinference__span__kind="TOOL",
            tool__name="sql",
            input__value='{"q":1}',
        ),
    )
    content = json.dumps(body).encode()
    headers = {"content-encoding": "gzip"} if zipped else {}
    for _ in range(2):
        answer = await scene.export(
            gzip.compress(content) if zipped else content, "application/json; charset=utf-8", **headers
        )
        assert (answer.status_code, answer.headers["content-type"], answer.json()) == (200, "application/json", {})
    trajectory = await scene.finished()
    assert [call.agent for call in trajectory.transitions] == ["writer"]
    (tool,) = trajectory.tool_calls
    assert (tool.id, tool.name, tool.status, tool.transition_id) == ("call_7", "sql", ToolStatus.ERROR, "c0")
    assert (tool.agent, tool.duration_s) == ("writer", 0.5)


@pytest.mark.parametrize("answer_id", ["c0", "chatcmpl-c0", "resp_c0"])
async def test_a_call_whose_answer_a_model_span_names_has_the_role_around_that_span(
    scene: Scene, answer_id: str
) -> None:
    """A program whose HTTP client no instrumentation touches says nothing of spans with its calls."""
    await scene.store.append_call(make_call(scene.lease, "c0", [1], [2]))
    agent = span("run", "aa", at=(0, 9), gen_ai__operation__name="invoke_agent", gen_ai__agent__name="writer")
    chat = span("chat", "bb", "aa", gen_ai__operation__name="chat", gen_ai__response__id=answer_id)
    await scene.export(export(agent, chat))
    assert [call.agent for call in (await scene.finished()).transitions] == ["writer"]
    assert FacetCount(value="writer", count=1) in await RunQueries(scene.store).part_counts(Part.ROLE)


async def test_an_agent_whose_span_comes_in_a_later_export_names_its_calls(scene: Scene) -> None:
    """An agent's span ends last, an HTTP client's first: exporters send in batches of five seconds."""
    await scene.store.append_call(make_call(scene.lease, "c0", [1], [2], span_id="cc" * 8))
    await scene.export(export(span("POST", "cc", "bb", http__request__method="POST")))
    await scene.export(export(span("ChatCompletion", "bb", "aa", openinference__span__kind="LLM")))
    await scene.export(export(span("writer", "aa", at=(0, 9), openinference__span__kind="AGENT")))
    assert [call.agent for call in (await scene.finished()).transitions] == ["writer"]


async def test_a_tool_that_was_never_offered_is_unknown(scene: Scene) -> None:
    asked = [
        {
            "role": "assistant",
            "parts": [{"type": "tool_call", "id": name, "name": name, "arguments": {}} for name in ("sql", "nonsense")],
        }
    ]
    offered = [{"type": "function", "name": "sql"}]
    chat = span("chat", "bb", gen_ai__operation__name="chat", gen_ai__agent__name="boss")
    chat["attributes"] += [
        {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(asked)}},
        {"key": "gen_ai.tool.definitions", "value": {"stringValue": json.dumps(offered)}},
    ]
    tool = span("execute_tool sql", "cc", "", (2, 3), gen_ai__operation__name="execute_tool", gen_ai__tool__name="sql")
    await scene.store.append_call(
        make_call(scene.lease, "c0", [1], [2], tool_call_ids=("sql", "nonsense"), span_id="bb" * 8)
    )
    assert (await scene.export(export(chat, tool))).status_code == 200
    tools = {tool.name: tool for tool in (await scene.finished()).tool_calls}
    assert {name: tool.status for name, tool in tools.items()} == {
        "sql": ToolStatus.OK,
        "nonsense": ToolStatus.UNKNOWN_TOOL,
    }
    assert {(tool.transition_id, tool.agent) for tool in tools.values()} == {("c0", "boss")}


async def test_a_tool_that_two_instrumentations_tell_of_is_one_call(scene: Scene) -> None:
    ours = export(
        span(
            "t",
            "11",
            at=(0, 1),
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name="add",
            gen_ai__tool__call__id="x",
            lightningrl__tool__status="ok",
        ),
        span(
            "t",
            "22",
            at=(2, 3),
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name="add",
            gen_ai__tool__call__id="y",
            lightningrl__tool__status="error",
        ),
        scope="lightningrl_langchain",
    )
    theirs = export(
        span("add", "33", at=(0.1, 0.9), openinference__span__kind="TOOL", tool__name="add"),
        span("add", "44", at=(2.1, 2.9), openinference__span__kind="TOOL", tool__name="add"),
        span("other", "55", at=(4, 5), openinference__span__kind="TOOL", tool__name="other"),
    )
    assert (await scene.export(joined(theirs, ours))).status_code == 200
    found = [(tool.id, tool.name, tool.status) for tool in (await scene.finished()).tool_calls]
    assert found == [("x", "add", ToolStatus.OK), ("y", "add", ToolStatus.ERROR), ("55" * 8, "other", ToolStatus.OK)]


@pytest.mark.parametrize(
    ("name", "attributes", "tool"),
    [
        ("search.acall", {"openinference.span.kind": "TOOL"}, "search"),
        ("search.__call__", {"openinference.span.kind": "TOOL"}, "search"),
        ("search.arun", {"openinference.span.kind": "TOOL"}, "search"),
        ("search._execute_core", {"openinference.span.kind": "TOOL"}, "search"),
        ("search.tool", {"traceloop.span.kind": "tool"}, "search"),
        ("execute_tool server.run", {"gen_ai.operation.name": "execute_tool"}, "server.run"),
        ("x", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "server.run"}, "server.run"),
        (
            "execute_tool (merged tools)",
            {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "(merged tools)"},
            None,
        ),
        ("execute_tool (merged tools)", {"gen_ai.operation.name": "execute_tool"}, None),
        ("[tools]", {"openinference.span.kind": "TOOL"}, None),
    ],
)
async def test_a_name_that_an_instrumentation_invents_is_no_tools(
    scene: Scene, name: str, attributes: dict[str, str], tool: str | None
) -> None:
    told: dict[str, Any] = {key.replace(".", "__"): value for key, value in attributes.items()}
    await scene.export(export(span(name, "aa", gen_ai__tool__call__id="<not specified>", **told)))
    found = (await scene.finished()).tool_calls
    assert [(one.name, one.id) for one in found] == ([] if tool is None else [(tool, "aa" * 8)])


@pytest.mark.parametrize(("success", "status"), [("true", "ok"), ("false", "error"), (None, "unknown")])
async def test_claude_code_tells_its_tools_in_two_spans(scene: Scene, success: str | None, status: str) -> None:
    await scene.store.append_call(make_call(scene.lease, "c0", [1], [2], tool_call_ids=("call_7",)))
    tool = span(
        "claude_code.tool", "bb", "aa", (1, 2), span__type="tool", tool_name="Write", gen_ai__tool__call__id="call_7"
    )
    more: dict[str, Any] = {} if success is None else {"success": success}
    await scene.export(
        export(span("claude_code.tool.execution", "cc", "bb", span__type="tool.execution", **more), tool)
    )
    (found,) = (await scene.finished()).tool_calls
    assert (found.name, found.id, found.status.value, found.transition_id) == ("Write", "call_7", status, "c0")


async def test_two_runs_of_a_tool_at_the_same_time_are_two_calls(scene: Scene) -> None:
    runs = [span("add", one, at=(0, 1), openinference__span__kind="TOOL", tool__name="add") for one in ("11", "22")]
    more = [
        span("add", one, at=(0, 1), gen_ai__operation__name="execute_tool", gen_ai__tool__name="add")
        for one in ("33", "44")
    ]
    assert (await scene.export(joined(export(*runs), export(*more, scope="framework")))).status_code == 200
    assert len((await scene.finished()).tool_calls) == 2


async def test_the_failure_that_one_of_two_tells_of_counts(scene: Scene) -> None:
    """AutoGen's OpenInference spans are OK although the tool failed; its own say so."""
    outer = span("add", "11", at=(0, 3), openinference__span__kind="TOOL", tool__name="add")
    inner = span(
        "execute_tool add",
        "22",
        "11",
        (1, 2),
        gen_ai__operation__name="execute_tool",
        gen_ai__tool__name="add",
        error__type="E",
    )
    assert (await scene.export(export(outer, inner))).status_code == 200
    (tool,) = (await scene.finished()).tool_calls
    assert (tool.status, tool.error_type) == (ToolStatus.ERROR, "E")


@pytest.mark.parametrize(
    ("attributes", "error", "events", "status"),
    [
        ({}, False, [], ToolStatus.OK),
        ({}, True, [], ToolStatus.ERROR),
        ({}, False, ["builtins.ValueError"], ToolStatus.ERROR),
        ({"error.type": "TimeoutError"}, True, [], ToolStatus.TIMEOUT),
        ({"error.type": "invalid_arguments"}, False, [], ToolStatus.INVALID_ARGUMENTS),
        ({"lightningrl.tool.status": "unknown_tool"}, True, [], ToolStatus.UNKNOWN_TOOL),
        ({"lightningrl.tool.status": "nonsense"}, True, [], ToolStatus.UNKNOWN),
        (
            {
                "output.value": json.dumps(
                    {"type": "tool", "data": {"content": "no", "tool_call_id": "c", "status": "error"}}
                )
            },
            False,
            [],
            "error",
        ),
    ],
)
def test_the_status_of_a_tool(attributes: dict[str, Any], error: bool, events: list[str], status: ToolStatus) -> None:
    one = span("running tool: add", "11", error=error, openinference__span__kind="TOOL", **attributes)
    one["events"] = [
        {
            "name": "exception",
            "timeUnixNano": "1",
            "attributes": [{"key": "exception.type", "value": {"stringValue": kind}}],
        }
        for kind in events
    ]
    (record,) = parse_export(json.dumps(export(one)).encode(), JSON, "", LIMIT).tool_calls
    assert (record.tool_call.status, record.tool_call.name) == (status, "add")


@pytest.mark.parametrize(
    ("name", "attributes", "agent"),
    [
        ("invoke_agent writer", {"gen_ai.operation.name": "invoke_agent"}, "writer"),
        ("run", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "writer"}, "writer"),
        (f"invoke_agent {UNNAMED}", {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": UNNAMED}, None),
        ("agent run", {"agent_name": "writer", "model_name": "m"}, "writer"),
        ("writer._execute_core", {"openinference.span.kind": "AGENT"}, "writer"),
        ("run", {"openinference.span.kind": "AGENT", "graph.node.id": "writer"}, "writer"),
        ("writer.agent", {"traceloop.span.kind": "agent", "traceloop.entity.name": "writer"}, "writer"),
        (
            "x",
            {
                "openinference.span.kind": "CHAIN",
                "metadata": '{"langgraph_node": "b", "langgraph_checkpoint_ns": "a:1|b:2"}',
            },
            "a/b",
        ),
        (
            "x",
            {"openinference.span.kind": "CHAIN", "metadata": '{"langgraph_node": "b", "lc_agent_name": "writer"}'},
            "writer",
        ),
        ("LangGraph", {"openinference.span.kind": "CHAIN", "metadata": "no json"}, None),
        ("GET", {"http.request.method": "GET"}, None),
    ],
)
def test_the_agent_of_a_span(name: str, attributes: dict[str, Any], agent: str | None) -> None:
    parsed = parse_export(json.dumps(export(span(name, "11", **attributes))).encode(), JSON, "", LIMIT)
    assert [one.agent for one in parsed.spans] == [agent]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.one_of(
    texts.map(lambda text: {"stringValue": text}),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: {"intValue": str(number)}),
    st.booleans().map(lambda flag: {"boolValue": flag}),
    st.lists(texts.map(lambda text: {"stringValue": text}), max_size=3).map(
        lambda many: {"arrayValue": {"values": many}}
    ),
)


@given(
    st.lists(
        st.tuples(
            texts,
            st.binary(min_size=8, max_size=8),
            st.dictionaries(
                st.sampled_from(["openinference.span.kind", "gen_ai.operation.name", "metadata", "tool.name", "x"])
                | texts,
                values,
            ),
            st.sampled_from(["AGENT", "LLM", "TOOL", "CHAIN", "?"]),
        ),
        max_size=5,
    )
)
def test_json_and_protobuf_say_the_same(drawn: list[tuple[str, bytes, dict[str, Any], str]]) -> None:
    spans = []
    for name, span_id, attributes, kind in drawn:
        one = span(name, "11", openinference__span__kind=kind)
        one["spanId"] = span_id.hex()
        one["attributes"] += [{"key": key, "value": value} for key, value in attributes.items()]
        spans.append(one)
    by_json = parse_export(json.dumps(export(*spans)).encode(), JSON, "", LIMIT)
    by_protobuf = parse_export(by_json.request.SerializeToString(), PROTOBUF, "", LIMIT)
    assert (by_json.tool_calls, by_json.spans, by_json.rejected) == (
        by_protobuf.tool_calls,
        by_protobuf.spans,
        by_protobuf.rejected,
    )
    assert len(json_format.MessageToDict(by_json.request).get("resourceSpans", ())) == 1


# ---------------------------------------------------------------------- what it says to bad input


async def test_spans_without_an_id_are_a_partial_success(scene: Scene) -> None:
    good, bad, zero = span("a", "11"), span("b", "22"), span("c", "00")
    bad["spanId"] = "not hexadecimal"
    answer = await scene.export(export(good, bad, zero))
    sentence = "left out for want of a span id of eight bytes: 2 of the spans"
    assert answer.json() == {"partialSuccess": {"rejectedSpans": "2", "errorMessage": sentence}}
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(name="x")
    answer = await scene.export(request.SerializeToString(), PROTOBUF)
    assert answer.headers["content-type"] == PROTOBUF
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (partial.rejected_spans, partial.error_message) == (1, sentence.replace("2", "1"))


async def test_other_content_types_are_refused(scene: Scene) -> None:
    answer = await scene.export(b"<spans/>", "text/xml")
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "wrong_content_type")
    assert (
        "content-type 'text/xml' is no OTLP; send it as 'application/x-protobuf' or 'application/json'" in answer.text
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b"3",
        b'{"resourceSpans": 3}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"kind": []}]}]}]}',
        b"[" * 100_000,
    ],
)
async def test_json_that_is_no_export(scene: Scene, body: bytes) -> None:
    answer = await scene.export(body)
    assert answer.status_code == 400 and "the body is no OTLP in JSON (" in answer.json()["error"]["message"]


async def test_what_is_unknown_in_json_is_passed_over(scene: Scene) -> None:
    answer = await scene.export({"resourceSpans": [], "somethingNew": {"traceId": 7}})
    assert (answer.status_code, answer.json()) == (200, {})
