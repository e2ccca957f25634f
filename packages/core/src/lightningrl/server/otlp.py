"""OTLP/HTTP spans to records: `execute_tool` becomes a tool call, and spans that name or nest agents are kept as names.

Where the attribute `lightningrl.tool.status` is missing (spans of somebody else's instrumentation), an error status means `error`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from lightningrl.errors import ServerError
from lightningrl.store.protocol import SpanRecord, ToolCallRecord
from lightningrl.tracing import semconv
from lightningrl.types import ToolCall, ToolStatus

__all__ = ["EMPTY_ANSWER", "parse_spans"]

EMPTY_ANSWER = ExportTraceServiceResponse().SerializeToString()


def parse_spans(body: bytes, encoding: str, limit: int) -> tuple[list[ToolCallRecord], list[SpanRecord]]:
    """Tool calls and agent spans of an export. Raises ServerError with a sentence for bytes that are none, or too many."""
    if encoding not in ("", "identity", "gzip"):
        raise ServerError(f"content-encoding {encoding!r} is not understood; send spans plain or with gzip")
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(_unzip(body, limit) if encoding == "gzip" else body)
    except DecodeError:
        raise ServerError("the body is no OTLP ExportTraceServiceRequest; export spans with OTLP over HTTP/protobuf") from None
    tool_calls: list[ToolCallRecord] = []
    spans: list[SpanRecord] = []
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {one.key: one.value for one in span.attributes}
                if _text(attributes.get(semconv.OPERATION_NAME)) == semconv.EXECUTE_TOOL:
                    tool_calls.append(_tool_call(span, attributes))
                spans.append(
                    SpanRecord(
                        span_id=span.span_id.hex(),
                        parent_span_id=span.parent_span_id.hex() or None,
                        agent=_text(attributes.get(semconv.AGENT_NAME)) or None,
                    )
                )
    return tool_calls, _useful(spans)


def _useful(spans: list[SpanRecord]) -> list[SpanRecord]:
    """Agents, and what leads to them."""
    return spans if any(span.agent is not None for span in spans) else []


def _tool_call(span: Span, attributes: Mapping[str, AnyValue]) -> ToolCallRecord:
    failed = span.status.code == Status.STATUS_CODE_ERROR
    status = _text(attributes.get(semconv.TOOL_STATUS)) or (ToolStatus.ERROR.value if failed else ToolStatus.UNKNOWN.value)
    call = ToolCall(
        id=_text(attributes.get(semconv.TOOL_CALL_ID)) or span.span_id.hex(),
        name=_text(attributes.get(semconv.TOOL_NAME)) or span.name,
        arguments=_text(attributes.get(semconv.TOOL_CALL_ARGUMENTS)),
        result=_text(attributes.get(semconv.TOOL_CALL_RESULT)),
        status=ToolStatus(status) if status in {one.value for one in ToolStatus} else ToolStatus.UNKNOWN,
        duration_s=max(0, span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        agent=_text(attributes.get(semconv.AGENT_NAME)) or None,
        error_type=_text(attributes.get(semconv.ERROR_TYPE)) or None,
    )
    return ToolCallRecord(
        tool_call=call,
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        started_at=span.start_time_unix_nano / 1e9,
    )


def _text(value: AnyValue | None) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else "" if plain is None else json.dumps(plain)


def _plain(value: AnyValue | None) -> Any:
    kind = value.WhichOneof("value") if value is not None else None
    if value is None or kind is None:
        return None
    if kind == "array_value":
        return [_plain(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return {one.key: _plain(one.value) for one in value.kvlist_value.values}
    plain = getattr(value, kind)
    return plain.hex() if isinstance(plain, bytes) else plain


def _unzip(body: bytes, limit: int) -> bytes:
    unzip = zlib.decompressobj(wbits=31)
    try:
        plain = unzip.decompress(body, limit + 1)
    except zlib.error as error:
        raise ServerError(f"the body is no gzip stream ({error}); leave out content-encoding or compress it") from None
    if len(plain) > limit:
        raise ServerError(f"the spans are larger than {limit} bytes when unpacked; export fewer at a time")
    return plain
