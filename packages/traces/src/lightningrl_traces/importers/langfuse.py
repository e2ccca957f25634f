"""Observations exported from Langfuse, alone or within their traces with scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus
from lightningrl_runs.foreign.bodies import read_request, read_response, sampling_of, tools_beside, version_of
from lightningrl_runs.foreign.messages import finish_of, read_message, read_messages
from lightningrl_traces.documents import dict_of, dicts_of, read_documents
from lightningrl_traces.records import Call, Ending, Sample, ToolRun, TraceRecord, named_scores, unix_seconds
from lightningrl_traces.spans import parse_part

__all__ = ["LangfuseImporter"]


class LangfuseImporter:
    """Langfuse's observations: `traceId`, `type`, `startTime`; or a trace with `observations` and `scores`."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        is_observation = "type" in first and ("traceId" in first or "trace_id" in first) and "startTime" in _keys(first)
        return is_observation or isinstance(first.get("observations"), list)

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for document in read_documents(path):
            if not isinstance(document, dict):
                continue
            if isinstance(document.get("observations"), list):
                yield from _read_trace(document)
            else:
                yield from _read(_camel(document), None)


def _keys(row: Mapping[str, Any]) -> set[str]:
    return {_camel_name(key) for key in row}


def _camel(row: Mapping[str, Any]) -> dict[str, Any]:
    """Name the fields as the API does; an export as CSV or of the blob storage has `start_time`."""
    return {_camel_name(key): value for key, value in row.items()}


def _camel_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _read_trace(trace: Mapping[str, Any]) -> Iterator[TraceRecord]:
    trace_id = str(trace.get("id") or "")
    of: dict[str, list[tuple[Any, Any]]] = {}
    for score in filter(_has_value, map(_camel, dicts_of(trace.get("scores")))):
        of.setdefault(str(score.get("observationId") or ""), []).append((score.get("name"), score.get("value")))
    for row in map(_camel, dicts_of(trace["observations"])):
        scores = named_scores(of.get(str(row.get("id")), ())) if row.get("id") else {}
        for record in _read(row, trace_id):
            yield replace(record, rewards=scores) if isinstance(record, Call) else record
    rewards = named_scores(of.get("", ()))
    yield Ending(trace_id=trace_id, input=trace.get("input"), output=trace.get("output"), rewards=rewards)


def _has_value(score: Mapping[str, Any]) -> bool:
    """False for a category or a text without a number of its own: Langfuse writes 0 in its place."""
    kind = str(score.get("dataType") or "").upper()
    return kind in ("", "NUMERIC", "BOOLEAN") or (kind == "CATEGORICAL" and bool(score.get("configId")))


def _read(row: Mapping[str, Any], trace_id: str | None) -> Iterator[TraceRecord]:
    kind = str(row.get("type") or "").upper()
    place: dict[str, Any] = {
        "trace_id": str(row.get("traceId") or trace_id or ""),
        "parent_id": str(row.get("parentObservationId") or "") or None,
        "started_at": (started := unix_seconds(row.get("startTime"))),
        "duration_s": max(0.0, unix_seconds(row.get("endTime")) - started),
    }
    failed = str(row.get("level") or "").upper() == "ERROR"
    if kind == "GENERATION":
        error = str(row.get("statusMessage") or "") if failed else None
        yield Call(id=str(row.get("id") or ""), **place, error=error, **_generation(row))
    elif kind == "TOOL":
        yield ToolRun(
            id=str(row.get("id") or ""),
            span_id=str(row.get("id") or ""),
            name=str(row.get("name") or ""),
            arguments="" if row.get("input") is None else as_text(row["input"]),
            result="" if row.get("output") is None else as_text(row["output"]),
            status=ToolStatus.ERROR if failed else ToolStatus.OK,
            **place,
        )


def _generation(row: Mapping[str, Any]) -> dict[str, Any]:
    notes: set[str] = set()
    request, response, metadata, settings = (
        parse_part(row.get(key)) for key in ("input", "output", "metadata", "modelParameters")
    )
    fields: dict[str, Any] = {"tools": tools_beside(settings, notes)}
    if isinstance(request, dict) and ("messages" in request or "input" in request):
        fields |= read_request(request, notes)
    else:
        fields["messages"] = read_messages(request, notes)
    fields |= {key: value for key, value in read_response(response, notes).items() if key != "model"}
    if fields.get("answer") is None and response is not None:
        replies = read_message(response[0] if isinstance(response, list) and response else response, notes, "assistant")
        fields["answer"] = {**replies[-1], "role": "assistant"} if replies else None
    facts = dict_of(metadata)
    fields["finish_reason"] = fields.get("finish_reason") or finish_of(facts.get("finish_reason"))
    fields["sampling"] = {**fields.get("sampling", {}), **sampling_of(settings)}
    if fields.get("version") is None:
        fields["version"] = version_of(facts.get("system_fingerprint"))
    return {
        **fields,
        "model": str(row.get("model") or row.get("providedModelName") or ""),
        "notes": tuple(sorted(notes)),
    }
