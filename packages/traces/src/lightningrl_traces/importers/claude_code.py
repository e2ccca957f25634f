"""Sessions that Claude Code logs (`~/.claude/projects/…/*.jsonl`): messages linked by `parentUuid`.

Such a log has neither the system prompt nor the tools' schemas, so its calls can be judged, not tuned on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightningrl_traces.documents import dict_of, read_documents
from lightningrl_traces.grades import NOT_WHOLE
from lightningrl_traces.reading.messages import finish_of, read_message
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord
from lightningrl_traces.times import unix_seconds

__all__ = ["ClaudeCodeImporter"]

_KINDS = frozenset({"user", "assistant", "system", "summary", "file-history-snapshot", "queue-operation"})


class ClaudeCodeImporter:
    """A session a file; an answer is logged in several lines, a content block each."""

    def fits(self, sample: Sample) -> bool:
        first = dict_of(sample.first)
        is_line = str(first.get("type")) in _KINDS and (
            "sessionId" in first or "leafUuid" in first or "messageId" in first
        )
        return is_line or (b'"parentUuid"' in sample.head and b'"sessionId"' in sample.head)

    def read(self, path: Path) -> Iterator[TraceRecord]:
        sessions: dict[tuple[str, bool], _Session] = {}
        for line in read_documents(path):
            if not isinstance(line, dict) or line.get("type") not in ("user", "assistant"):
                continue
            key = str(line.get("sessionId") or path.stem), bool(line.get("isSidechain"))
            session = sessions.setdefault(key, _Session(f"{key[0]}{'-side' if key[1] else ''}", is_side=key[1]))
            yield from session.add(line)
        for session in sessions.values():
            yield from session.end()
            yield Ending(trace_id=session.id)


class _Session:
    """The dialogue so far, and the answer whose lines still come."""

    def __init__(self, session_id: str, *, is_side: bool) -> None:
        self.id = session_id
        self._agent = "subagent" if is_side else None
        self._messages: list[Message] = []
        self._blocks: list[Any] = []
        self._answer: Mapping[str, Any] | None = None
        self._started_at = self._last_at = 0.0
        self._number = 0

    def add(self, line: Mapping[str, Any]) -> Iterator[Call]:
        message = dict_of(line.get("message"))
        at = unix_seconds(line.get("timestamp"))
        if line["type"] == "assistant":
            if self._answer is not None and self._answer.get("id") != message.get("id"):
                yield from self.end()
            if self._answer is None:
                self._started_at = self._last_at or at
            content = message.get("content")
            self._blocks += content if isinstance(content, list) else [content]
            self._answer = {
                **(self._answer or {}),
                **{key: value for key, value in message.items() if value is not None},
            }
        else:
            yield from self.end()
            self._messages += read_message({"role": "user", "content": message.get("content")}, set())
        self._last_at = at

    def end(self) -> Iterator[Call]:
        """End the answer whose lines came."""
        if self._answer is None:
            return
        notes = {NOT_WHOLE}
        replies = read_message({"role": "assistant", "content": self._blocks}, notes)
        yield Call(
            id=str(self._answer.get("id") or f"{self.id}/{self._number}"),
            trace_id=self.id,
            agent=self._agent,
            model=str(self._answer.get("model") or ""),
            started_at=self._started_at,
            duration_s=max(0.0, self._last_at - self._started_at),
            messages=list(self._messages) or None,
            answer=replies[-1] if replies else None,
            finish_reason=finish_of(self._answer.get("stop_reason")),
            notes=tuple(sorted(notes)),
        )
        self._messages += replies
        self._answer, self._blocks, self._number = None, [], self._number + 1
