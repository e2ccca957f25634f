"""Planted traces of every source, each with the grade that its calls must get, and the defects that real
instrumentations have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RL, SFT, JUDGE, UNUSABLE = "rl-safe", "sft-safe", "judge-only", "unusable"
NO_IDS, NO_VERSION = "no token ids", "no version of our policy"
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
SECRETS = (
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"[:36],
    "xoxb-123456789012-1234567890123-abcdefABCDEF123456789012",
    "sk-proj-" + "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv",
    "https://ada:hunter2pass@db.example.org/x",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "sk_" + "live_" + "4eC39HqLyjWDarjtT1zdp7dc",
)
PERSONAL = ("ada.lovelace@example.org", "+44 20 7946 0018", "4111 1111 1111 1111", "GB82 WEST 1234 5698 7654 32")


@dataclass(kw_only=True)
class Planted:
    """One trace: what its file has, and what its calls must come to."""

    form: str
    documents: list[Any]
    """Documents of its format; of OTLP, spans and log records."""
    expected: dict[str, tuple[str, set[str]]]
    """Grade and reasons among others, by call."""
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tokens, log-probabilities, temperature and version that an `rl-safe` call must have, by call."""
    secrets: tuple[str, ...] = ()
    logs: list[Any] = field(default_factory=list)


@dataclass(kw_only=True)
class Talk:
    """A conversation with one tool: two calls."""

    number: int
    system: dict[str, Any]
    user: dict[str, Any]
    asks: dict[str, Any]
    result: dict[str, Any]
    answer: dict[str, Any]

    @property
    def calls(self) -> list[tuple[list[dict[str, Any]], dict[str, Any], str]]:
        first = [self.system, self.user]
        return [(first, self.asks, "tool_calls"), ([*first, self.asks, self.result], self.answer, "stop")]


def talk(number: int, said: str = "") -> Talk:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "lookup", "arguments": f'{{"q":  "w{number}"}}'},
    }
    return Talk(
        number=number,
        system={"role": "system", "content": "Answer in a word."},
        user={"role": "user", "content": f"What is word {number}? {said}".strip()},
        asks={"role": "assistant", "content": None, "tool_calls": [call]},
        result={"role": "tool", "tool_call_id": f"call_{number}", "content": f"meaning {number}"},
        answer={"role": "assistant", "content": f"It is {number}."},
    )


class Ids:
    """Ids of a trace and of its spans."""

    def __init__(self, number: int) -> None:
        self.trace = f"{number + 1:032x}"
        self._number = number

    def span(self, place: int) -> str:
        return f"{(self._number + 1) * 64 + place:016x}"


def otlp_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp_value(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": otlp_value(item)} for key, item in value.items()]}}
    return {"stringValue": str(value)}


def attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": otlp_value(value)} for key, value in values.items() if value is not None]


def span(ids: Ids, place: int, values: dict[str, Any], *, parent: int | None = None, **more: Any) -> dict[str, Any]:
    begin = 1_790_000_000 + place * 2
    return {
        "traceId": ids.trace,
        "spanId": ids.span(place),
        **({} if parent is None else {"parentSpanId": ids.span(parent)}),
        "name": more.pop("name", "chat"),
        "startTimeUnixNano": str(begin * 10**9),
        "endTimeUnixNano": str((begin + 1) * 10**9),
        "attributes": attributes(values),
        **more,
    }


def log(ids: Ids, place: int, event: str, body: Any, values: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "traceId": ids.trace,
        "spanId": ids.span(place),
        "timeUnixNano": "1790000000000000000",
        "eventName": event,
        "attributes": attributes(values or {}),
        "body": otlp_value(body),
    }


# ---------------------------------------------------------------------- OpenInference


def raw_tokens(rng: random.Random) -> dict[str, Any]:
    prompt = [rng.randrange(50_000) for _ in range(rng.randrange(5, 40))]
    completion = [rng.randrange(50_000) for _ in range(rng.randrange(1, 30))]
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "logprobs": [-rng.random() * 4 for _ in completion],
        "temperature": rng.choice([0.7, 1.0, 1.3]),
        "version": rng.randrange(0, 900),
    }


