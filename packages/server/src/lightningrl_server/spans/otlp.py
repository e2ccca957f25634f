"""OTLP/HTTP to records, from protobuf or JSON, of our adapters or of somebody else's instrumentation in any language.

spans         tools become tool calls, evaluations rewards, and spans that name or nest agents are kept as names
              (`lightningrl.conventions`)
log records   evaluations become rewards; the rest is not ours
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from mmap import mmap
from typing import Any, Final, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.exceptions import HTTPException

from lightningrl import conventions
from lightningrl.conventions import Kind, SpanState, read_span
from lightningrl.errors import ServerError
from lightningrl.sanitize import parse_json
from lightningrl_server.inflate import MOST_VALUES, check_values, inflate
from lightningrl_server.records import SpanRecord, ToolCallRecord
from lightningrl_server.spans.evaluations import Evaluation, read_evaluations, read_log_evaluations
from lightningrl_server.spans.tool_spans import SeenSpan, read_tools

__all__ = [
    "JSON",
    "PROTOBUF",
    "Export",
    "ParsedExport",
    "check_fields",
    "decode_export",
    "encode_answer",
    "parse_export",
    "parse_logs",
    "plain_attributes",
    "plain_value",
    "read_fields",
    "read_media_type",
]

Export = ExportTraceServiceRequest | ExportLogsServiceRequest
E = TypeVar("E", ExportTraceServiceRequest, ExportLogsServiceRequest)

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

MOST_SPANS: Final = 20_000
"""In one export, and as many log records; a worker sends at most half as many of an attempt."""
_IDS: Final = {"traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id"}
"""Hexadecimal in OTLP's JSON, where protobuf's own JSON has base64."""
_STATES: Final = {Status.STATUS_CODE_ERROR: SpanState.ERROR, Status.STATUS_CODE_OK: SpanState.OK}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedExport:
    """An export of spans, or of log records, as far as it is ours."""

    request: Export
    evaluations: Sequence[Evaluation]
    tool_calls: Sequence[ToolCallRecord] = ()
    loose: frozenset[str] = frozenset()
    unoffered: frozenset[str] = frozenset()
    """See `ReadTools`, both."""
    spans: Sequence[SpanRecord] = ()
    answers: Sequence[tuple[str, str]] = ()
    """Ids of answers, each with the model's span that names it."""
    rejected: int = 0
    """Spans without a usable id."""


def read_media_type(content_type: str) -> str:
    """`PROTOBUF` (also where nothing is said) or `JSON`. Raises HTTPException 415 with a sentence."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in ("", PROTOBUF, JSON):
        return media_type or PROTOBUF
    raise HTTPException(415, f"content-type {media_type!r} is no OTLP; send it as {PROTOBUF!r} or {JSON!r}")


def parse_export(body: bytes, media_type: str, encoding: str, limit: int) -> ParsedExport:
    """Tool calls and agents of an export. Raises ServerError with a sentence for bytes that are none, or too many."""
    request = decode_export(body, media_type, encoding, limit, ExportTraceServiceRequest())
    scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
    _check_count(sum(len(scope.spans) for scope in scopes), "spans")
    every = [(scope.scope.name, span) for scope in scopes for span in scope.spans]
    named = [(scope, span) for scope, span in every if len(span.span_id) == 8 and any(span.span_id)]
    seen = [_see(span, scope) for scope, span in named]
    spans = [
        SpanRecord(span_id=span.span_id, parent_span_id=span.parent_span_id, agent=span.reading.agent) for span in seen
    ]
    tools = read_tools(seen)
    models = [span for span in seen if span.reading.kind is Kind.MODEL]
    named_by = [(str(span.attributes.get(conventions.RESPONSE_ID) or ""), span.span_id) for span in models]
    return ParsedExport(
        request=request,
        tool_calls=tools.records,
        loose=tools.loose,
        unoffered=tools.unoffered,
        spans=spans,
        answers=[(answer_id, span_id) for answer_id, span_id in named_by if answer_id],
        evaluations=read_evaluations(seen),
        rejected=len(every) - len(named),
    )


def parse_logs(body: bytes, media_type: str, encoding: str, limit: int) -> ParsedExport:
    """Evaluations of an export of log records. Raises ServerError as `parse_export` does."""
    request = decode_export(body, media_type, encoding, limit, ExportLogsServiceRequest())
    scopes = [scope for resource in request.resource_logs for scope in resource.scope_logs]
    _check_count(sum(len(scope.log_records) for scope in scopes), "log records")
    records = [record for scope in scopes for record in scope.log_records if _is_evaluation(record)]
    around = (record.span_id.hex() if len(record.span_id) == 8 else None for record in records)
    attributes = (plain_attributes(record.attributes) for record in records)
    return ParsedExport(request=request, evaluations=read_log_evaluations(zip(around, attributes, strict=True)))


def encode_answer(media_type: str, rejected: int) -> bytes:
    """The answer to an exporter; empty = everything was taken."""
    sentence = f"left out for want of a span id of eight bytes: {rejected} of the spans"
    if media_type == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": sentence}}
        return json.dumps(partial if rejected else {}).encode()
    answer = ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = sentence
    return bytes(answer.SerializeToString())


def _check_count(count: int, what: str) -> None:
    if count > MOST_SPANS:
        raise ServerError(f"the export has {count} {what}, more than {MOST_SPANS}; export fewer at a time")


def _is_evaluation(record: LogRecord) -> bool:
    """True by the name of the record's event, which older SDKs write as an attribute."""
    if record.event_name:
        return record.event_name == conventions.EVALUATION_RESULT
    names = [attribute.value.string_value for attribute in record.attributes if attribute.key == "event.name"]
    return conventions.EVALUATION_RESULT in names


