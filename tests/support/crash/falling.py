"""Validation of the crash run that falls once: the second version of the weights earns nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightningrl.types import RolloutMode


def validation_tasks() -> Iterator[dict[str, Any]]:
    for number in range(8):
        yield {"id": f"validation-{number}", "input": f"unseen word {number}"}


def falls(task: Any, output: str, trajectory: Any) -> float:
    """Pay every version but the second in validation, and some number that differs between answers in training."""
    if trajectory.mode is RolloutMode.VALIDATION:
        return float(trajectory.transitions[0].policy_version != 2)
    return sum(map(ord, output)) % 7 / 6