def openinference(
    messages: Sequence[dict[str, Any]],
    answer: dict[str, Any],
    finish: str | None,
    *,
    tools: bool = True,
    temperature: float | None = 0.7,
    tokens: dict[str, Any] | None = None,
    change: Callable[[dict[str, Any]], object] = lambda body: None,
    with_bodies: bool = True,
) -> dict[str, Any]:
    """Attributes as openinference-instrumentation-openai writes them."""
    settings = {"model": "m", **({} if temperature is None else {"temperature": temperature})}
    values: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "llm.model_name": "m",
        "llm.invocation_parameters": json.dumps(settings),
    }
    for side, said in (("input", messages), ("output", [answer])):
        for number, message in enumerate(said):
            stem = f"llm.{side}_messages.{number}.message"
            values[f"{stem}.role"] = message["role"]
            values[f"{stem}.content"] = message.get("content")
            values[f"{stem}.tool_call_id"] = message.get("tool_call_id")
            for place, call in enumerate(message.get("tool_calls") or ()):
                values[f"{stem}.tool_calls.{place}.tool_call.id"] = call["id"]
                values[f"{stem}.tool_calls.{place}.tool_call.function.name"] = call["function"]["name"]
                values[f"{stem}.tool_calls.{place}.tool_call.function.arguments"] = call["function"]["arguments"]
    if tools:
        values["llm.tools.0.tool.json_schema"] = json.dumps(TOOL)
    if not with_bodies:
        return values
    values["input.value"] = json.dumps({"messages": list(messages), **settings, **({"tools": [TOOL]} if tools else {})})
    choice: dict[str, Any] = {"index": 0, "message": answer, "finish_reason": finish}
    body: dict[str, Any] = {"id": "chatcmpl-1", "model": "m", "choices": [choice]}
    if tokens is not None:
        body |= {"prompt_token_ids": tokens["prompt_ids"], "system_fingerprint": f"policy@{tokens['version']}"}
        choice["token_ids"] = tokens["completion_ids"]
        choice["logprobs"] = {"content": [{"token": "x", "logprob": value} for value in tokens["logprobs"]]}
        body["usage"] = {"prompt_tokens": len(tokens["prompt_ids"])}
    change(body)
    values["output.value"] = json.dumps(body)
    return values


def traced(
    number: int, build: Callable[[Ids, int, Any], dict[str, Any]], expected: Sequence[tuple[str, set[str]]]
) -> Planted:
    """A trace of an agent's span around two calls."""
    ids, said = Ids(number), talk(number)
    spans = [span(ids, 0, {"openinference.span.kind": "AGENT", "agent.name": "finder"}, name="agent")]
    spans += [build(ids, place, call) for place, call in enumerate(said.calls, 1)]
    return Planted(
        form="otlp",
        documents=spans,
        expected={ids.span(place): grade for place, grade in enumerate(expected, 1)},
    )


def oi_plain(number: int, rng: random.Random) -> Planted:
    return traced(
        number,
        lambda ids, place, call: span(ids, place, openinference(*call), parent=0),
        [(SFT, {NO_IDS, NO_VERSION})] * 2,
    )


def oi_rl(number: int, rng: random.Random) -> Planted:
    tokens = [raw_tokens(rng), raw_tokens(rng)]
    planted = traced(
        number,
        lambda ids, place, call: span(
            ids,
            place,
            openinference(*call, tokens=tokens[place - 1], temperature=tokens[place - 1]["temperature"]),
            parent=0,
        ),
        [(RL, set())] * 2,
    )
    planted.tokens = dict(zip(planted.expected, tokens, strict=True))
    return planted


def oi_rl_cut(number: int, rng: random.Random) -> Planted:
    """Cut off by its length: RL learns from it, tuning must not."""
    tokens = raw_tokens(rng)
    ids, said = Ids(number), talk(number)
    values = openinference(said.calls[1][0], said.answer, "length", tokens=tokens, temperature=tokens["temperature"])
    call_id = ids.span(1)
    reasons = {"the answer was cut off"}
    return Planted(
        form="otlp", documents=[span(ids, 1, values)], expected={call_id: (RL, reasons)}, tokens={call_id: tokens}
    )


