"""Tasks and reward of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def train_tasks() -> Iterator[dict[str, Any]]:
    for number in range(20):
        yield {"id": f"train-{number}", "input": f"word {number}"}


def validation_tasks() -> Iterator[dict[str, Any]]:
    yield {"id": "validation-0", "input": "unseen word"}


def letters(task: Any, output: str, trajectory: Any) -> float:
    """Some number that differs between answers."""
    return sum(map(ord, output)) % 7 / 6
