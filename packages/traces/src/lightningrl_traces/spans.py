"""Spans and log records of one trace, read as calls, invocations of tools and an ending.

A model's call is told by the conventions of OpenInference, GenAI (attributes, events and log records) and Traceloop. A
span may follow several; each reader returns the fields of a `Call` that it finds.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from lightningrl.conventions import (
    EVALUATION_NAME,
    EVALUATION_RESULT,
    EVALUATION_SCORE_VALUE,
    Kind,
    SpanState,
    parse_attribute,
    read_agent,
    read_kind,
    read_span,
)
from lightningrl_runs.foreign.bodies import read_request, read_response, sampling_of, tools_beside, version_of
from lightningrl_runs.foreign.messages import finish_of, read_message, read_messages, read_tools
from lightningrl_traces.documents import dicts_of
from lightningrl_traces.records import Call, Ending, LogRecord, Message, Span, ToolRun, named_scores

__all__ = ["fill", "flatten", "parse_part", "read_genai", "read_spans"]

Fields = dict[str, Any]
_DETAILS: Final = "gen_ai.client.inference.operation.details"
_FINGERPRINTS: Final = (
    "openai.response.system_fingerprint",
    "gen_ai.openai.response.system_fingerprint",
    "gen_ai.system_fingerprint",
)
_MESSAGE_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_ROOT_INPUTS: Final = ("input.value", "traceloop.entity.input", "gen_ai.task.input")
_ROOT_OUTPUTS: Final = ("output.value", "traceloop.entity.output", "gen_ai.task.output")
_VERSION: Final = "lightningrl.policy_version"


def read_spans(spans: Mapping[str, Span], logs: Sequence[LogRecord]) -> Iterator[Call | ToolRun | Ending]:
    """Read a trace. `spans` by id, in the order of their export; calls that several spans tell are all there."""
    logs_of: dict[str, list[LogRecord]] = defaultdict(list)
    for log in logs:
        logs_of[log.span_id].append(log)
    rewards: dict[str, float] = {}
    agents: dict[str, str | None] = {}
    for span in spans.values():
        mine = logs_of.pop(span.span_id, [])
        scores = _evaluations([*span.events, *((log.event, log.attributes) for log in mine)])
        kind = read_kind(span.attributes)
        is_root = span.parent_id is None or span.parent_id not in spans
        rewards |= scores if is_root else {}
        if kind is Kind.MODEL:
            yield replace(_read_call(span, mine), agent=_find_agent(span, spans, agents), rewards=scores)
            continue
        if not is_root:  # of a part of the rollout
            rewards |= {f"{span.name}/{name}": value for name, value in scores.items()}
        if kind is Kind.TOOL and (tool := _read_tool(span, _find_agent(span, spans, agents))) is not None:
            yield tool
    for span_id, orphans in logs_of.items():  # of a span that was never exported
        rewards |= _evaluations([(log.event, log.attributes) for log in orphans])
        alone = Span(trace_id=orphans[0].trace_id, span_id=span_id)
        call = _read_call(alone, orphans)
        if call.messages or call.answer:
            yield call
    yield from _ending(spans, rewards)


def _read_call(span: Span, logs: Sequence[LogRecord]) -> Call:
    notes: set[str] = set()
    fields: Fields = {}
    for reader in (read_openinference, read_genai, read_traceloop):  # the first that knows a field counts
        seen: set[str] = set()
        more = {name: value for name, value in reader(span, logs, seen).items() if value not in (None, {}, "")}
        if {"messages", "answer"} & more.keys() - fields.keys():
            notes |= seen
        fields = {**more, **fields}
    version = span.attributes.get(_VERSION)
    if isinstance(version, int) and not isinstance(version, bool):
        fields["version"] = version
    fields.setdefault("model", "")
    return Call(
        id=span.span_id,
        trace_id=span.trace_id,
        parent_id=span.parent_id,
        started_at=span.started_at,
        duration_s=max(0.0, span.ended_at - span.started_at),
        error=span.error,
        notes=tuple(sorted(notes)),
        **{**fields, "model": str(fields["model"])},
    )


def _read_tool(span: Span, agent: str | None) -> ToolRun | None:
    state = SpanState.UNSET if span.error is None else SpanState.ERROR
    reading = read_span(span.name, span.attributes, state, span.events)
    if reading.kind is not Kind.TOOL:
        return None
    return ToolRun(
        id=reading.tool_call_id or span.span_id,
        trace_id=span.trace_id,
        parent_id=span.parent_id,
        span_id=span.span_id,
        name=reading.tool,
        arguments=reading.arguments,
        result=reading.result,
        status=reading.status,
        started_at=span.started_at,
        duration_s=max(0.0, span.ended_at - span.started_at),
        agent=agent,
        error_type=reading.error_type or None,
    )


def _find_agent(span: Span, spans: Mapping[str, Span], agents: dict[str, str | None]) -> str | None:
    """Find the nearest agent around a span. Parents that form a circle lead nowhere. `agents`: those of other spans,
    which are added to."""
    path: dict[str, None] = {}
    agent: str | None = None
    here: Span | None = span
    while here is not None and here.span_id not in path:
        if here.span_id in agents:
            agent = agents[here.span_id]
            break
        path[here.span_id] = None
        if (agent := read_agent(here.name, here.attributes)) is not None:
            break
        here = spans.get(here.parent_id or "")
    agents |= dict.fromkeys(path, agent)
    return agent


def _evaluations(events: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    scored = [values for name, values in events if name == EVALUATION_RESULT]
    return named_scores((values.get(EVALUATION_NAME), values.get(EVALUATION_SCORE_VALUE)) for values in scored)


def _ending(spans: Mapping[str, Span], rewards: Mapping[str, float]) -> Iterator[Ending]:
    roots = [span for span in spans.values() if span.parent_id is None or span.parent_id not in spans]
    if not roots:
        return
    root = min(roots, key=lambda span: span.started_at or float("inf"))
    is_call = read_kind(root.attributes) is Kind.MODEL
    values = [
        None if is_call else next((root.attributes[key] for key in keys if key in root.attributes), None)
        for keys in (_ROOT_INPUTS, _ROOT_OUTPUTS)
    ]
    parsed = [value if (plain := parse_attribute(value)) is None else plain for value in values]
    yield Ending(trace_id=root.trace_id, input=parsed[0], output=parsed[1], error=root.error, rewards=dict(rewards))


def fill(call: Call, other: Call) -> Call:
    """Fill what a call lacks from another record of it."""
    lacking = {
        field.name: getattr(other, field.name)
        for field in fields_of(Call)
        if getattr(call, field.name) in (None, "", {}, ()) and field.name not in ("id", "notes", "error", "parent_id")
    }
    return replace(call, **lacking)


def read_openinference(span: Span, logs: Sequence[LogRecord], notes: set[str]) -> Fields:
    """`llm.input_messages.0.message.…`, `llm.tools.…`, and the bodies in `input.value` and `output.value`."""
    attributes = span.attributes
    request, response = (parse_attribute(attributes.get(f"{side}.value")) for side in ("input", "output"))
    settings = parse_attribute(attributes.get("llm.invocation_parameters"))
    beside = tools_beside(settings, notes)
    flat: Fields = {
        "model": attributes.get("llm.model_name"),
        "sampling": sampling_of(settings),
        "messages": _openinference_messages(attributes, "llm.input_messages", notes),
        "finish_reason": finish_of(attributes.get("llm.finish_reason")),
        "prompt_tokens": attributes.get("llm.token_count.prompt"),
    }
    replies = _openinference_messages(attributes, "llm.output_messages", notes)
    flat["answer"] = replies[-1] if replies else None
    offered = [
        tool["tool"] if isinstance(tool.get("tool"), dict) else tool for tool in _numbered(attributes, "llm.tools")
    ]
    flat["tools"] = (
        read_tools([tool["json_schema"] for tool in offered if tool.get("json_schema")], notes) if offered else beside
    )
    return _over(_over(read_request(request, notes), read_response(response, notes)), flat)


def _openinference_messages(attributes: Mapping[str, Any], prefix: str, notes: set[str]) -> list[Message] | None:
    items: list[Message] = []
    for item in _numbered(attributes, prefix):
        message = item["message"] if isinstance(item.get("message"), dict) else item
        content = message.get("content")
        parts = [part.get("message_content", part) for part in dicts_of(message.get("contents"))]
        calls = [call.get("tool_call", call) for call in dicts_of(message.get("tool_calls"))]
        items.append({**message, "content": content if content is not None else parts or None, "tool_calls": calls})
    return read_messages(items, notes)


def read_traceloop(span: Span, logs: Sequence[LogRecord], notes: set[str]) -> Fields:
    """`gen_ai.prompt.0.role`, `gen_ai.completion.0.…`, `llm.request.functions.0.…`."""
    attributes = span.attributes
    prompt = _numbered(attributes, "gen_ai.prompt")
    answers = _numbered(attributes, "gen_ai.completion")
    if not prompt and not answers:
        return {}
    replies = read_messages([_traceloop_message({"role": "assistant", **answer}) for answer in answers[:1]], notes)
    functions = _numbered(attributes, "llm.request.functions")
    fields: Fields = {
        "messages": read_messages([_traceloop_message(item) for item in prompt], notes),
        "answer": replies[-1] if replies else None,
        "finish_reason": finish_of(answers[0].get("finish_reason")) if answers else None,
        "tools": read_tools(functions, notes) if functions else None,
    }
    return _over(fields, _genai_request(attributes, notes))


def _traceloop_message(item: Mapping[str, Any]) -> Message:
    content = item.get("content")
    parts = parse_attribute(content) if isinstance(content, str) and content.startswith("[{") else None
    is_parts = isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts)
    return {**item, "content": parts if is_parts else content}


def read_genai(span: Span, logs: Sequence[LogRecord], notes: set[str]) -> Fields:
    """`gen_ai.input.messages` and `gen_ai.output.messages` of the span, of its events or of its log records; older, an
    event or a log record for each message."""
    records = [(name, values, values) for name, values in span.events]
    records += [(log.event, log.attributes, log.body) for log in logs]
    details = [values for name, values, _ in records if name == _DETAILS]
    details += [body for name, _, body in records if name == _DETAILS and isinstance(body, dict)]
    fields: Fields = {}
    for attributes in (span.attributes, *details):
        fields = _over(fields, _genai_structured(attributes, notes))
    fields = _over(fields, _genai_events(records, notes))
    return _over(fields, _genai_request(span.attributes, notes))


def _genai_structured(attributes: Mapping[str, Any], notes: set[str]) -> Fields:
    read = {key: parse_attribute(attributes.get(f"gen_ai.{key}")) for key in ("input.messages", "output.messages")}
    replies = read_messages(read["output.messages"], notes)
    prompt = read_messages(read["input.messages"], notes)
    system = parse_attribute(attributes.get("gen_ai.system_instructions"))
    if prompt is not None and system:
        prompt = [*read_message({"role": "system", "parts": system}, notes), *prompt]
    for before, after in pairwise(prompt or ()):
        _pair_by_item(before, after)
    outputs = dicts_of(read["output.messages"])
    return {
        "messages": prompt,
        "answer": replies[-1] if replies else None,
        "finish_reason": finish_of(outputs[-1].get("finish_reason")) if outputs else None,
        "tools": read_tools(attributes.get("gen_ai.tool.definitions"), notes),
    }


def _pair_by_item(asks: Message, result: Message) -> None:
    """Pair the result of a single call of Responses, which Traceloop names by its item, `fc_…`, and the result by its
    call, `call_…`."""
    calls: list[Any] = asks.get("tool_calls") or []
    if len(calls) == 1 and calls[0]["id"].startswith("fc_") and result.get("tool_call_id", "").startswith("call_"):
        result["tool_call_id"] = calls[0]["id"]


def _genai_events(records: Iterable[tuple[str, Mapping[str, Any], Any]], notes: set[str]) -> Fields:
    """An event a message: `gen_ai.user.message`, …, `gen_ai.choice`. The body is a log record's, or the attributes."""
    messages: list[Message] = []
    fields: Fields = {}
    for name, attributes, body in records:
        values = body if isinstance(body, dict) else attributes
        if (match := _MESSAGE_EVENT.fullmatch(name)) is not None:
            values = {key: parse_part(value) for key, value in values.items()}
            messages += read_message({"role": match[1], **values}, notes)
        elif name == "gen_ai.choice" and str(values.get("index") or 0) in ("0", "0.0"):
            message = parse_part(values.get("message"))
            message = message if isinstance(message, dict) else {"content": message, **values}
            replies = read_message({**message, "role": "assistant"}, notes)
            fields = {
                "answer": replies[-1] if replies else None,
                "finish_reason": finish_of(values.get("finish_reason")),
            }
    return {"messages": messages or None, **fields}


