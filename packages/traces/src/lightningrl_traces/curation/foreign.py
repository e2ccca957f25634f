"""Imported runs as sources of rows: a call is in the store as it was asked and answered, with its grade.

OtherCall "forwarded": request {"messages", "tools", …}, answer {"id", "grade", "choices": […]}
grades.jsonl: reasons; those of a call that is rl-safe say why it is no data for tuning
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightningrl.errors import RunFolderError
from lightningrl.types import OtherCall, OtherCallKind, Trajectory
from lightningrl_traces.curation.chat_calls import ChatCall, LeftOut, Likeness, UnreadCall
from lightningrl_traces.curation.sources import Source
from lightningrl_traces.documents import dict_of
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["TraceSource"]

_ENDED = ("stop", "tool_calls")


class TraceSource(Source):
    """A run that was imported. Its rollouts of nearly equal tasks are compared: nobody sampled them as groups."""

    is_foreign = True

    def __init__(self, folder: Path, stored: StoredRun) -> None:
        super().__init__(folder, stored)
        self._unfit = _read_unfit(folder / "grades.jsonl")

    def calls(self, trajectory: Trajectory) -> Iterator[ChatCall | UnreadCall]:
        """Read the calls of a trajectory."""
        values = {call.id: {**call.reported, **call.rewards} for call in trajectory.transitions}
        for other in trajectory.other_calls:
            if other.kind is OtherCallKind.FORWARDED and isinstance(other.answer, dict) and "grade" in other.answer:
                call_id = str(other.answer.get("id"))
                yield self._read(other, call_id, trajectory.rollout_id, values.get(call_id, {}))

    def _read(
        self, other: OtherCall, call_id: str, rollout_id: str, values: dict[str, float | None]
    ) -> ChatCall | UnreadCall:
        request: dict[str, Any] = dict_of(other.request)
        choice: dict[str, Any] = next(iter(other.answer.get("choices") or ()), {})
        messages, answer = request.get("messages"), choice.get("message")
        if (rollout_id, call_id) in self._unfit:
            return UnreadCall(id=call_id, reason=LeftOut.UNFIT)
        if not messages or not answer:
            return UnreadCall(id=call_id, reason=LeftOut.UNREADABLE)
        if choice.get("finish_reason") not in (None, *_ENDED):
            return UnreadCall(id=call_id, reason=LeftOut.CUT)
        return ChatCall(
            id=call_id,
            role=other.agent,
            prompt=tuple(messages),
            answer={**answer, "role": "assistant"},
            tools=tuple(request.get("tools") or ()),
            likeness=Likeness.FOREIGN,
            grade=str(other.answer["grade"]),
            rewards=values,
        )


def _read_unfit(path: Path) -> frozenset[tuple[str, str]]:
    """Return the calls that are rl-safe and no data for tuning. Raises RunFolderError for a line that is none."""
    unfit: set[tuple[str, str]] = set()
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                grade = json.loads(line)
                if grade["grade"] == "rl-safe" and grade["reasons"]:
                    unfit.add((grade["rollout_id"], grade["call_id"]))
    except OSError as error:
        raise RunFolderError(f"{str(path)!r} cannot be read: {error.strerror}; import the traces again") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"line {number} of {str(path)!r} is no grade; import the traces again") from error
    return frozenset(unfit)
