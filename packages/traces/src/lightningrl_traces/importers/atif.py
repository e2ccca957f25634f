"""Trajectories in ATIF, the Agent Trajectory Interchange Format, those of `lightningrl export-rollouts` too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lightningrl.sanitize import as_text
from lightningrl_runs.foreign.bodies import binding_of, sampling_of
from lightningrl_runs.foreign.messages import NO_TEXT, REPARSED, finish_of, note_unread, read_tools
from lightningrl_traces.documents import dict_of, dicts_of, name_document, read_documents
from lightningrl_traces.importers.own import OWN, own_call, own_ending
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord, read_score, unix_seconds

__all__ = ["AtifImporter"]

_SOURCES: Final = {"system": "system", "user": "user"}
_STEP: Final = frozenset(
    {
        *("step_id", "timestamp", "source", "message", "model_name", "reasoning_content", "reasoning_effort", "extra"),
        *("tool_calls", "observation", "metrics", "is_copied_context", "llm_call_count"),
    }
)


class AtifImporter:
    """A trajectory a document: `schema_version` of ATIF, `agent`, `steps`."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        return str(first.get("schema_version") or "").upper().startswith("ATIF") and "steps" in first

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for number, document in enumerate(read_documents(path), 1):
            if isinstance(document, dict):
                yield from _read(document, name_document(path, number))


def _read(document: Mapping[str, Any], name: str) -> Iterator[TraceRecord]:
    trace_id = str(document.get("session_id") or document.get("trajectory_id") or name)
    agent = dict_of(document.get("agent"))
    messages: list[Message] = []
    notes: set[str] = set()
    tools = read_tools(agent.get("tool_definitions"), notes)
    for number, step in enumerate(dicts_of(document.get("steps")), 1):
        note_unread(step, _STEP - binding_of(step).keys(), notes)
        message = _message(step, notes)
        is_call = (
            step.get("source") == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0
        )
        if is_call:
            yield _call(step, trace_id, number, list(messages), message, tools, notes, agent)
        messages.append(message)
        messages += _results(step)
    metrics = dict_of(document.get("final_metrics"))
    extra = dict_of(metrics.get("extra"))
    own = document["extra"].get(OWN) if isinstance(document.get("extra"), dict) else None
    reward = extra.get("reward")
    yield (own_ending(trace_id, own) if isinstance(own, dict) else Ending(trace_id=trace_id, reward=read_score(reward)))


def _message(step: Mapping[str, Any], notes: set[str]) -> Message:
    content = step.get("message")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) < len(content):
            notes.add(NO_TEXT)
        content = "\n".join(text for text in texts if text)
    if step.get("source") != "agent":
        return {"role": _SOURCES.get(str(step.get("source")), "user"), "content": as_text(content or "")}
    message: Message = {"role": "assistant", "content": as_text(content or "")}
    if isinstance(step.get("reasoning_content"), str) and step["reasoning_content"]:
        message["reasoning_content"] = step["reasoning_content"]
    if calls := dicts_of(step.get("tool_calls")):
        message["tool_calls"] = [_tool_call(call, notes) for call in calls]
    return message


def _tool_call(call: Mapping[str, Any], notes: set[str]) -> dict[str, Any]:
    extra = dict_of(call.get("extra"))
    arguments = extra.get("arguments")
    if not isinstance(arguments, str):
        notes.add(REPARSED)
        arguments = json.dumps(call.get("arguments") or {}, ensure_ascii=False)
    function = {"name": str(call.get("function_name") or ""), "arguments": arguments}
    return {"id": str(call.get("tool_call_id") or ""), "type": "function", "function": function}


def _results(step: Mapping[str, Any]) -> list[Message]:
    observation = dict_of(step.get("observation"))
    results: list[Message] = []
    for result in dicts_of(observation.get("results")):
        content = as_text(result.get("content") or "")
        if result.get("source_call_id"):
            results.append({"role": "tool", "tool_call_id": str(result["source_call_id"]), "content": content})
        else:
            results.append({"role": "user", "content": content})
    return results


def _call(
    step: Mapping[str, Any],
    trace_id: str,
    number: int,
    messages: list[Message],
    answer: Message,
    tools: list[dict[str, Any]] | None,
    notes: set[str],
    agent: Mapping[str, Any],
) -> Call:
    metrics = dict_of(step.get("metrics"))
    extra = dict_of(step.get("extra"))
    own = extra.get(OWN) if isinstance(extra.get(OWN), dict) else None
    facts: dict[str, Any] = {
        "model": str(step.get("model_name") or agent.get("model_name") or ""),
        "started_at": unix_seconds(step.get("timestamp")),
        "finish_reason": finish_of(extra.get("finish_reason")),
        "sampling": sampling_of({**extra, **(metrics.get("extra") or {})}),
        "agent": str(agent["name"]) if agent.get("name") else None,
    }
    return Call(
        **{
            **facts,
            "id": f"{trace_id}/{step.get('step_id', number)}",
            "trace_id": trace_id,
            "messages": messages or None,
            "answer": answer,
            "tools": tools,
            "prompt_ids": metrics.get("prompt_token_ids"),
            "completion_ids": metrics.get("completion_token_ids"),
            "logprobs": metrics.get("logprobs"),
            "prompt_tokens": metrics.get("prompt_tokens"),
            "notes": tuple(sorted(notes)),
            **own_call(own),
        }
    )
