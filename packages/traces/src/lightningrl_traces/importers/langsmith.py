"""Runs exported from LangSmith as JSON lines, of LangChain's tracer and of `wrap_openai`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus
from lightningrl_runs.foreign.bodies import read_request, read_response, sampling_of, tools_beside, version_of
from lightningrl_runs.foreign.messages import finish_of, read_message, read_messages
from lightningrl_traces.documents import dict_of, read_documents
from lightningrl_traces.records import Call, Ending, Sample, ToolRun, TraceRecord, named_scores, unix_seconds

__all__ = ["LangSmithImporter"]


class LangSmithImporter:
    """LangSmith's runs: `run_type`, `inputs`, `outputs`."""

    def fits(self, sample: Sample) -> bool:
        return isinstance(sample.first, dict) and {"run_type", "inputs"} <= sample.first.keys()

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for run in read_documents(path):
            if isinstance(run, dict):
                yield from _read(run)


def _read(run: Mapping[str, Any]) -> Iterator[TraceRecord]:
    parent = run.get("parent_run_id") or None
    place: dict[str, Any] = {
        "trace_id": str(run.get("trace_id") or run.get("id") or ""),
        "parent_id": None if parent is None else str(parent),
        "started_at": (started := unix_seconds(run.get("start_time"))),
        "duration_s": max(0.0, unix_seconds(run.get("end_time")) - started),
    }
    error = None if not run.get("error") else str(run["error"])
    run_id, metadata = str(run.get("id") or ""), _of(_of(run, "extra"), "metadata")
    stats = _of(run, "feedback_stats").items()
    scores = named_scores((name, value.get("avg")) for name, value in stats if isinstance(value, dict))
    if run.get("run_type") == "llm":
        agent = metadata.get("lc_agent_name") or metadata.get("langgraph_node")
        named = str(agent) if agent else None
        yield Call(id=run_id, **place, error=error, agent=named, rewards=scores, **_llm(run))
    elif run.get("run_type") == "tool":
        outputs = _of(run, "outputs").get("output", run.get("outputs"))
        content = outputs.get("content", outputs) if isinstance(outputs, dict) else outputs
        call_id = outputs.get("tool_call_id") if isinstance(outputs, dict) else None
        asked = _of(run, "inputs").get("input", run.get("inputs"))
        yield ToolRun(
            id=str(call_id or run_id),
            span_id=run_id,
            name=str(run.get("name") or ""),
            arguments="" if asked is None else as_text(asked),
            result="" if content is None else as_text(content),
            status=ToolStatus.ERROR if error is not None else ToolStatus.OK,
            **place,
        )
    if parent is None:
        is_call = run.get("run_type") == "llm"
        texts = {} if is_call else {"input": run.get("inputs"), "output": run.get("outputs")}
        yield Ending(trace_id=place["trace_id"], error=error, rewards=scores, **texts)


def _of(value: Any, key: str) -> dict[str, Any]:
    return dict_of(dict_of(value).get(key))


def _llm(run: Mapping[str, Any]) -> dict[str, Any]:
    notes: set[str] = set()
    inputs, outputs, settings = _of(run, "inputs"), _of(run, "outputs"), _of(_of(run, "extra"), "invocation_params")
    fields: dict[str, Any] = {"model": settings.get("model") or settings.get("model_name")}
    if "generations" in outputs:
        fields |= _langchain(inputs, outputs, notes)
    else:
        fields |= read_request(inputs, notes) | read_response(outputs, notes)
    fields["sampling"] = {**sampling_of(settings), **fields.get("sampling", {})}
    beside = tools_beside(settings, notes)
    if fields.get("tools") is None:
        fields["tools"] = beside
    given = {key: value for key, value in fields.items() if value is not None}
    return {**given, "model": str(given.get("model") or ""), "notes": tuple(sorted(notes))}


def _langchain(inputs: Mapping[str, Any], outputs: Mapping[str, Any], notes: set[str]) -> dict[str, Any]:
    batches = outputs["generations"]
    first = (
        batches[0][0] if isinstance(batches, list) and batches and isinstance(batches[0], list) and batches[0] else {}
    )
    first = dict_of(first)
    message = first.get("message")
    replies = read_message(message, notes) if isinstance(message, dict) else []
    kwargs = _of(message, "kwargs") or _of(message, "data")
    facts = {**_of(first, "generation_info"), **_of(kwargs, "response_metadata")}
    listed = _of(facts, "logprobs").get("content")
    return {
        "messages": read_messages(inputs.get("messages"), notes),
        "answer": {**replies[-1], "role": "assistant"} if replies else None,
        "finish_reason": finish_of(facts.get("finish_reason") or facts.get("stop_reason")),
        "logprobs": [token.get("logprob") for token in listed] if isinstance(listed, list) and listed else None,
        "version": version_of(facts.get("system_fingerprint")),
    }
