"""Plain JSON lines of chat messages: `{"messages": […], "tools": […]}`, prompt and completion, or a bare list.

Each answer is a call, with the messages before it as its prompt. Such rows hold whole answers by their nature: one
without a `finish_reason` of its row is taken to have ended by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl_server.gateway.dialects.synonyms import is_untrained
from lightningrl_traces.documents import read_documents
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord
from lightningrl_viewer.reading.foreign.bodies import BINDING, read_request, sampling_of
from lightningrl_viewer.reading.foreign.messages import finish_of

__all__ = ["ChatImporter", "calls_of"]


class ChatImporter:
    """Rows of chat messages, as trainers and data sets have them."""

    def fits(self, sample: Sample) -> bool:
        first = sample.first
        if isinstance(first, dict):
            first = next((first[key] for key in ("messages", "prompt", "conversations") if key in first), None)
        return (
            isinstance(first, list)
            and bool(first)
            and isinstance(first[0], dict)
            and bool({"role", "from"} & first[0].keys())
        )

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for number, row in enumerate(read_documents(path), 1):
            yield from _read(row if isinstance(row, dict) else {"messages": row}, f"{path.stem}-{number}")


def _read(row: Mapping[str, Any], name: str) -> Iterator[TraceRecord]:
    notes: set[str] = set()
    listed = [item for key in ("messages", "conversations", "prompt", "completion") for item in _listed(row.get(key))]
    asked = {key: row[key] for key in ("system", "instructions", "tools", "functions", *BINDING) if row.get(key)}
    fields = read_request({"messages": listed, **asked}, notes)
    messages: list[Message] = fields.get("messages") or []
    rollout = str(row.get("id") or row.get("rollout_id") or name)
    common: dict[str, Any] = {
        "trace_id": rollout,
        "tools": fields.get("tools"),
        "sampling": sampling_of(row),
        "model": str(row.get("model") or ""),
        "notes": tuple(sorted(notes)),
    }
    yield from calls_of(messages, finish=finish_of(row.get("finish_reason")), assumed=True, **common)
    reward = row.get("reward", row.get("score"))
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    yield Ending(trace_id=rollout, reward=float(reward) if is_number and reward is not None else None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def calls_of(
    messages: list[Message], *, finish: str | None, assumed: bool, trace_id: str, **common: Any
) -> Iterator[Call]:
    """Make a call of each answer that its author lets be trained on. `finish` is the last one's reason; `assumed`:
    others, too, ended by themselves."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for number, place in enumerate(places):
        answer = messages[place]
        if is_untrained(answer):
            continue
        usual = "tool_calls" if answer.get("tool_calls") else "stop"
        replies = finish if place == places[-1] else None
        yield Call(
            id=f"{trace_id}/{number}",
            trace_id=trace_id,
            messages=messages[:place],
            answer=answer,
            finish_reason=replies or (usual if assumed else None),
            **common,
        )