def one_call(number: int, values: dict[str, Any], grade: str, reasons: set[str], **more: Any) -> Planted:
    ids = Ids(number)
    return Planted(form="otlp", documents=[span(ids, 1, values, **more)], expected={ids.span(1): (grade, reasons)})


def changed(
    change: Callable[[dict[str, Any]], object], reasons: set[str], **more: Any
) -> Callable[[int, random.Random], Planted]:
    """A call with tokens that lacks one thing."""

    def make(number: int, rng: random.Random) -> Planted:
        tokens = raw_tokens(rng)
        messages, answer, finish = talk(number).calls[1]
        settings = {"temperature": tokens["temperature"], **more}
        return one_call(
            number, openinference(messages, answer, finish, tokens=tokens, change=change, **settings), SFT, reasons
        )

    return make


def _drop_fingerprint(body: dict[str, Any]) -> None:
    body["system_fingerprint"] = "fp_44709d6fcb"


def _drop_logprob(body: dict[str, Any]) -> None:
    body["choices"][0]["logprobs"]["content"].append({"token": "x", "logprob": -1.0})


def _stream(body: dict[str, Any]) -> None:
    body["prompt_token_ids"] = body["prompt_token_ids"] * 2
    body["choices"][0].pop("logprobs")
    body.pop("usage")


def _double(body: dict[str, Any]) -> None:
    body["prompt_token_ids"] = body["prompt_token_ids"] * 2
    body.pop("usage")


def oi_responses(number: int, rng: random.Random) -> Planted:
    """A call of Responses: no finish reason, no temperature."""
    said = talk(number)
    values = openinference(said.calls[1][0], said.answer, None, temperature=None, with_bodies=False)
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": said.answer["content"]}],
    }
    values["output.value"] = json.dumps({"id": "resp_1", "model": "m", "output": [item]})
    return one_call(number, values, JUDGE, {"no finish reason"})


def oi_no_schemas(number: int, rng: random.Random) -> Planted:
    return one_call(number, openinference(*talk(number).calls[1], tools=False), JUDGE, {"no tool schemas"})


def oi_cut(number: int, rng: random.Random) -> Planted:
    messages, answer, _ = talk(number).calls[1]
    return one_call(number, openinference(messages, answer, "length"), JUDGE, {"the answer was cut off"})


def oi_failed(number: int, rng: random.Random) -> Planted:
    messages, answer, finish = talk(number).calls[0]
    values = openinference(messages, answer, finish, with_bodies=False)
    values = {key: value for key, value in values.items() if not key.startswith("llm.output")}
    status = {"code": 2, "message": "RateLimitError"}
    return one_call(number, values, UNUSABLE, {"the call failed", "no answer"}, status=status)


def oi_unmatched(number: int, rng: random.Random) -> Planted:
    messages, answer, finish = talk(number).calls[1]
    broken = [*messages[:-1], {**messages[-1], "tool_call_id": "call_of_another"}]
    return one_call(number, openinference(broken, answer, finish), JUDGE, {"tool results match no call"})


def oi_secret(number: int, rng: random.Random) -> Planted:
    secret = SECRETS[number % len(SECRETS)]
    said = talk(number, f"the key is {secret} ok")
    tokens = raw_tokens(rng)
    values = openinference(*said.calls[0], tokens=tokens, temperature=1.0)
    planted = one_call(number, values, JUDGE, {"secret masked"})
    planted.secrets = (secret,)
    return planted


def oi_personal(number: int, rng: random.Random) -> Planted:
    private = PERSONAL[number % len(PERSONAL)]
    tokens = raw_tokens(rng)
    values = openinference(*talk(number, f"reach me at {private} please").calls[0], tokens=tokens, temperature=1.0)
    planted = one_call(number, values, SFT, {"personal data masked"})
    planted.secrets = (private,)
    return planted


def oi_twice(number: int, rng: random.Random) -> Planted:
    """Exported twice, by a retry."""
    planted = oi_plain(number, rng)
    planted.documents = [*planted.documents, *planted.documents]
    return planted


def oi_circle(number: int, rng: random.Random) -> Planted:
    """Parents that form a circle, and a clock that is an hour late."""
    planted = oi_plain(number, rng)
    ids = Ids(number)
    planted.documents[0]["parentSpanId"] = ids.span(1)
    late = planted.documents[1]
    for key in ("startTimeUnixNano", "endTimeUnixNano"):
        late[key] = str(int(late[key]) + 3600 * 10**9)
    return planted


