"""Answer match: the answer is the number, or the letter, that the task says."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

from calculator import calculate

__all__ = ["answer_match", "is_match"]

TOLERANCE = 1e-2
"""Relative, as in the paper's own experiment: results of Calc-X are rounded."""


class Task(Protocol):
    @property
    def answer(self) -> Any: ...


def answer_match(task: Task, output: Any, trajectory: object = None) -> float:
    """1.0 if the agent's answer is the task's, else 0.0. Raises `ValueError` if the task's own answer is empty: the
    data is broken then."""
    return float(is_match(task.answer, output))


def is_match(expected: Any, answer: Any) -> bool:
    """Whether two answers are the same text, the same letter of a choice, or the same number up to one percent."""
    right, said = (str(text if text is not None else "").strip() for text in (expected, answer))
    if not right:
        raise ValueError(f"the expected answer is {expected!r}; every task needs one")
    if right == said:
        return True
    if re.fullmatch(r"\(?[A-Za-z]\)?", right):
        return right.strip("()") == said.strip("()")
    one, other = _number(right), _number(said)
    return one is not None and other is not None and math.isclose(one, other, rel_tol=TOLERANCE)


def _number(text: str) -> float | None:
    """The value of 72, 1_234, 2/3 or "2/3 = around 0.666667"; None if it is no number."""
    try:
        return float(calculate(text.split(" = around ")[0]))
    except (ValueError, TypeError):
        return None
