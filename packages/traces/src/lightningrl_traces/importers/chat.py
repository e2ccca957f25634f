"""Plain JSON lines of chat messages: `{"messages": […], "tools": […]}`, prompt and completion, or a bare list.

Each answer is a call, with the messages before it as its prompt. Such rows hold whole answers by their nature: one
without a `finish_reason` of its row is taken to have ended by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from lightningrl.tool_schemas import without_fill
from lightningrl_runs.foreign.bodies import binding_of, note_beside, read_request, sampling_of
from lightningrl_runs.foreign.messages import UNTRAINED, digest_text, finish_of, note_unread, read_message
from lightningrl_server.gateway.dialects.synonyms import PROMPT_COLUMNS, is_untrained, marks_of
from lightningrl_traces.documents import dict_of, name_document, read_documents
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord, read_score

__all__ = ["ChatImporter"]

_READ: Final = ("messages", "conversations", "prompt", "completion")
_REASONS: Final = ("finish_reason", "stop_reason", "done_reason", "finishReason")


class ChatImporter:
    """Rows of chat messages, as trainers and data sets have them."""

    def fits(self, sample: Sample) -> bool:
        first = sample.first
        if isinstance(first, dict):
            first = next((first[key] for key in _READ if isinstance(first.get(key), list)), None)
        return (
            isinstance(first, list)
            and bool(first)
            and isinstance(first[0], dict)
            and bool({"role", "from"} & first[0].keys())
        )

    def read(self, path: Path) -> Iterator[TraceRecord]:
        for number, row in enumerate(read_documents(path), 1):
            row = row if isinstance(row, dict) else {"messages": row}
            yield from _read(row, name_document(path, number, str(row.get("id") or "")))


def _read(row: Mapping[str, Any], name: str) -> Iterator[TraceRecord]:
    notes: set[str] = set()
    whole = row.get("messages") or row.get("conversations")
    listed = _listed(whole) or [*_listed(row.get("prompt")), *_listed(row.get("completion"))]
    asked = {key: row[key] for key in ("system", "tools", "functions") if row.get(key)} | binding_of(row)
    if isinstance(asked.get("tools"), list):
        listed, asked["tools"] = without_fill(listed, asked["tools"])
    fields = read_request({"messages": listed, **asked}, notes)
    messages: list[Message] = fields.get("messages") or []
    if messages and messages[0]["role"] != "system":
        instructions = row.get("system_prompt") or row.get("instructions")
        messages = [*read_message(instructions, notes, "system"), *messages]
    note_beside(row, ("system_prompt", "instructions"), messages, notes)
    beside = {
        key: value for key, value in row.items() if key in PROMPT_COLUMNS or (key not in _READ and _is_dialogue(value))
    }
    note_unread(beside | dict.fromkeys(marks_of(row), True), (), notes)
    if is_untrained(row) or ("completion" in row and is_untrained({"weight": row.get("label")})):
        notes.add(UNTRAINED)
    rollout = str(row.get("rollout_id") or name)
    common: dict[str, Any] = {
        "trace_id": rollout,
        "tools": fields.get("tools"),
        "sampling": sampling_of(row),
        "model": str(row.get("model") or ""),
        "notes": tuple(sorted(notes)),
    }
    reasons = [_finish(item) for item in listed if _is_answer(item)]
    title = "" if row.get("rollout_id") else str(row.get("id") or name)
    yield from _calls(messages, reasons, _finish(row), title=title, **common)
    reward = next((row[key] for key in ("reward", "score") if row.get(key) is not None), None)
    yield Ending(trace_id=rollout, reward=read_score(reward))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_dialogue(value: Any) -> bool:
    """True for messages, such as `chosen` and `rejected`."""
    return isinstance(value, list) and bool(value) and all({"role", "from"} & dict_of(item).keys() for item in value)


def _is_answer(item: Any) -> bool:
    return any(message["role"] == "assistant" for message in read_message(item, set()))


def _finish(item: Any) -> str | None:
    """The reason that a row, or a message of it, names."""
    sides = (dict_of(item), dict_of(dict_of(item).get("response_metadata")))
    return next(filter(None, (finish_of(side.get(key)) for side in sides for key in _REASONS)), None)


def _calls(
    messages: Sequence[Message], reasons: Sequence[str | None], last: str | None, *, title: str, **common: Any
) -> Iterator[Call]:
    """Make a call of each answer that its author lets be trained on. `last` is the last one's reason, where it names
    none itself; others without ended by themselves. `title`: the row's; empty where several rows tell a rollout."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for number, place in enumerate(places):
        answer = messages[place]
        if is_untrained(answer):
            continue
        usual = "tool_calls" if answer.get("tool_calls") else "stop"
        own = reasons[number] if len(reasons) == len(places) else None
        yield Call(
            id=f"{title}/{number}" if title else f"{common['trace_id']}/{_digest(messages[: place + 1])}",
            messages=list(messages[:place]),
            answer=answer,
            finish_reason=own or (last if place == places[-1] else None) or usual,
            **common,
        )


def _digest(messages: Sequence[Message]) -> str:
    return blake2b(digest_text(messages).encode("utf-8", "replace"), digest_size=8).hexdigest()
