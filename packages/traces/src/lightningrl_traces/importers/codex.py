"""Sessions that Codex logs (`~/.codex/sessions/…/rollout-*.jsonl`): items of the Responses API, a line each.

Such a log has no tools' schemas and no finish reasons, so its calls can be judged, not tuned on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from lightningrl_runs.foreign.bodies import read_request, read_response
from lightningrl_traces.documents import dict_of, dicts_of, name_document, read_documents
from lightningrl_traces.grades import Reason
from lightningrl_traces.records import Call, Ending, Sample, TraceRecord, unix_seconds

__all__ = ["CodexImporter"]

_KINDS: Final = frozenset({"session_meta", "response_item", "turn_context", "event_msg", "compacted"})
_ROLLBACKS: Final = frozenset({"thread_rolled_back", "thread_rollback"})
_SAID: Final = frozenset({"function_call", "custom_tool_call", "local_shell_call", "reasoning"})


class CodexImporter:
    """A session a file: `session_meta`, `turn_context`, `response_item`."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        return str(first.get("type")) in _KINDS and "payload" in first

    def read(self, path: Path) -> Iterator[TraceRecord]:
        session = _Session(name_document(path, 1))
        for line in read_documents(path):
            payload = line.get("payload") if isinstance(line, dict) else None
            if isinstance(payload, dict):
                yield from session.add(str(line.get("type") or ""), payload, unix_seconds(line.get("timestamp")))
        yield from session.end()
        yield Ending(trace_id=session.id)


class _Session:
    """The items so far, and those of the answer that still comes."""

    def __init__(self, name: str) -> None:
        self.id = name
        self._model = self._instructions = ""
        self._items: list[Mapping[str, Any]] = []
        self._answer: list[Mapping[str, Any]] = []
        self._started_at = self._last_at = 0.0
        self._number = 0

    def add(self, kind: str, payload: Mapping[str, Any], at: float) -> Iterator[Call]:
        if kind == "session_meta":
            self.id = str(payload.get("id") or self.id)
            instructions = payload.get("base_instructions") or payload.get("instructions") or ""
            self._instructions = instructions.get("text", "") if isinstance(instructions, dict) else str(instructions)
        elif kind == "turn_context":
            self._model = str(payload.get("model") or self._model)
        elif kind == "compacted":
            yield from self.end()
            history = dicts_of(payload.get("replacement_history"))
            summary = {"type": "message", "role": "user", "content": str(payload.get("message") or "")}
            self._items = list(map(_item, history)) or [summary]
        elif kind == "event_msg" and str(payload.get("type")) in _ROLLBACKS:
            yield from self.end()
            self._take_back(payload.get("num_turns"))
        elif kind == "response_item":
            is_said = str(payload.get("type")) in _SAID or payload.get("role") == "assistant"
            if not is_said:
                yield from self.end()
                self._items.append(_item(payload))
            else:
                self._started_at = self._started_at if self._answer else self._last_at or at
                self._answer.append(_item(payload))
        self._last_at = at

    def _take_back(self, turns: Any) -> None:
        """Drop the user's last turns, and what came after them."""
        asked = [place for place, item in enumerate(self._items) if item.get("role") == "user"]
        count = turns if isinstance(turns, int) and turns > 0 else 1
        self._items = self._items[: asked[-count]] if count <= len(asked) else []

    def end(self) -> Iterator[Call]:
        """End the answer whose items came."""
        if not self._answer:
            return
        notes: set[str] = set() if self._instructions else {Reason.NOT_WHOLE.value}
        request = {"input": list(self._items), **({"instructions": self._instructions} if self._instructions else {})}
        fields = read_request(request, notes) | read_response({"output": self._answer}, notes)
        yield Call(
            id=f"{self.id}/{self._number}",
            trace_id=self.id,
            model=self._model,
            started_at=self._started_at,
            duration_s=max(0.0, self._last_at - self._started_at),
            messages=fields.get("messages"),
            answer=fields.get("answer"),
            notes=tuple(sorted(notes)),
        )
        self._items += self._answer
        self._answer, self._number = [], self._number + 1


def _item(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Write a call of a tool of Codex's own as a function's."""
    kind = payload.get("type")
    if kind == "custom_tool_call":
        return {**payload, "type": "function_call", "arguments": {"input": payload.get("input", "")}}
    if kind == "local_shell_call":
        return {**payload, "type": "function_call", "name": "shell", "arguments": payload.get("action") or {}}
    if kind == "custom_tool_call_output":
        return {**payload, "type": "function_call_output"}
    return dict(payload)
