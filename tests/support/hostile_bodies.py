"""Bodies that agents may send: sound ones of every route, what becomes of them (hypothesis), and large ones picked by
hand.

sound ─► mutated: values replaced, left out, doubled, wrapped ─► written as JSON ─► broken: cut off, bytes changed ─►
bytes
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import json_format
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["DIALECTS", "SOUND", "Large", "exports", "fresh_bodies", "hostile", "large_bodies", "large_reports", "write"]

DIALECTS: Final = ("chat/completions", "responses", "messages")

# ------------------------------------------------------------------ sound bodies

_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "q": {"type": "string", "enum": ["a", "b"]},
        "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["q"],
}
_FUNCTION: Final = {"name": "search", "description": "Finds.", "parameters": _SCHEMA}
_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "a"}'}}
_ITEM: Final = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "search", "arguments": '{"q": "a"}'}
_USE: Final = {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "a"}}

SOUND: Final[dict[str, list[dict[str, Any]]]] = {
    "chat/completions": [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "it up"}]},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "found"},
                {"role": "assistant", "content": "so"},
                {"role": "user", "content": "and?"},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "search"}},
            "max_tokens": 20,
            "n": 2,
            "stop": ["END"],
            "seed": 7,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
            "parallel_tool_calls": False,
            "user": "me",
        },
    ],
    "responses": [
        {"model": "m", "input": "hi"},
        {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
                _ITEM,
                {"type": "function_call_output", "call_id": "c1", "output": "found"},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "content": [{"type": "output_text", "text": "so"}],
                },
                {"role": "user", "content": "and?"},
            ],
            "tools": [{"type": "function", **_FUNCTION, "strict": True}],
            "tool_choice": "auto",
            "max_output_tokens": 20,
            "stream": True,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "top_logprobs": 2,
        },
    ],
    "messages": [
        {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]},
        {
            "model": "m",
            "max_tokens": 20,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "look"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, _USE]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "x"}]}
                    ],
                },
            ],
            "tools": [{"name": "search", "description": "Finds.", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "stop_sequences": ["END"],
            "stream": True,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ],
    "rewards": [{"rewards": {"format": 1.0, "style": None}}],
    "tool_calls": [
        {
            "tool_calls": [
                {
                    "name": "f",
                    "status": "ok",
                    "arguments": {"q": [1, "a"]},
                    "result": "x",
                    "duration_s": 0.5,
                    "tool_call_id": "t1",
                },
                {"name": "g", "status": "error", "agent": "planner", "error_type": "E"},
            ]
        }
    ],
    "result": [{"outcome": "succeeded", "output": {"answer": [1, "a", None]}, "error": None, "duration_s": 1.5}],
    "logs": [
        {
            "resourceLogs": [
                {
                    "scopeLogs": [
                        {
                            "logRecords": [
                                {
                                    "timeUnixNano": "1",
                                    "traceId": "ab" * 16,
                                    "spanId": "cd" * 8,
                                    "eventName": "gen_ai.evaluation.result",
                                    "body": {"stringValue": "x"},
                                    "attributes": [
                                        {"key": "gen_ai.evaluation.name", "value": {"stringValue": "f"}},
                                        {"key": "gen_ai.evaluation.score.value", "value": {"doubleValue": 0.5}},
                                        {"key": "gen_ai.response.id", "value": {"stringValue": "chatcmpl-x"}},
                                    ],
                                }
                            ]
                        }
                    ]
                }
            ]
        }
    ],
    "traces": [
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "x"}}]},
                    "scopeSpans": [
                        {
                            "scope": {"name": "s"},
                            "spans": [
                                {
                                    "traceId": "ab" * 16,
                                    "spanId": "cd" * 8,
                                    "parentSpanId": "ef" * 8,
                                    "name": "execute_tool f",
                                    "startTimeUnixNano": "1",
                                    "endTimeUnixNano": 2,
                                    "status": {"code": 2},
                                    "events": [{"name": "exception", "attributes": []}],
                                    "attributes": [
                                        {"key": "gen_ai.operation.name", "value": {"stringValue": "execute_tool"}},
                                        {"key": "gen_ai.tool.name", "value": {"stringValue": "f"}},
                                        {
                                            "key": "x",
                                            "value": {
                                                "arrayValue": {"values": [{"intValue": "1"}, {"doubleValue": 0.5}]}
                                            },
                                        },
                                    ],
                                }
                            ],
                        }
                    ],
                }
            ]
        }
    ],
}

# ------------------------------------------------------------------ what becomes of them

_RAW: Final = {
    "@infinite@": "1e999",
    "@digits@": "9" * 5000,
    "@tiny@": "-0.0e-999",
    "@lists@": "[" * 150 + "]" * 150,
    "@objects@": '{"a":' * 70 + "0" + "}" * 70,
    "@abyss@": "[" * 20_000 + "]" * 20_000,
    "@open@": "[" * 20_000,
    "@half@": '"\\ud800"',
    "@zero@": '"\\u0000"',
}
"""What stands for JSON that Python cannot write."""

_texts: Final = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "\ud800",
            "\udc00x",
            "\0",
            "\ufffe",
            "🙂",
            "<|im_end|>",
            "<tool_call>",
            "<think>",
            "{{x}}",
            "{% x %}",
            "resp_x",
        ]
    ),
    st.integers(1, 5000).map(lambda size: "x" * size),
)
_numbers: Final = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -0.0]),
)
junk: Final = st.recursive(
    st.none() | st.booleans() | _numbers | _texts | st.sampled_from(sorted(_RAW)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)


def write(value: Any) -> bytes:
    """JSON as a client writes it that knows no bounds."""
    text = json.dumps(value)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


@st.composite
def _mutated(draw: st.DrawFn, sound: list[dict[str, Any]]) -> Any:
    body = copy.deepcopy(draw(st.sampled_from(sound)))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(body))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        act = draw(st.sampled_from(["replace", "replace", "leave out", "double", "wrap", "add"]))
        if act == "leave out":
            del container[key]
        elif act == "double":
            container[key] = [container[key], copy.deepcopy(container[key])]
        elif act == "wrap":
            container[key] = {draw(_texts): container[key]}
        elif act == "add" and isinstance(container, dict):
            container[
                draw(st.sampled_from([*sorted({key for one in sound for key in one}), "content", "type", "role", "x"]))
            ] = draw(junk)
        else:
            container[key] = draw(junk)
    return body


def _break(body: bytes, at: float, how: str, some: bytes) -> bytes:
    place = int(at * len(body))
    return {
        "cut": body[:place],
        "insert": body[:place] + some + body[place:],
        "change": body[:place] + some + body[place + len(some) :],
    }[how]


def _broken(bodies: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(
        _break, bodies, st.floats(0, 1), st.sampled_from(["cut", "insert", "change"]), st.binary(min_size=1, max_size=4)
    )


def hostile(route: str) -> st.SearchStrategy[bytes]:
    """Bodies near those that a route takes."""
    near = _mutated(SOUND[route]).map(write)
    return st.one_of(near, near, near, _broken(near), junk.map(write), st.binary(max_size=50))


_KEYS: Final = (
    "gen_ai.operation.name",
    "gen_ai.tool.name",
    "gen_ai.tool.call.id",
    "gen_ai.tool.call.arguments",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.agent.name",
    "openinference.span.kind",
    "tool.name",
    "llm.output_messages",
    "output.value",
    "metadata",
    "lightningrl.agent",
)
_words: Final = st.sampled_from(
    ["execute_tool", "chat", "invoke_agent", "TOOL", "LLM", "AGENT", "[]", '[{"role": "assistant"}]', "{", "@"]
)
_clean: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def _any_value(draw: st.DrawFn, levels: int = 3) -> AnyValue:
    kind = draw(
        st.sampled_from(["string", "int", "double", "bool", "bytes", "nothing"] + (["array", "map"] if levels else []))
    )
    value = AnyValue()
    if kind == "string":
        value.string_value = draw(_words | _clean)
    elif kind == "int":
        value.int_value = draw(st.integers(-(2**63), 2**63 - 1))
    elif kind == "double":
        value.double_value = draw(st.floats())
    elif kind == "bool":
        value.bool_value = draw(st.booleans())
    elif kind == "bytes":
        value.bytes_value = draw(st.binary(max_size=8))
    elif kind == "array":
        value.array_value.values.extend(draw(st.lists(_any_value(levels - 1), max_size=3)))
    elif kind == "map":
        for key in draw(st.lists(_clean, max_size=3)):
            value.kvlist_value.values.add(key=key).value.CopyFrom(draw(_any_value(levels - 1)))
    return value


@st.composite
def _export(draw: st.DrawFn) -> bytes:
    request = ExportTraceServiceRequest()
    for scope in draw(st.lists(_clean, min_size=1, max_size=2)):
        spans = request.resource_spans.add().scope_spans.add()
        spans.scope.name = scope
        for _ in range(draw(st.integers(0, 3))):
            span = spans.spans.add(
                span_id=draw(st.binary(max_size=9) | st.sampled_from([b"12345678", b"abcdefgh"])),
                parent_span_id=draw(st.sampled_from([b"", b"12345678", b"abcdefgh", b"x"])),
                name=draw(_clean),
                start_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
                end_time_unix_nano=draw(st.integers(0, 2**64 - 1)),
            )
            for key in draw(st.lists(st.sampled_from(_KEYS) | _clean, max_size=5)):
                span.attributes.add(key=key).value.CopyFrom(draw(_any_value()))
    return bytes(request.SerializeToString())


def exports() -> st.SearchStrategy[tuple[bytes, dict[str, str]]]:
    """OTLP exports with the headers that they come with: protobuf and JSON, plain and zipped, right and wrong."""
    written = st.tuples(_export() | _broken(_export()), st.just("application/x-protobuf")) | st.tuples(
        hostile("traces"), st.sampled_from(["application/json", "application/json", "text/plain"])
    )
    return st.builds(
        lambda export, zips: (
            gzip.compress(export[0]) if zips == "gzip" else export[0],
            {"content_type": export[1], "content_encoding": "gzip" if zips else "identity"},
        ),
        written,
        st.sampled_from(["", "", "gzip", "says gzip"]),
    )


# ------------------------------------------------------------------ large ones, of at most 1 MB


_LISTS: Final = b"[" + b"[]," * 320_000 + b"[]]"


@dataclass(frozen=True, slots=True)
class Large:
    """A large request."""

    path: str
    make: Callable[[], bytes]
    """Its body, made when it is asked for."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def _call(path: str, number: int, **fields: Any) -> Large:
    """A sound call with some fields; no two of different numbers render alike."""
    said = {"role": "user", "content": f"hi {number}"}
    rest = {"input": [said]} if path == "responses" else {"messages": [said], "max_tokens": 4}
    return Large(path, lambda: json.dumps({"model": "m", **rest, **fields}, ensure_ascii=False).encode())