def oi_apart(number: int, rng: random.Random) -> Planted:
    """An SDK without an agent around it: each call is a trace of its own."""
    planted = traced(number, lambda ids, place, call: span(ids, place, openinference(*call)), [(SFT, {NO_IDS})] * 2)
    _, first, second = planted.documents
    second["traceId"] = f"f{number + 1:031x}"
    planted.documents = [first, second]
    return planted


# ---------------------------------------------------------------------- Traceloop, GenAI


def traceloop(messages: Sequence[dict[str, Any]], answer: dict[str, Any], finish: str | None) -> dict[str, Any]:
    """Attributes as opentelemetry-instrumentation-openai writes them: arguments are parsed and written anew."""
    values: dict[str, Any] = {
        "gen_ai.system": "openai",
        "llm.request.type": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "llm.request.functions.0.name": "lookup",
        "llm.request.functions.0.description": "Look a word up.",
        "llm.request.functions.0.parameters": json.dumps(TOOL["function"]["parameters"]),  # type: ignore[index]
        "gen_ai.completion.0.finish_reason": finish,
    }
    for stem, said in (("gen_ai.prompt", messages), ("gen_ai.completion", [answer])):
        for number, message in enumerate(said):
            values[f"{stem}.{number}.role"] = message["role"]
            values[f"{stem}.{number}.content"] = message.get("content")
            values[f"{stem}.{number}.tool_call_id"] = message.get("tool_call_id")
            for place, call in enumerate(message.get("tool_calls") or ()):
                arguments = json.dumps(json.loads(call["function"]["arguments"]))
                values[f"{stem}.{number}.tool_calls.{place}.id"] = call["id"]
                values[f"{stem}.{number}.tool_calls.{place}.name"] = call["function"]["name"]
                values[f"{stem}.{number}.tool_calls.{place}.arguments"] = arguments
    return values


def traceloop_plain(number: int, rng: random.Random) -> Planted:
    return traced(number, lambda ids, place, call: span(ids, place, traceloop(*call), parent=0), [(SFT, {NO_IDS})] * 2)


def mixed(number: int, rng: random.Random) -> Planted:
    """Two instrumentations tell of each call, one within the other."""
    planted = traced(
        number, lambda ids, place, call: span(ids, place, openinference(*call), parent=0), [(SFT, {NO_IDS})] * 2
    )
    ids, said = Ids(number), talk(number)
    planted.documents += [
        span(ids, place + 10, traceloop(*call), parent=place, name="openai.chat")
        for place, call in enumerate(said.calls, 1)
    ]
    planted.expected = {ids.span(place + 10): (SFT, {NO_IDS}) for place in (1, 2)}
    for place in (1, 2):
        inner, outer = planted.documents[place + 2], planted.documents[place]
        inner["startTimeUnixNano"], inner["endTimeUnixNano"] = outer["startTimeUnixNano"], outer["endTimeUnixNano"]
    return planted


def parts_of(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}
        return {"role": "tool", "parts": [part]}
    parts = [{"type": "text", "content": message["content"]}] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            {
                "type": "tool_call",
                "id": call["id"],
                "name": function["name"],
                "arguments": json.loads(function["arguments"]),
            }
        )
    return {"role": message["role"], "parts": parts}


def genai(
    messages: Sequence[dict[str, Any]], answer: dict[str, Any], finish: str | None, *, tools: bool = False
) -> dict[str, Any]:
    """Attributes of the GenAI conventions' latest form."""
    said = {**parts_of(answer), **({} if finish is None else {"finish_reason": finish.replace("calls", "call")})}
    values: dict[str, Any] = {
        **genai_request(finish),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": messages[0]["content"]}]),
        "gen_ai.input.messages": json.dumps([parts_of(message) for message in messages[1:]]),
        "gen_ai.output.messages": json.dumps([said]),
    }
    if tools:
        values["gen_ai.tool.definitions"] = json.dumps([{"type": "function", **TOOL["function"]}])  # type: ignore[dict-item]
    return values


