"""Text that a reward looks at: by a path into the agent's output or the task's answer, then by a pattern within it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.sanitize import as_text
from lightningrl.types import Task

__all__ = ["LONGEST", "Extract", "answers_of", "pick", "text_of"]

LONGEST = 100_000
"""Characters of an output that are looked at: a model writes any length, and patterns take their time."""


def pick(value: Any, path: str | None) -> Any:
    """The value at a dotted path: `query.rows.0`; the whole value without a path, None where there is nothing."""
    for key in path.split(".") if path else ():
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def text_of(value: Any) -> str:
    """Text as it is, None as nothing, anything else as JSON."""
    return "" if value is None else as_text(value)[:LONGEST]


class Extract:
    """Takes the last match of a pattern, its first group where it has one; else the whole text."""

    def __init__(self, pattern: str | None) -> None:
        """Raise ConfigError for what is no pattern."""
        self._pattern = None if pattern is None else compile_pattern(pattern)

    def __call__(self, text: str) -> str:
        matches = None if self._pattern is None else list(self._pattern.finditer(text))
        if not matches:
            return text.strip()
        return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip()


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile it with `.` for any character, lines' ends included. Raises ConfigError."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} is no regular expression ({error}); mend it, or write it in single quotes in TOML"
        ) from None


def answers_of(task: Task, path: str | None) -> list[Any]:
    """Right answers of a task, one or several. Raises ValueError where it has none: the data is broken then."""
    value = pick(task.answer, path)
    answers = value if isinstance(value, list) else [value]
    if not answers or None in answers:
        where = f" at {path!r}" if path else ""
        raise ValueError(f"task {task.id!r} has no answer{where}; give each task one, or a list of right ones")
    return answers