def _with_lists(path: str, number: int, before: str, after: str = "") -> Large:
    return Large(
        path, lambda: _call(path, number).make()[:-1] + b"," + before.encode() + _LISTS + after.encode() + b"}"
    )


def fresh_bodies(number: int) -> list[tuple[str, bytes, dict[str, str]]]:
    """Sound bodies and headers in which an agent names everything as nobody did before: role, stop strings, tools,
    rewards."""

    def name(what: str, length: int = 200) -> str:
        return f"{what} {number} ".ljust(length, "x")

    call = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    function = {
        "name": name("tool", 60).replace(" ", "_"),
        "description": name("what it does", 20_000),
        "parameters": _SCHEMA,
    }
    told = {"name": name("told"), "status": "ok", "agent": name("teller"), "error_type": name("error")}
    return [
        (
            "chat/completions",
            write({**call, "stop": [name(f"end {index}", 1000) for index in range(16)]}),
            {"x_lightningrl_agent": name("role")},
        ),
        (
            "chat/completions",
            write({**call, "tools": [{"type": "function", "function": function}]}),
            {"x_lightningrl_call_id": name("call", 20_000)},
        ),
        ("chat/completions", write(call), {"x_lightningrl_agent": name("too long", 60_000)}),
        ("rewards", write({"rewards": {name(f"reward {index}"): 1.0 for index in range(100)}}), {}),
        ("tool_calls", write({"tool_calls": [{**told, "name": name(f"told {index}")} for index in range(100)]}), {}),
    ]