def parse_part(value: Any) -> Any:
    """Parse what an attribute or a field holds as JSON; texts stay."""
    parsed = parse_attribute(value) if isinstance(value, str) and value[:1] in "[{" else None
    return value if parsed is None else parsed


def _genai_request(attributes: Mapping[str, Any], notes: set[str]) -> Fields:
    settings = {
        key.removeprefix("gen_ai.request."): value
        for key, value in attributes.items()
        if key.startswith("gen_ai.request.")
    }
    settings |= {
        key: value for key, value in (("seed", attributes.get("gen_ai.openai.request.seed")),) if value is not None
    }
    tools_beside(settings, notes)  # for the notes
    reasons = parse_attribute(attributes.get("gen_ai.response.finish_reasons"))
    return {
        "model": attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model"),
        "sampling": sampling_of(settings),
        "finish_reason": finish_of(reasons),
        "prompt_tokens": attributes.get("gen_ai.usage.input_tokens", attributes.get("gen_ai.usage.prompt_tokens")),
        "version": version_of(
            next((attributes[key] for key in _FINGERPRINTS if key in attributes), None),
        ),
    }


def _over(fields: Fields, more: Fields) -> Fields:
    """Fill what `fields` lacks."""
    filled = {key: value for key, value in more.items() if value is not None and fields.get(key) in (None, {}, "")}
    return {**fields, **filled}


def _numbered(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Read numbered attributes as a list: `p.0.a.b`, `p.0.c.1.d` → `[{"a": {"b": …}, "c": [.., {"d": …}]}]`."""
    whole = attributes.get(prefix)
    if isinstance(whole, str) and isinstance(parsed := parse_attribute(whole), list):
        whole = parsed
    if isinstance(whole, list):
        return dicts_of(whole)
    tree: dict[str, Any] = defaultdict(dict)
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            place, *names = key[len(prefix) + 1 :].split(".")
            if place.isdecimal():
                _put(tree[place], names, value)
    return [item for place in sorted(tree, key=int) if isinstance(item := _lists(tree[place]), dict)]


def _put(tree: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        tree = inner
    if names:
        tree[names[-1]] = value


def _lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if tree and all(name.isdecimal() for name in tree):
        return [_lists(tree[name]) for name in sorted(tree, key=int)]
    return {name: _lists(inner) for name, inner in tree.items()}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested attributes to dotted names; lists stay, but those of OpenInference's messages and tools."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and inner and name not in ("metadata", "llm.invocation_parameters"):
            flat |= flatten(inner, f"{name}.")
        else:
            flat[name] = json.dumps(inner) if isinstance(inner, dict) else inner
    return flat
