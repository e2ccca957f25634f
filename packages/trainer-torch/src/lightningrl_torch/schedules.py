"""Learning-rate schedules: a factor for each step, pure functions."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["Schedule", "schedule_factor"]

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(
    schedule: Schedule, step: int, *, warmup_steps: int, total_steps: int | None, minimum: float = 0.0
) -> float:
    """Factor of the learning rate at `step` (from 0): linear warm-up, then the schedule down to `minimum`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    falling = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (1.0 - minimum) * falling
