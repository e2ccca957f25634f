"""A reward with which each step of a run teaches, whatever is sampled: for tests that look at anything but the
reward."""

from __future__ import annotations

from typing import Any

__all__ = ["OF_EVERY_OTHER", "of_every_other"]

OF_EVERY_OTHER = f"{__file__}:of_every_other"


def of_every_other(task: Any, output: Any, trajectory: Any) -> float:
    """1 for every other rollout of a group: by its number, not by what it did."""
    return float(int(trajectory.rollout_id[-1]) % 2)
