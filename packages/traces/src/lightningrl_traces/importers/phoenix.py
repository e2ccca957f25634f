"""Spans exported from Phoenix: its REST API's pages, its JSON lines, or a data frame of spans as JSON records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl.conventions import EVALUATION_NAME, EVALUATION_RESULT, EVALUATION_SCORE_VALUE
from lightningrl_traces.documents import dict_of, dicts_of, read_documents
from lightningrl_traces.records import Sample, Span, TraceRecord, unix_seconds
from lightningrl_traces.spans import flatten

__all__ = ["PhoenixImporter"]


class PhoenixImporter:
    """Phoenix's own form of a span: `context`, `span_kind`, `attributes`."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        is_span = "span_kind" in first or "parent_id" in first
        return is_span and ("context" in first or "context.trace_id" in first)

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for document in read_documents(path):
            if isinstance(document, dict):
                yield from _read(document)


def _read(row: Mapping[str, Any]) -> Iterator[TraceRecord]:
    context = dict_of(row.get("context"))
    trace_id = str(context.get("trace_id") or row.get("context.trace_id") or "")
    nested = row.get("attributes")
    attributes = flatten(nested) if isinstance(nested, dict) else {}
    attributes |= {
        key.removeprefix("attributes."): value for key, value in row.items() if key.startswith("attributes.")
    }
    if row.get("span_kind"):
        attributes.setdefault("openinference.span.kind", str(row["span_kind"]).upper())
    failed = str(row.get("status_code") or "").upper() == "ERROR"
    events = row["events"] if isinstance(row.get("events"), list) else []
    yield Span(
        trace_id=trace_id,
        span_id=str(context.get("span_id") or row.get("context.span_id") or row.get("id") or ""),
        parent_id=str(row.get("parent_id") or "") or None,
        name=str(row.get("name") or ""),
        started_at=unix_seconds(row.get("start_time")),
        ended_at=unix_seconds(row.get("end_time")),
        attributes={key: value for key, value in attributes.items() if value is not None},
        events=[
            *((str(event.get("name") or ""), event.get("attributes") or {}) for event in dicts_of(events)),
            *((EVALUATION_RESULT, _score(note)) for note in dicts_of(row.get("annotations"))),
        ],
        error=str(row.get("status_message") or "") if failed else None,
    )


def _score(note: Mapping[str, Any]) -> dict[str, Any]:
    return {EVALUATION_NAME: note.get("name"), EVALUATION_SCORE_VALUE: dict_of(note.get("result")).get("score")}
