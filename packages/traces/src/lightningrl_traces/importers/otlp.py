"""OTLP files: JSON, JSON lines (an export a line) and protobuf, of spans and of log records.

protobuf   an export's own bytes, or several, each behind its length of four bytes (the collector's file exporter)
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as ProtoLog
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightningrl.errors import ServerError
from lightningrl_server.inflate import MOST_VALUES
from lightningrl_server.spans.otlp import check_fields, plain_attributes, plain_value, read_fields
from lightningrl_traces.documents import (
    LONGEST,
    UNREADABLE,
    dict_of,
    dicts_of,
    has_lines,
    open_source,
    read_documents,
    read_items,
    refuse,
)
from lightningrl_traces.records import LogRecord, Sample, Span, TraceRecord

__all__ = ["OtlpImporter"]

_NS: Final = 1e-9
_ERROR: Final = {"2", "STATUS_CODE_ERROR"}
_LEVELS: Final = {"resourceSpans": ("scopeSpans", "spans"), "resourceLogs": ("scopeLogs", "logRecords")}
_PLACES: Final = {key: f"{key}.item.{scopes}.item.{items}.item" for key, (scopes, items) in _LEVELS.items()}
_CHUNK: Final = 2**20
_RESIDENT: Final = 16 * 2**20
"""Bytes of a file that stay in memory once they are read."""


class OtlpImporter:
    """Exports of OpenTelemetry, as the collector's file exporter and SDKs write them."""

    def fits(self, sample: Sample) -> bool:
        if isinstance(sample.first, dict):
            return bool(_PLACES.keys() & sample.first.keys())
        if sample.head.lstrip()[:1] == b"{":
            return any(f'"{place}"'.encode() in sample.head for place in _PLACES)
        return _export_start(sample.head) is not None

    def read(self, path: Path) -> Iterator[TraceRecord]:
        with open_source(path) as file:
            is_json = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
        return _read_json(path) if is_json else _read_protobuf(path)


def _read_json(path: Path) -> Iterator[TraceRecord]:
    if has_lines(path):
        for document in read_documents(path):
            yield from _read_document(document)
        return
    for key, place in _PLACES.items():
        if _mentions(path, f'"{key}"'.encode()):
            with open_source(path) as file:
                for item in read_items(file, place, path):
                    if isinstance(item, dict):
                        yield from _json_record(key, item)


def _read_document(document: Any) -> Iterator[TraceRecord]:
    for key, (scopes, items) in _LEVELS.items():
        for resource in dicts_of(dict_of(document).get(key)):
            for scope in dicts_of(resource.get(scopes)):
                for item in dicts_of(scope.get(items)):
                    yield from _json_record(key, item)


def _json_record(key: str, item: Mapping[str, Any]) -> Iterator[TraceRecord]:
    record = _json_span(item) if key == "resourceSpans" else _json_log(item)
    if not _is_other_log(record):
        yield record


def _is_other_log(record: TraceRecord) -> bool:
    """True for a line of an application's log, which tells nothing of a call."""
    return isinstance(record, LogRecord) and not record.event.startswith("gen_ai.")


def _mentions(path: Path, words: bytes) -> bool:
    with open_source(path) as file:
        before = b""
        try:
            while chunk := file.read(_CHUNK):
                if words in before + chunk:
                    return True
                before = chunk[-len(words) :]
        except UNREADABLE as error:
            raise refuse(path, "to its end", error) from error
    return False


def _json_span(span: Mapping[str, Any]) -> Span:
    events = [(str(event.get("name") or ""), _json_attributes(event)) for event in dicts_of(span.get("events"))]
    status = dict_of(span.get("status"))
    return Span(
        trace_id=str(span.get("traceId") or ""),
        span_id=str(span.get("spanId") or ""),
        parent_id=str(span.get("parentSpanId") or "") or None,
        name=str(span.get("name") or ""),
        started_at=_seconds(span.get("startTimeUnixNano")),
        ended_at=_seconds(span.get("endTimeUnixNano")),
        attributes=_json_attributes(span),
        events=events,
        error=str(status.get("message") or "") if str(status.get("code")) in _ERROR else None,
    )