def genai_request(finish: str | None) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.response.finish_reasons": None if finish is None else [finish],
    }


def genai_whole(number: int, rng: random.Random) -> Planted:
    expected = [(SFT, {"arguments re-parsed"})] * 2
    return traced(number, lambda ids, place, call: span(ids, place, genai(*call, tools=True), parent=0), expected)


def genai_latest(number: int, rng: random.Random) -> Planted:
    """openai-v2's experimental form: no schemas."""
    return traced(
        number, lambda ids, place, call: span(ids, place, genai(*call), parent=0), [(JUDGE, {"no tool schemas"})] * 2
    )


def genai_streamed(number: int, rng: random.Random) -> Planted:
    messages, answer, _ = talk(number).calls[1]
    return one_call(number, genai(messages, answer, None, tools=True), JUDGE, {"no finish reason"})


def logs_of(
    ids: Ids, place: int, messages: Sequence[dict[str, Any]], answer: dict[str, Any], finish: str
) -> list[dict[str, Any]]:
    """openai-v2's default form: a log record a message."""
    records = []
    for message in messages:
        body = {key: value for key, value in message.items() if key in ("content", "tool_calls") and value is not None}
        body |= {"id": message["tool_call_id"]} if message["role"] == "tool" else {}
        records.append(log(ids, place, f"gen_ai.{message['role']}.message", body))
    said = {key: value for key, value in answer.items() if value is not None}
    return [*records, log(ids, place, "gen_ai.choice", {"index": 0, "finish_reason": finish, "message": said})]


def genai_logs(number: int, rng: random.Random) -> Planted:
    """Messages in log records only; no tools, so nothing lacks."""
    ids = Ids(number)
    messages = [{"role": "user", "content": f"Say {number}."}]
    answer = {"role": "assistant", "content": f"{number}"}
    planted = one_call(number, genai_request("stop"), SFT, {NO_IDS})
    planted.logs = logs_of(ids, 1, messages, answer, "stop")
    return planted


def genai_logs_with_tools(number: int, rng: random.Random) -> Planted:
    planted = one_call(number, genai_request("stop"), JUDGE, {"no tool schemas"})
    planted.logs = logs_of(Ids(number), 1, *talk(number).calls[1])
    return planted


def genai_logs_lost(number: int, rng: random.Random) -> Planted:
    return one_call(number, genai_request("stop"), UNUSABLE, {"no messages", "no answer"})


def genai_event(number: int, rng: random.Random) -> Planted:
    """All of it in an event of the span."""
    details = genai(*talk(number).calls[1], tools=True)
    moved = {
        key: value for key, value in details.items() if "messages" in key or "instructions" in key or "tool" in key
    }
    event = {"name": "gen_ai.client.inference.operation.details", "attributes": attributes(moved)}
    return one_call(number, genai_request("stop"), SFT, {NO_IDS}, events=[event])


# ---------------------------------------------------------------------- other exports


def phoenix(number: int, rng: random.Random) -> Planted:
    ids, tokens = Ids(number), raw_tokens(rng)
    messages, answer, finish = talk(number).calls[1]
    values = openinference(messages, answer, finish, tokens=tokens, temperature=tokens["temperature"])
    row: dict[str, Any] = {
        "name": "ChatCompletion",
        "context": {"trace_id": ids.trace, "span_id": ids.span(1)},
        "span_kind": "LLM",
        "parent_id": None,
        "start_time": "2026-09-21T10:00:00+00:00",
        "end_time": "2026-09-21T10:00:01+00:00",
        "status_code": "OK",
        "attributes": {key: value for key, value in values.items() if value is not None},
        "events": [],
    }
    call_id = ids.span(1)
    return Planted(form="phoenix", documents=[row], expected={call_id: (RL, set())}, tokens={call_id: tokens})