def _see(span: Span, scope: str) -> SeenSpan:
    attributes = plain_attributes(span.attributes)
    events = [(event.name, plain_attributes(event.attributes)) for event in span.events]
    state = _STATES.get(span.status.code, SpanState.UNSET)
    reading = read_span(span.name, attributes, state, events)
    return SeenSpan(
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        started_ns=span.start_time_unix_nano,
        ended_ns=max(span.start_time_unix_nano, span.end_time_unix_nano),
        scope=scope,
        attributes=attributes,
        reading=reading,
        is_failed=span.status.code == Status.STATUS_CODE_ERROR,
        events=events,
    )


def plain_attributes(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes by name, their values as Python's."""
    return {one.key: plain_value(one.value) for one in attributes}


def plain_value(value: AnyValue | None) -> Any:
    """A value as Python's; bytes are hexadecimal digits."""
    kind = value.WhichOneof("value") if value is not None else None
    if value is None or kind is None:
        return None
    if kind == "array_value":
        return [plain_value(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return {one.key: plain_value(one.value) for one in value.kvlist_value.values}
    plain = getattr(value, kind)
    return plain.hex() if isinstance(plain, bytes) else plain


def decode_export(body: bytes, media_type: str, encoding: str, limit: int, request: E) -> E:
    """Fill `request` from the body of an export, which is bounded first. Raises ServerError with a sentence for bytes
    that are none, or too many."""
    plain = inflate(body, encoding, limit)
    if media_type == JSON:
        check_values(plain, MOST_VALUES // 4)  # `json_format` takes long
        _fill_from_json(plain, request)
        return request
    try:
        if len(plain) > 2 * MOST_VALUES:  # a field has two bytes at least
            check_fields(plain, request.DESCRIPTOR)
        request.ParseFromString(plain)
    except (DecodeError, IndexError):
        raise ServerError(
            f"the body is no OTLP {type(request).__name__}; export with OTLP over HTTP, protobuf or JSON"
        ) from None
    return request


def check_fields(body: bytes, kind: Descriptor) -> None:
    """Walk protobuf's wire format and build nothing. Raises ServerError for more than `MOST_VALUES` fields, DecodeError
    or IndexError for bytes that are no message of the kind."""
    messages, left = [(0, len(body), _messages_in(kind))], MOST_VALUES
    while messages:
        start, end, inner = messages.pop()
        for number, at, stop in read_fields(body, start, end):
            left -= 1
            if left < 0:
                raise ServerError(f"the export has more than {MOST_VALUES} fields; export fewer at a time")
            if stop > at and number in inner:
                messages.append((at, stop, _messages_in(inner[number])))


def read_fields(body: bytes | mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Walk a message in protobuf's wire format, without a copy. Yields the number of each field with a length, 0 for
    any other, and where it begins and ends. Raises DecodeError or IndexError for bytes that are no message."""
    while at < end:
        tag, at = (body[at], at + 1) if body[at] < 128 else _varint(body, at)
        wire_type = tag & 7
        if wire_type == 2:
            size, at = (body[at], at + 1) if body[at] < 128 else _varint(body, at)
            if at + size > end:
                raise DecodeError(f"a field at byte {at} ends beyond what holds it")
            yield tag >> 3, at, at + size
            at += size
            continue
        if wire_type == 0:
            _, at = _varint(body, at)
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise DecodeError(f"no field at byte {at}")
        yield 0, at, at
    if at != end:
        raise DecodeError(f"a field ends beyond byte {end}, where its message ends")


@cache
def _messages_in(kind: Descriptor) -> dict[int, Descriptor]:
    """A message's fields that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(body: bytes | mmap, at: int) -> tuple[int, int]:
    value = body[at] & 127
    shift = 0
    while body[at] > 127:
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise DecodeError(f"no number at byte {at}")
        value |= (body[at] & 127) << shift
    return value, at + 1


def _fill_from_json(body: bytes, request: Export) -> None:
    try:
        document = parse_json(body)
        if not isinstance(document, dict):
            raise ValueError(f"it is a {type(document).__name__}, not an object")
        json_format.ParseDict(_with_base64_ids(document), request, ignore_unknown_fields=True)
    except (ValueError, RecursionError, json_format.ParseError) as error:
        problem = str(error).partition("\n")[0][:200]
        raise ServerError(
            f"the body is no OTLP in JSON ({problem}); export with OTLP over HTTP, protobuf or JSON"
        ) from None


def _with_base64_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_base64_ids(one) for one in value]
    if isinstance(value, Mapping):
        return {
            key: _base64(inner) if key in _IDS and isinstance(inner, str) else _with_base64_ids(inner)
            for key, inner in value.items()
        }
    return value


def _base64(digits: str) -> str:
    """The id in base64; one that is none becomes an empty one, which is refused with its span alone."""
    try:
        return base64.b64encode(binascii.unhexlify(digits)).decode()
    except ValueError:
        return ""