def _json_log(log: Mapping[str, Any]) -> LogRecord:
    attributes = _json_attributes(log)
    return LogRecord(
        trace_id=str(log.get("traceId") or ""),
        span_id=str(log.get("spanId") or ""),
        event=str(log.get("eventName") or attributes.get("event.name") or ""),
        attributes=attributes,
        body=_json_value(log.get("body")),
    )


def _seconds(nanoseconds: Any) -> float:
    try:
        return int(nanoseconds or 0) * _NS
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _json_attributes(item: Mapping[str, Any], key: str = "attributes") -> dict[str, Any]:
    return {str(pair.get("key")): _json_value(pair.get("value")) for pair in dicts_of(dict_of(item).get(key))}


def _json_value(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return None
    kind, inner = next(iter(value.items()))
    if kind == "arrayValue":
        listed = inner.get("values") if isinstance(inner, dict) else None
        return [_json_value(item) for item in listed] if isinstance(listed, list) else []
    if kind == "kvlistValue":
        return _json_attributes(inner, "values") if isinstance(inner, dict) else {}
    if kind == "intValue":
        try:
            return int(inner)
        except (TypeError, ValueError, OverflowError):
            return None
    return inner


def _export_start(head: bytes) -> int | None:
    """Return where the first export begins: 0, or 4 behind a length; None where this is no export."""
    if len(head) > 6 and head[4:5] == b"\n" and int.from_bytes(head[:4], "big") > 4 and head[:1] == b"\0":
        return 4
    return 0 if len(head) > 4 and head[:1] == b"\n" and head[1:2] != b"\n" else None


def _read_protobuf(path: Path) -> Iterator[TraceRecord]:
    with tempfile.TemporaryFile() as plain, open_source(path) as file:
        try:
            while chunk := file.read(_CHUNK):
                plain.write(chunk)
        except UNREADABLE as error:
            raise refuse(path, "to its end", error) from error
        plain.flush()
        with mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                seen = 0
                for start, end in _exports(data):
                    for first, last in _bodies(data, start, end):
                        if last - first > LONGEST:
                            raise ValueError(f"a record of more than {LONGEST // 2**20} MiB")
                        body = data[first:last]
                        kind, read = (ProtoSpan, _proto_span) if body[:2] == b"\n\x10" else (ProtoLog, _proto_log)
                        if len(body) > MOST_VALUES:
                            check_fields(body, kind.DESCRIPTOR)
                        record = read(body)
                        if not _is_other_log(record):
                            yield record
                        if first - seen > _RESIDENT:
                            data.madvise(mmap.MADV_DONTNEED)
                            seen = first
            except (ValueError, IndexError, DecodeError, ServerError) as error:
                raise refuse(path, "as OTLP in protobuf", error) from error


def _exports(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    if not _export_start(data[:16]):
        yield 0, len(data)
        return
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if at + 4 + size > len(data):
            raise ValueError(f"the export at byte {at} has {size} bytes, and the file ends before")
        yield at + 4, at + 4 + size
        at += 4 + size


def _bodies(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Find the spans, or log records, of an export: field 2 of the scopes, which are field 2 of the resources."""
    for resource, *within_export in read_fields(data, start, end):
        for scope, *within_resource in read_fields(data, *within_export) if resource == 1 else ():
            for record, first, last in read_fields(data, *within_resource) if scope == 2 else ():
                if record == 2:
                    yield first, last


def _proto_span(body: bytes) -> Span:
    span = ProtoSpan.FromString(body)
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex() or None,
        name=span.name,
        started_at=span.start_time_unix_nano * _NS,
        ended_at=span.end_time_unix_nano * _NS,
        attributes=plain_attributes(span.attributes),
        events=[(event.name, plain_attributes(event.attributes)) for event in span.events],
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _proto_log(body: bytes) -> LogRecord:
    log = ProtoLog.FromString(body)
    attributes = plain_attributes(log.attributes)
    return LogRecord(
        trace_id=log.trace_id.hex(),
        span_id=log.span_id.hex(),
        event=str(log.event_name or attributes.get("event.name") or ""),
        attributes=attributes,
        body=plain_value(log.body),
    )
