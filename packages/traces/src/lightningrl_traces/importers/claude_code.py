"""Sessions that Claude Code logs (`~/.claude/projects/…/*.jsonl`): a tree of lines, linked by `parentUuid`.

u1 ─► a1 ─► u2 ─► a2        a rewind begins another branch: u2 is in no prompt of a3
       └──► u3 ─► a3        a line that is written again, and an error in the model's place, are left out

Such a log has neither the system prompt nor the tools' schemas, so its calls can be judged, not tuned on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightningrl_runs.foreign.messages import finish_of, read_message
from lightningrl_traces.documents import dict_of, dicts_of, name_document, read_documents
from lightningrl_traces.grades import Reason
from lightningrl_traces.records import Call, Ending, Message, Sample, TraceRecord, unix_seconds

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
        trees = _Tree(), _Tree()  # a session that was resumed hangs on lines of the one before it
        own = name_document(path, 1)
        for line in read_documents(path):
            if not isinstance(line, dict) or not ("uuid" in line or line.get("type") in ("user", "assistant")):
                continue
            key = str(line.get("sessionId") or own), bool(line.get("isSidechain"))
            session = sessions.setdefault(
                key, _Session(f"{key[0]}{'-side' if key[1] else ''}", trees[key[1]], is_side=key[1])
            )
            session.add(line)
        for session in sessions.values():
            yield from session.calls()
            yield Ending(trace_id=session.id)


@dataclass(eq=False, kw_only=True, slots=True)
class _Turn:
    """A line of the tree, or the lines of one answer."""

    parent: _Turn | None
    at: float
    message: dict[str, Any] = field(default_factory=dict[str, Any])
    """Empty for a line that is none of the dialogue."""
    blocks: list[Any] = field(default_factory=list[Any])
    ended_at: float = 0.0


@dataclass(eq=False, slots=True)
class _Tree:
    """The lines of a file so far."""

    turns: dict[str, _Turn] = field(default_factory=dict[str, _Turn])
    results: dict[str, _Turn] = field(default_factory=dict[str, _Turn])
    """Turns with a tool's result, by the call's id: of parallel calls each hangs on its own line."""


class _Session:
    """The answers of a session so far."""

    def __init__(self, session_id: str, tree: _Tree, *, is_side: bool) -> None:
        self.id = session_id
        self._agent = "subagent" if is_side else None
        self._turns, self._results = tree.turns, tree.results
        self._answers: dict[str, _Turn] = {}
        self._last: _Turn | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        uuid, message = str(line.get("uuid") or len(self._turns)), dict_of(line.get("message"))
        if uuid in self._turns:  # the history, written again
            return
        above = self._last if "parentUuid" not in line else self._turns.get(str(line["parentUuid"]))
        turn = _Turn(parent=above, at=unix_seconds(line.get("timestamp")))
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        is_error = bool(line.get("isApiErrorMessage")) or message.get("model") == "<synthetic>"
        if line.get("type") == "assistant" and not is_error:
            turn = self._answers.setdefault(str(message.get("id") or uuid), turn)
            turn.message |= {key: value for key, value in message.items() if value is not None} | {"role": "assistant"}
            turn.blocks += [block for block in blocks if block not in turn.blocks]  # or written again
            turn.ended_at = unix_seconds(line.get("timestamp"))
        elif line.get("type") == "user":
            turn.message, turn.blocks = {"role": "user"}, blocks
            for block in dicts_of(content):
                if block.get("type") == "tool_result":
                    self._results.setdefault(str(block.get("tool_use_id")), turn)
        self._turns[uuid] = self._last = turn

    def calls(self) -> Iterator[Call]:
        """Make a call of each answer, with the branch that leads to it as its prompt."""
        for number, (answer_id, turn) in enumerate(self._answers.items()):
            notes = {Reason.NOT_WHOLE.value}
            messages = [message for before in self._branch(turn) for message in _read(before, notes)]
            replies = _read(turn, notes)
            started_at = (turn.parent.ended_at or turn.parent.at) if turn.parent is not None else turn.at
            yield Call(
                id=answer_id if turn.message.get("id") else f"{self.id}/{number}",
                trace_id=self.id,
                agent=self._agent,
                model=str(turn.message.get("model") or ""),
                started_at=started_at or turn.at,
                duration_s=max(0.0, turn.ended_at - (started_at or turn.at)),
                messages=messages or None,
                answer=replies[-1] if replies else None,
                finish_reason=finish_of(turn.message.get("stop_reason")),
                notes=tuple(sorted(notes)),
            )

    def _branch(self, turn: _Turn) -> list[_Turn]:
        """Return the turns above one, each once, the first first, with results of parallel calls beside it."""
        above: dict[int, _Turn] = {}
        here = turn.parent
        while here is not None and id(here) not in above:
            above[id(here)] = here
            here = here.parent
        branch: dict[int, _Turn] = {}
        for step in reversed(above.values()):
            if step is turn:
                continue
            branch[id(step)] = step
            calls = [str(block.get("id")) for block in dicts_of(step.blocks) if block.get("type") == "tool_use"]
            for result in (self._results[call] for call in calls if call in self._results):
                branch[id(result)] = result
        return list(branch.values())


def _read(turn: _Turn, notes: set[str]) -> list[Message]:
    if not turn.message:
        return []
    return read_message({"role": turn.message["role"], "content": turn.blocks}, notes)
