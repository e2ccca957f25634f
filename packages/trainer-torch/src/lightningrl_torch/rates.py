"""The learning rate where a recipe says none, by what learns and by size; and schedules. Imports no torch.

Sources, all for AdamW: RL of all weights of 1.5 to 8 billion parameters at 5e-7 to 1e-6 (TRL's GRPOConfig, verl's and
open-instruct's GRPO recipes), and of starters below a million at 4e-4 to 1e-3 (this project's examples, three seeds
each). In between, that of a policy which works already and is not to break: examples/shop, 135 million parameters, was
in circles after four steps at 5e-6. To learn the very form of an answer takes more: 5e-6 to 1e-5 at half a billion
(GRPO demonstrations on Qwen2.5-0.5B), 2e-5 at 135 million (this project's recipes). Adapters want about ten times that
(Schulman et al., LoRA Without Regret, 2025), whatever their rank, and more of it the shorter a run is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["RATES", "Rates", "Schedule", "explain_rate", "format_rate", "schedule_factor", "usual_rate"]

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Learning rates of policies of fewer parameters than `below`."""

    below: float
    all_weights: float
    adapters: float


RATES: Final = (
    Rates(below=5e6, all_weights=1e-3, adapters=3e-3),
    Rates(below=5e7, all_weights=1e-4, adapters=1e-3),
    Rates(below=2.5e8, all_weights=2e-6, adapters=3e-4),
    Rates(below=1e9, all_weights=2e-6, adapters=1e-4),
    Rates(below=float("inf"), all_weights=1e-6, adapters=2e-5),
)
"""Smallest policies first."""


USUAL_ROLLOUTS: Final = 32
"""Rollouts of a step that `RATES` are for, or more."""


def usual_rate(parameters: int, *, adapters: bool, rollouts: int | None = None) -> float:
    """The learning rate that the field takes for a policy of so many parameters; less for a step of few `rollouts`: by
    the square root, as AdamW wants it (Malladi et al. 2022, arXiv 2205.10287). None = there are enough."""
    row = next(row for row in RATES if parameters < row.below)
    rate = row.adapters if adapters else row.all_weights
    return rate * math.sqrt(min(1.0, (rollouts or USUAL_ROLLOUTS) / USUAL_ROLLOUTS))


def explain_rate(parameters: int, *, adapters: bool, rollouts: int | None = None) -> str:
    """The same with its reason: `135 M parameters, all weights: 2e-6`."""
    rate = usual_rate(parameters, adapters=adapters, rollouts=rollouts)
    few = f", {rollouts} rollouts a step" if rollouts and rollouts < USUAL_ROLLOUTS else ""
    return f"{_count(parameters)} parameters, {'adapters' if adapters else 'all weights'}{few}: {format_rate(rate)}"


def format_rate(rate: float) -> str:
    """`2e-5`, `2.5e-4`, `0`."""
    if not rate:
        return "0"
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _count(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g} {name}"
    return str(parameters)


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
