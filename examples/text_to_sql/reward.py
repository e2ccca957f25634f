"""Execution match: a query is right when it gives the rows that the gold query gives."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

from sandbox import QueryProcess, Result, run_query

__all__ = ["calls", "execution_match", "first_try_correct", "is_match", "was_rescued"]

elsewhere = QueryProcess()
"""Rewards are computed in the trainer's process; what a model wrote does not run there."""


class Task(Protocol):
    @property
    def input(self) -> Any: ...
    @property
    def answer(self) -> Any: ...


def execution_match(task: Task, output: Any, trajectory: object = None) -> float:
    """1.0 if the agent's final query gives the gold rows, else 0.0.

    Rows are compared as a multiset, in order only where the gold query itself is ordered. A query that SQLite
    refuses or that runs too long is wrong. Raises `ValueError` if the gold query fails: the data is broken then.
    """
    return float(is_correct(task, _field(output, "query")))


def first_try_correct(task: Task, output: Any) -> bool:
    """Whether the first query the agent wrote was right."""
    queries = _field(output, "queries") or []
    return bool(queries) and is_correct(task, queries[0])


def was_rescued(task: Task, output: Any) -> bool | None:
    """Whether a wrong first query was rewritten into a right last one. None: the first was right, or never
    rewritten."""
    if first_try_correct(task, output) or len(_field(output, "queries") or []) < 2:
        return None
    return is_correct(task, _field(output, "query"))


def calls(output: Any) -> int:
    """Model calls of a rollout: one for each query, one for each check."""
    return 2 * len(_field(output, "queries") or [])


def is_correct(task: Task, query: str | None) -> bool:
    db_path = task.input["db_path"]
    expected = gold_rows(db_path, task.answer)
    return query is not None and is_match(expected, elsewhere.run(db_path, query), ordered=is_ordered(task.answer))


@lru_cache(maxsize=1024)
def gold_rows(db_path: str, query: str) -> Result:
    """What the gold query gives. Kept: all rollouts of a task ask."""
    expected = run_query(db_path, query, time_limit_s=10.0)
    if expected.error is not None:
        raise ValueError(f"gold query {query!r} failed on {db_path!r}: {expected.error}")
    return expected


def is_match(expected: Result, actual: Result, *, ordered: bool) -> bool:
    if expected.error is not None or actual.error is not None:
        return False
    left = [tuple(map(_comparable, row)) for row in expected.rows]
    right = [tuple(map(_comparable, row)) for row in actual.rows]
    return left == right if ordered else Counter(left) == Counter(right)


def is_ordered(query: str) -> bool:
    """Whether there is an ORDER BY outside every parenthesis and every string."""
    flat = re.sub(r"'[^']*'|\"[^\"]*\"", "", query)
    while (inner := re.sub(r"\([^()]*\)", "", flat)) != flat:
        flat = inner
    return re.search(r"\border\s+by\b", flat, re.IGNORECASE) is not None


def _comparable(value: object) -> object:
    """Numbers that differ in the last bits, or 3 and 3.0, are the same answer."""
    return round(float(value), 6) if isinstance(value, (int, float)) else value


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else None
