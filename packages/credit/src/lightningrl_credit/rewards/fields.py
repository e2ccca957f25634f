"""Where a reward of the library takes its text from: a path into the agent's output or the task's answer, then a pattern within it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.sanitize import as_text
from lightningrl.types import Task

__all__ = ["LONGEST", "Extract", "answers_of", "pick", "text_of"]

LONGEST = 100_000
"""Characters of an output that are looked at: what a model writes may be any length, and patterns take their time."""


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
    """The last match of a pattern, its first group where it has one; the whole text without a pattern, or where it does not match."""

    def __init__(self, pattern: str | None) -> None:
        """Raises ConfigError."""
        self._pattern = None if pattern is None else compile_pattern(pattern)

    def __call__(self, text: str) -> str:
        found = None if self._pattern is None else list(self._pattern.finditer(text))
        if not found:
            return text.strip()
        return (found[-1][1 if found[-1].re.groups else 0] or "").strip()


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """With `.` for any character, lines' ends included. Raises ConfigError."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression ({error}); mend it, or write it in single quotes in TOML") from None


def answers_of(task: Task, path: str | None) -> list[Any]:
    """The right answers, one or several in a list. Raises ValueError where the task has none: the data is broken then."""
    found = pick(task.answer, path)
    answers = found if isinstance(found, list) else [found]
    if not answers or None in answers:
        where = f" at {path!r}" if path else ""
        raise ValueError(f"task {task.id!r} has no answer{where}; give each task one, or a list of right ones")
    return answers
