"""OpenEnv's `TrainingTrace`s, those of `lightningrl export-rollouts` too: a turn is a call with its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl_runs.foreign.bodies import read_request, read_response
from lightningrl_traces.documents import dict_of, dicts_of, name_document, read_documents
from lightningrl_traces.importers.own import OWN, own_call, own_ending
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord, read_score

__all__ = ["OpenEnvImporter"]


class OpenEnvImporter:
    """A rollout a document: `schema_version`, `turns` with `prompt_token_ids`."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        turns = first.get("turns")
        return isinstance(turns, list) and all(
            isinstance(turn, dict) and "prompt_token_ids" in turn for turn in turns[:1]
        )

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for number, document in enumerate(read_documents(path), 1):
            if isinstance(document, dict):
                yield from _read(document, name_document(path, number))


def _read(document: Mapping[str, Any], name: str) -> Iterator[TraceRecord]:
    listed = document.get("turns")
    turns = dicts_of(listed)
    first = _of(turns[0], "metadata") if turns else {}
    trace_id = str(first.get("rollout_id") or name)
    history: list[Message] = []
    for number, turn in enumerate(turns):
        notes: set[str] = set()
        metadata = _of(turn, "metadata")
        own = metadata.get(OWN) if isinstance(metadata.get(OWN), dict) else None
        fields: dict[str, Any] = {"model": metadata.get("model")}
        fields |= read_request(turn.get("request"), notes) | read_response(turn.get("response"), notes)
        if own is not None:  # ours: a turn has what it adds to those before it
            fields["messages"] = history = [*history, *(fields.get("messages") or ())]
            history = [*history, *([fields["answer"]] if fields.get("answer") else ())]
        given = {key: value for key, value in fields.items() if value is not None}
        yield Call(
            **{
                **given,
                "id": str(turn.get("node_id") or f"{trace_id}/{number}"),
                "trace_id": trace_id,
                "model": str(given.get("model") or ""),
                "prompt_ids": turn.get("prompt_token_ids"),
                "completion_ids": turn.get("completion_token_ids"),
                "logprobs": turn.get("per_token_logps"),
                "notes": tuple(sorted(notes)),
                **own_call(own.get("call") if own else None),
            }
        )
    rollout = _of(first, OWN).get("rollout")
    reward = first.get("reward")
    yield (
        own_ending(trace_id, rollout)
        if isinstance(rollout, dict)
        else Ending(trace_id=trace_id, reward=read_score(reward))
    )


def _of(value: Any, key: str) -> dict[str, Any]:
    return dict_of(dict_of(value).get(key))
