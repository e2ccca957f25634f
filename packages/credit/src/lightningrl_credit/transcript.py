"""A rollout as a judge reads it: JSON lines of bounded length, one for each message, tool call, result and the output.

    {"task": "What costs tea?"}
    {"turn": 1, "by": "user", "text": "What costs tea?"}
    {"turn": 1, "by": "policy tool_call", "text": "{\\"name\\": \\"price\\" …"}
    {"turn": 1, "by": "tool", "name": "price", "status": "ok", "arguments": "…", "result": "3 €"}
    {"turn": 2, "by": "policy", "text": "3 €"}
    {"output": "3 €"}

A rollout's text can end or open no line, and holds no token of a chat template. It may still talk to the judge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from lightningrl.sanitize import as_text, clean_json
from lightningrl.types import ToolCall, Trajectory

__all__ = ["Messages", "clip", "shared_lines", "transcripts"]

Messages = Sequence[Sequence[tuple[str, str]]]
"""New messages of each call, as (who, text): the answer of `ask.read(trajectory)`."""
_SHORTEST: Final = 80
"""Least characters that a text keeps, however many texts there are."""
_MOST_LINES: Final = 400
_ESCAPED: Final = re.compile(
    r"<(?=[|｜/A-Za-z])|\[(?=/?[A-Z_]+\])|[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)
"""Beginnings of a chat template's tokens (`<|im_end|>`, `</s>`, `<start_of_turn>`, `[/INST]`), and what nobody sees."""


def transcripts(
    rollouts: Sequence[tuple[Trajectory, Messages]], *, longest_text: int, longest: int, shows_answer: bool
) -> list[list[str]]:
    """Lines of each rollout. A text is cut in its middle to `longest_text` characters, the longest ones to fewer where
    the texts of a rollout would be more than `longest` together. `shows_answer`: with the task's reference answer."""
    fair = min(_fair_length(_lengths(trajectory, messages), longest) for trajectory, messages in rollouts)
    most = max(_SHORTEST, min(longest_text, fair))
    return [_some(_lines(trajectory, messages, most, shows_answer=shows_answer)) for trajectory, messages in rollouts]


def shared_lines(rollouts: Sequence[Sequence[str]]) -> int:
    """Number of first lines that all of them share."""
    return sum(1 for _ in takewhile(lambda lines: len(set(lines)) == 1, zip(*rollouts, strict=False)))


def clip(text: str, most: int) -> str:
    """Cut a text that is longer to its beginning and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} … [{len(text) - most} characters left out] … {text[len(text) - most // 3 :]}"


def _lengths(trajectory: Trajectory, messages: Messages) -> list[int]:
    """Lengths of a rollout's texts."""
    of_tools = [length for tool in trajectory.tool_calls for length in (len(tool.arguments), len(tool.result))]
    return [len(text) for by_call in messages for _, text in by_call] + of_tools


def _fair_length(lengths: Sequence[int], longest: int) -> int:
    """Length to which longer texts are cut, so that all are `longest` together: (10, 90, 90) of 110: (10, 50, 50)."""
    left = longest
    for number, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - number)
        if length > share:
            return share
        left -= length
    return longest


def _lines(trajectory: Trajectory, messages: Messages, most: int, *, shows_answer: bool) -> list[str]:
    lines = [_line({"task": trajectory.task.input}, most)]
    if shows_answer and trajectory.task.answer is not None:
        lines.append(_line({"reference_answer": trajectory.task.answer}, most))
    asked_for: dict[str | None, list[ToolCall]] = {}
    for tool in trajectory.tool_calls:
        asked_for.setdefault(tool.transition_id, []).append(tool)
    results = {tool.result.strip() for tool in trajectory.tool_calls}
    for turn, (call, new_messages) in enumerate(zip(trajectory.transitions, messages, strict=True), start=1):
        for who, text in new_messages:
            if who != "tool_result" or text not in results:  # else it stands beside its tool
                role = {"agent": call.agent} if who.startswith("policy") and call.agent else {}
                lines.append(_line({"turn": turn, "by": who, **role, "text": text}, most))
        lines += [_tool(turn, tool, most) for tool in asked_for.pop(call.id, ())]
    lines += [_tool(None, tool, most) for tools in asked_for.values() for tool in tools]
    return [*lines, _line({"output": trajectory.output}, most)]


def _some(lines: Sequence[str]) -> list[str]:
    """Keep `_MOST_LINES` at most, from the beginning and the end."""
    if len(lines) <= _MOST_LINES:
        return list(lines)
    half = _MOST_LINES // 2
    return [*lines[:half], json.dumps({"lines_left_out": len(lines) - 2 * half}), *lines[-half:]]


def _tool(turn: int | None, tool: ToolCall, most: int) -> str:
    where = {} if turn is None else {"turn": turn}
    name = clip(tool.name, _SHORTEST)
    call = {"by": "tool", "name": name, "status": tool.status.value, "arguments": tool.arguments}
    return _line({**where, **call, "result": tool.result}, most)


def _line(fields: Mapping[str, Any], most: int) -> str:
    """Write one line of JSON in which no text is longer than `most`; longer values become texts."""
    shown: dict[str, Any] = {}
    for name, value in fields.items():
        text = as_text(value)
        shown[name] = clip(text, most) if isinstance(value, str) or len(text) > most else value
    line = json.dumps(clean_json(shown, cut=True), ensure_ascii=False, default=str)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