def large_bodies(number: int) -> dict[str, Large]:
    """Model calls by name. Those of different numbers have no prompt in common, so that none is remembered."""
    word = f"{number} " + "word " * 199_000
    wide = {f"p{index}": {"type": "string", "description": "x" * 20} for index in range(14_600)}
    schema = {"type": "object", "properties": wide}
    deep_unions = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "minLength": 1}] * 24_000}}}
    numbers = {f"k{index}": index for index in range(52_000)}
    functions = [{"name": f"f{index}", "description": "word " * 150} for index in range(1024)]
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        for index in range(9_500)
    ]
    uses = [{"type": "tool_use", "id": f"c{index}", "name": "f", "input": {"a": 1}} for index in range(12_000)]
    results = [{"type": "tool_result", "tool_use_id": f"c{index}", "content": f"{number}"} for index in range(4_000)]
    items = [
        {"type": "function_call", "call_id": f"c{index}", "name": "f", "arguments": '{"a":1}'} for index in range(4_000)
    ]
    user = {"role": "user", "content": f"hi {number}"}
    asked = {"id": "c", "type": "function", "function": {"name": "f"}}
    found: dict[str, Large] = {}
    for path in DIALECTS:
        key = "input" if path == "responses" else "messages"
        found |= {
            f"{path}: one text": _call(path, number, **{key: [{"role": "user", "content": word}]}),
            f"{path}: letters": _call(
                path, number, **{key: [{"role": "user", "content": f"{number}" + "x" * 995_000}]}
            ),
            f"{path}: emoji": _call(path, number, **{key: [{"role": "user", "content": f"{number}" + "🙂" * 248_000}]}),
            f"{path}: 4096 messages": _call(
                path, number, **{key: [{"role": "user", "content": f"{number}" + "word " * 40}] * 4096}
            ),
            f"{path}: parts": _call(
                path, number, **{key: [{"role": "user", "content": ["x"] * 195_000 + [f"{number}"]}]}
            ),
        }
    chat, messages, responses = "chat/completions", "messages", "responses"
    return found | {
        "count_tokens: one text": Large("messages/count_tokens", found["messages: one text"].make),
        "chat: wide schema": _call(
            chat, number, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]
        ),
        "messages: wide schema": _call(messages, number, tools=[{"name": "f", "input_schema": schema}]),
        "responses: wide schema": _call(
            responses, number, tools=[{"type": "function", "name": "f", "parameters": schema}]
        ),
        "chat: unions": _call(
            chat, number, tools=[{"type": "function", "function": {"name": "f", "parameters": deep_unions}}]
        ),
        "chat: 1024 tools": _call(chat, number, tools=[{"type": "function", "function": one} for one in functions]),
        "responses: 1024 tools": _call(responses, number, tools=[{"type": "function", **one} for one in functions]),
        "messages: 1024 tools": _call(
            messages, number, tools=[{**one, "input_schema": {"type": "object"}} for one in functions]
        ),
        "chat: format": _call(chat, number, response_format={"type": "json_schema", "json_schema": {"schema": schema}}),
        "chat: wide arguments": _call(
            chat,
            number,
            messages=[
                user,
                {
                    "role": "assistant",
                    "tool_calls": [{**asked, "function": {"name": "f", "arguments": json.dumps(numbers)}}],
                },
                user,
            ],
        ),
        "chat: lists as arguments": _call(
            chat,
            number,
            messages=[
                user,
                {
                    "role": "assistant",
                    "tool_calls": [{**asked, "function": {"name": "f", "arguments": f'{{"a": {_LISTS.decode()}}}'}}],
                },
                user,
            ],
        ),
        "chat: calls": _call(chat, number, messages=[user, {"role": "assistant", "tool_calls": calls}, user]),
        "messages: uses": _call(messages, number, messages=[user, {"role": "assistant", "content": uses}, user]),
        "messages: results": _call(messages, number, messages=[{"role": "user", "content": results}, user]),
        "messages: wide input": _call(
            messages,
            number,
            messages=[
                user,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": numbers}]},
                user,
            ],
        ),
        "responses: calls": _call(responses, number, input=[user, *items]),
        "responses: metadata": _call(responses, number, metadata=numbers),
        "responses: lists as metadata": _with_lists(responses, number, '"metadata":{"a":', "}"),
        "chat: lists in a field": _with_lists(chat, number, '"audio":'),
        "chat: lists in a part": Large(
            chat,
            lambda: (
                b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x","x":' + _LISTS + b"}]}]}"
            ),
        ),
        "chat: lists as a default": _with_lists(
            chat, number, '"tools":[{"function":{"name":"f","parameters":{"properties":{"a":{"default":', "}}}}}]"
        ),
        "messages: lists as thinking": _with_lists(messages, number, '"thinking":{"a":', "}"),
        "chat: numbers": _call(chat, number, audio=[1.5] * 190_000),
        "chat: abyss": Large(chat, lambda: b'{"model":"m","messages":' + b"[" * 499_000 + b"]" * 499_000 + b"}"),
        "chat: digits": Large(
            chat, lambda: b'{"model":"m","messages":[{"role":"user","content":"hi"}],"seed":' + b"9" * 990_000 + b"}"
        ),
        "chat: cut off": Large(chat, lambda: found["chat/completions: one text"].make()[:-3]),
        "chat: a long role": _call(chat, number, messages=[{"role": "r" * 990_000, "content": "x"}]),
        "chat: a long choice": _call(chat, number, tools=[{"function": {"name": "f"}}], tool_choice={"a": word}),
        "chat: eight choices": _call(
            chat, number, n=8, messages=[{"role": "user", "content": f"{number}" + "y" * 990_000}]
        ),
    }