def langfuse(number: int, rng: random.Random) -> Planted:
    said = talk(number)
    kind = number % 3
    messages, answer, finish = said.calls[1]
    row: dict[str, Any] = {
        "id": f"obs-{number}",
        "traceId": f"lf-{number}",
        "type": "GENERATION",
        "name": "llm",
        "startTime": "2026-09-21T10:00:00.000Z",
        "endTime": "2026-09-21T10:00:02.000Z",
        "model": "m",
        "modelParameters": {"temperature": 0.7},
        "input": {"messages": messages, "tools": [TOOL]},
        "output": answer,
        "metadata": {"finish_reason": finish} if kind == 0 else {},
        "level": "ERROR" if kind == 2 else "DEFAULT",
    }
    grade = [(SFT, {NO_IDS}), (JUDGE, {"no finish reason"}), (UNUSABLE, {"the call failed"})][kind]
    return Planted(form="langfuse", documents=[row], expected={f"obs-{number}": grade})


def constructor(message: dict[str, Any]) -> dict[str, Any]:
    kinds = {"system": "SystemMessage", "user": "HumanMessage", "assistant": "AIMessage", "tool": "ToolMessage"}
    kwargs: dict[str, Any] = {"content": message.get("content") or "", "type": message["role"]}
    if message["role"] == "tool":
        kwargs["tool_call_id"] = message["tool_call_id"]
    calls = message.get("tool_calls") or ()
    if calls:
        kwargs["tool_calls"] = [
            {
                "name": call["function"]["name"],
                "args": json.loads(call["function"]["arguments"]),
                "id": call["id"],
                "type": "tool_call",
            }
            for call in calls
        ]
    return {
        "lc": 1,
        "type": "constructor",
        "id": ["langchain", "schema", "messages", kinds[message["role"]]],
        "kwargs": kwargs,
    }


def langsmith(number: int, rng: random.Random) -> Planted:
    runs = [
        {
            "id": f"ls-{number}",
            "trace_id": f"ls-{number}",
            "name": "agent",
            "run_type": "chain",
            "inputs": {},
            "outputs": {},
        }
    ]
    expected: dict[str, tuple[str, set[str]]] = {}
    for place, (messages, answer, finish) in enumerate(talk(number).calls):
        said = constructor(answer)
        said["kwargs"]["response_metadata"] = {"finish_reason": finish, "model_name": "m"}
        run = {
            "id": f"ls-{number}-{place}",
            "trace_id": f"ls-{number}",
            "parent_run_id": f"ls-{number}",
            "name": "ChatOpenAI",
            "run_type": "llm",
            "start_time": f"2026-09-21T10:00:0{place}",
            "end_time": f"2026-09-21T10:00:0{place + 1}",
            "inputs": {"messages": [[constructor(message) for message in messages]]},
            "outputs": {"generations": [[{"text": "", "message": said, "generation_info": {"finish_reason": finish}}]]},
            "extra": {"invocation_params": {"model": "m", "temperature": 0.5, "tools": [TOOL]}},
        }
        runs.append(run)
        expected[f"ls-{number}-{place}"] = (SFT, {NO_IDS})
    return Planted(form="langsmith", documents=runs, expected=expected)


def atif(number: int, rng: random.Random) -> Planted:
    """A trace of another harness: it has tokens, and no version of a policy of ours."""
    said, tokens = talk(number), raw_tokens(rng)
    call = said.asks["tool_calls"][0]
    asks = {
        "source": "agent",
        "message": "",
        "tool_calls": [{"tool_call_id": call["id"], "function_name": "lookup", "arguments": {"q": f"w{number}"}}],
        "observation": {"results": [{"source_call_id": call["id"], "content": said.result["content"]}]},
        "extra": {"finish_reason": "tool_calls"},
    }
    metrics = {
        "prompt_token_ids": tokens["prompt_ids"],
        "completion_token_ids": tokens["completion_ids"],
        "logprobs": tokens["logprobs"],
    }
    ends = {"source": "agent", "message": said.answer["content"], "metrics": metrics}
    steps = [
        {"source": "system", "message": "Answer."},
        {"source": "user", "message": said.user["content"]},
        asks,
        ends,
    ]
    agent = {"name": "other", "version": "1", "model_name": "m", "tool_definitions": [TOOL]}
    document = {
        "schema_version": "ATIF-v1.6",
        "session_id": f"atif-{number}",
        "agent": agent,
        "steps": [{"step_id": place, **step} for place, step in enumerate(steps, 1)],
    }
    expected = {
        f"atif-{number}/3": (SFT, {NO_IDS, "arguments re-parsed"}),
        f"atif-{number}/4": (JUDGE, {"no finish reason"}),
    }
    return Planted(form="atif", documents=[document], expected=expected)


def openenv(number: int, rng: random.Random) -> Planted:
    said, turns = talk(number), []
    expected: dict[str, tuple[str, set[str]]] = {}
    for place, (messages, answer, finish) in enumerate(said.calls):
        tokens = raw_tokens(rng)
        turns.append(
            {
                "node_id": f"oe-{number}-{place}",
                "prompt_token_ids": tokens["prompt_ids"],
                "completion_token_ids": tokens["completion_ids"],
                "per_token_logps": tokens["logprobs"],
                "request": {"messages": messages, "tools": [TOOL], "temperature": 1.0},
                "response": {"choices": [{"message": answer, "finish_reason": finish}]},
                "metadata": {"model": "m", "rollout_id": f"oe-{number}", "reward": 0.5},
            }
        )
        expected[f"oe-{number}-{place}"] = (SFT, {NO_VERSION})
    return Planted(form="openenv", documents=[{"schema_version": 1, "turns": turns}], expected=expected)


def openenv_of_ours(number: int, rng: random.Random) -> Planted:
    planted = openenv(number, rng)
    for place, turn in enumerate(planted.documents[0]["turns"]):
        messages = turn["request"]["messages"]
        turn["request"]["messages"] = messages if place == 0 else messages[3:]  # what a turn adds
        turn["request"].pop("tools")
        call = {
            "id": turn["node_id"],
            "policy": "policy",
            "policy_version": 7,
            "finish_reason": "stop",
            "sampling": {"temperature": 0.9, "max_tokens": 64},
        }
        turn["metadata"]["lightningrl"] = {"call": call}
        planted.expected[turn["node_id"]] = (RL, {"no tool schemas"})
        planted.tokens[turn["node_id"]] = {
            "prompt_ids": turn["prompt_token_ids"],
            "completion_ids": turn["completion_token_ids"],
            "logprobs": turn["per_token_logps"],
            "temperature": 0.9,
            "version": 7,
        }
    return planted


def chat(number: int, rng: random.Random) -> Planted:
    said = talk(number)
    row = {"id": f"row-{number}", "messages": [*said.calls[1][0], said.answer], "tools": [TOOL]}
    return Planted(
        form="messages", documents=[row], expected={f"row-{number}/{place}": (SFT, {NO_IDS}) for place in range(2)}
    )


def chat_broken(number: int, rng: random.Random) -> Planted:
    said = talk(number)
    bad = json.loads(json.dumps([*said.calls[1][0], said.answer]))
    bad[2]["tool_calls"][0]["function"]["arguments"] = '{"q": '
    row = {"id": f"row-{number}", "messages": bad, "tools": [TOOL]}
    reasons = {"tool arguments are no JSON"}
    return Planted(
        form="messages", documents=[row], expected={f"row-{number}/{place}": (JUDGE, reasons) for place in range(2)}
    )


def claude_code(number: int, rng: random.Random) -> Planted:
    said, session = talk(number), f"cc-{number}"
    use = {"type": "tool_use", "id": f"call_{number}", "name": "Read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": "text"}

    def line(kind: str, place: int, content: Any, **message: Any) -> dict[str, Any]:
        return {
            "type": kind,
            "sessionId": session,
            "uuid": f"{session}-{place}",
            "parentUuid": None if place == 0 else f"{session}-{place - 1}",
            "timestamp": f"2026-09-21T10:00:0{place}.000Z",
            "message": {"role": kind, "content": content, **message},
        }

    lines = [
        line("user", 0, said.user["content"]),
        line("assistant", 1, [{"type": "text", "text": "I read."}], id=f"msg_a{number}", model="m", stop_reason=None),
        line("assistant", 2, [use], id=f"msg_a{number}", model="m", stop_reason="tool_use"),
        line("user", 3, [result]),
        line(
            "assistant", 4, [{"type": "text", "text": "Done."}], id=f"msg_b{number}", model="m", stop_reason="end_turn"
        ),
    ]
    reasons = {"no tool schemas", "no system prompt recorded"}
    return Planted(
        form="claude-code", documents=lines, expected={f"msg_{name}{number}": (JUDGE, reasons) for name in ("a", "b")}
    )