def _evaluations(count: int) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for index in range(count):
        record = scope.log_records.add(event_name="gen_ai.evaluation.result", span_id=index.to_bytes(8, "big"))
        record.attributes.add(key="gen_ai.evaluation.name").value.string_value = f"e{index}"
        record.attributes.add(key="gen_ai.evaluation.score.value").value.double_value = 0.5
    return request


def large_reports(number: int) -> dict[str, Large]:
    """Reports of an attempt by name. `result` ends the attempt."""
    protobuf, plain = {"content_type": "application/x-protobuf"}, {"content_type": "application/json"}

    def tools(count: int, *, nested: bool = False, scopes: int = 1) -> bytes:
        request = ExportTraceServiceRequest()
        for scope in range(scopes):
            spans = request.resource_spans.add().scope_spans.add()
            spans.scope.name = f"scope{scope}"
            for index in range(count // scopes):
                place = number * 10**6 + scope * 10**5 + index + 1
                span = spans.spans.add(
                    span_id=place.to_bytes(8), name="t", start_time_unix_nano=index, end_time_unix_nano=10**9
                )
                if nested and index:
                    span.parent_span_id = (place - 1).to_bytes(8)
                for key, value in (
                    ("operation.name", "execute_tool"),
                    ("tool.name", "f"),
                    ("tool.call.arguments", f'{{"a": {index}}}'),
                ):
                    span.attributes.add(key=f"gen_ai.{key}").value.string_value = value
        return bytes(request.SerializeToString())

    def array() -> bytes:
        request = ExportTraceServiceRequest()
        attribute = (
            request.resource_spans.add().scope_spans.add().spans.add(span_id=b"12345678").attributes.add(key="a")
        )
        for _ in range(240_000):
            attribute.value.array_value.values.add(bool_value=True)
        return bytes(request.SerializeToString())

    def spans() -> bytes:
        return span_json(b",".join(b'{"spanId":"%016x","name":"t"}' % (index + 1) for index in range(19_900)))

    def attributes() -> bytes:
        some = b",".join(b'{"key":"k%d","value":{"intValue":"1"}}' % index for index in range(22_000))
        return span_json(b'{"spanId":"%016x","attributes":[%b]}' % (number + 1, some))

    one_call: dict[str, Any] = {"name": "f", "status": "ok"}
    many_calls = [{**one_call, "arguments": {"a": index}, "result": "x" * 20} for index in range(9_900)]

    def span_json(inner: bytes) -> bytes:
        return b'{"resourceSpans":[{"scopeSpans":[{"spans":[' + inner + b"]}]}]}"

    def tool_calls(*calls: Any) -> bytes:
        return json.dumps({"tool_calls": calls}).encode()

    unknown = {f"k{index}": 1 for index in range(70_000)}
    return {
        "otlp: tools": Large("traces", lambda: tools(6_400), protobuf),
        "otlp: nested tools": Large("traces", lambda: tools(6_400, nested=True), protobuf),
        "otlp: tools of two scopes": Large("traces", lambda: tools(6_400, scopes=2), protobuf),
        "otlp: zipped": Large("traces", lambda: gzip.compress(tools(6_400)), {**protobuf, "content_encoding": "gzip"}),
        "otlp: an array": Large("traces", lambda: array(), protobuf),
        "otlp: spans in JSON": Large("traces", lambda: spans(), plain),
        "otlp: attributes in JSON": Large("traces", lambda: attributes(), plain),
        "otlp: log records": Large("logs", lambda: bytes(_evaluations(7_000).SerializeToString()), protobuf),
        "otlp: log records in JSON": Large(
            "logs", lambda: json.dumps(json_format.MessageToDict(_evaluations(3_000))).encode(), plain
        ),
        "otlp: lists in JSON": Large("traces", lambda: b'{"resourceSpans":' + _LISTS + b"}", plain),
        "tool calls: many": Large("tool_calls", lambda: tool_calls(*many_calls)),
        "tool calls: too many": Large("tool_calls", lambda: tool_calls(*[one_call] * 30_000)),
        "tool calls: wrong": Large(
            "tool_calls", lambda: tool_calls(*[{"name": "f", "status": "okk", "q": 1}] * 24_000)
        ),
        "tool calls: unknown fields": Large("tool_calls", lambda: tool_calls(unknown)),
        "tool calls: lists": Large("tool_calls", lambda: b'{"tool_calls":' + _LISTS + b"}"),
        "tool calls: lists as a result": Large(
            "tool_calls", lambda: b'{"tool_calls":[{"name":"f","status":"ok","result":' + _LISTS + b"}]}"
        ),
        "rewards: lists": Large("rewards", lambda: b'{"rewards":{},"x":' + _LISTS[:240_000] + b"[]]}"),
        "rewards: wrong": Large(
            "rewards", lambda: json.dumps({"rewards": {f"k{index}": "x" for index in range(900)}}).encode()
        ),
        "result: lists": Large("result", lambda: b'{"outcome":"succeeded","output":' + _LISTS + b"}"),
        "result: unknown fields": Large("result", lambda: json.dumps(unknown).encode()),
        "result: halves of characters": Large(
            "result", lambda: b'{"outcome":"succeeded","output":[' + b'"\\ud800",' * 99_000 + b"1]}"
        ),
        "result: numbers": Large("result", lambda: json.dumps({"outcome": "succeeded", "output": unknown}).encode()),
        "result: one text": Large(
            "result", lambda: json.dumps({"outcome": "agent_error", "error": "x" * 990_000}).encode()
        ),
    }