def codex(number: int, rng: random.Random) -> Planted:
    """A session; each is a file of its own."""
    said = talk(number)

    def line(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"timestamp": "2026-09-21T10:00:00.000Z", "type": kind, "payload": payload}

    call = {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": f"call_{number}"}
    lines = [
        line("session_meta", {"id": f"cx-{number}", "instructions": "Be brief."}),
        line("turn_context", {"model": "m"}),
        line(
            "response_item",
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": said.user["content"]}]},
        ),
        line("event_msg", {"type": "user_message", "message": said.user["content"]}),
        line("response_item", {"type": "reasoning", "summary": [], "encrypted_content": "x"}),
        line("response_item", call),
        line("response_item", {"type": "function_call_output", "call_id": f"call_{number}", "output": "a.txt"}),
        line(
            "response_item",
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        ),
    ]
    reasons = {"no tool schemas", "no finish reason"}
    return Planted(
        form="codex", documents=lines, expected={f"cx-{number}/{place}": (JUDGE, reasons) for place in range(2)}
    )


MAKERS: tuple[Callable[[int, random.Random], Planted], ...] = (
    oi_plain,
    oi_rl,
    oi_rl_cut,
    changed(_drop_fingerprint, {NO_VERSION}),
    changed(_drop_logprob, {"no log-probability for each token"}),
    changed(_stream, {"no log-probability for each token", "prompt ids doubled by streaming"}),
    changed(_double, {"prompt ids doubled by streaming"}),
    changed(lambda body: None, {"no temperature"}, temperature=None),
    oi_responses,
    oi_no_schemas,
    oi_cut,
    oi_failed,
    oi_unmatched,
    oi_secret,
    oi_personal,
    oi_twice,
    oi_circle,
    oi_apart,
    traceloop_plain,
    mixed,
    genai_whole,
    genai_latest,
    genai_streamed,
    genai_logs,
    genai_logs_with_tools,
    genai_logs_lost,
    genai_event,
    phoenix,
    langfuse,
    langsmith,
    atif,
    openenv,
    openenv_of_ours,
    chat,
    chat_broken,
    claude_code,
    codex,
)


def plant(count: int, seed: int) -> Iterator[Planted]:
    rng = random.Random(seed)
    for number in range(count):
        yield MAKERS[number % len(MAKERS)](number, rng)


def otlp_export(spans: Sequence[Any], logs: Sequence[Any]) -> dict[str, Any]:
    scope = {"scope": {"name": "planted"}}
    export: dict[str, Any] = {}
    if spans:
        export["resourceSpans"] = [{"resource": {}, "scopeSpans": [{**scope, "spans": list(spans)}]}]
    if logs:
        export["resourceLogs"] = [{"resource": {}, "scopeLogs": [{**scope, "logRecords": list(logs)}]}]
    return export


def write_sources(folder: Path, planted: Sequence[Planted], rng: random.Random) -> None:
    """Write a file for each format; spans are mixed, as a collector's are, and log records lie in a file of their own."""
    by_form: dict[str, list[Any]] = {}
    logs: list[Any] = []
    for trace in planted:
        logs += trace.logs
        if trace.form == "codex":
            name = trace.documents[0]["payload"]["id"]
            write_lines(folder / f"rollout-{name}.jsonl", trace.documents)
        else:
            by_form.setdefault(trace.form, []).extend(trace.documents)
    spans = by_form.pop("otlp", [])
    rng.shuffle(spans)
    for start in range(0, len(spans), 50):
        write_lines(folder / "spans.jsonl", [otlp_export(spans[start : start + 50], ())])
    if logs:
        write_lines(folder / "logs.jsonl", [otlp_export((), logs)])
    for form, documents in by_form.items():
        if form == "phoenix":
            (folder / "phoenix.json").write_text(json.dumps({"data": documents, "next_cursor": None}))
        elif form == "langfuse":
            (folder / "langfuse.json").write_text(json.dumps(documents, indent=1))
        else:
            write_lines(folder / f"{form}.jsonl", documents)


def write_lines(path: Path, documents: Sequence[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
