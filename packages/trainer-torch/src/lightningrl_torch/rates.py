"""The learning rate where a recipe says none, by what learns and by size; schedules; and a probe that confirms or moves
the rate. Imports no torch until it probes.

Sources, all for AdamW: RL of all weights of 1.5 to 8 billion parameters at 5e-7 to 1e-6 (TRL's GRPOConfig, verl's and
open-instruct's GRPO recipes), and of starters below a million at 4e-4 to 1e-3 (this project's examples, three seeds
each). In between, that of a policy which works already and is not to break: examples/shop, 135 million parameters, was
in circles after four steps at 5e-6. To learn the very form of an answer takes more: 5e-6 to 1e-5 at half a billion
(GRPO demonstrations on Qwen2.5-0.5B), 2e-5 at 135 million (this project's recipes). Adapters want about ten times that
(Schulman et al., LoRA Without Regret, 2025), whatever their rank, and more of it the shorter a run is.

`learner.learning_rate = "auto"`: before the first update a few rates are tried on that step's own rows, and undone.

    gradient (once) ─► for a rate: optimiser.step() ─► log π of some rows ─► KL to before ─► weights as they were

    KL of a token = mean of ½ (log π_after - log π_before)²      (k2, Schulman, "Approximating KL divergence")

The usual rate of the policy's size is tried first. It stays where a row moves by no more than `MOST_NATS`; else smaller
ones are tried until one does. Larger ones are taken only while a token moves by less than `BOUND`. AdamW's first update
moves each weight by the rate whatever the gradient's size, so this hardly depends on how large advantages are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = [
    "BOUND",
    "MOST_TOKENS",
    "RATES",
    "Probe",
    "Rates",
    "Schedule",
    "Trial",
    "explain_rate",
    "format_rate",
    "probe_rates",
    "schedule_factor",
    "usual_rate",
]

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
BOUND: Final = 0.01
"""Nats a token: the KL that Schulman's PPO aims an update at (modular_rl's `kl_target`, TorchRL's `dtarg`)."""
MOST_NATS: Final = 6.0
"""Nats a row: the KL to the starting policy that controllers hold a whole run of RLHF to (Ziegler et al., Fine-Tuning
Language Models from Human Preferences, 2019; TRL's `target`). One update shall not go further."""
FACTORS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Rates that are tried, in multiples of the usual one."""
MOST_TOKENS: Final = 4096
"""Tokens of the rows that are read for each rate."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A rate that was tried."""

    rate: float
    kl: float
    """Nats a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The rates that were tried, and the one that was taken."""

    rate: float
    trials: tuple[Trial, ...]
    length: float
    """Mean tokens of a row."""

    def __str__(self) -> str:
        tried = ", ".join(f"{format_rate(one.rate)} moves one by {self.length * one.kl:.2g}" for one in self.trials)
        return (
            f"learning rate {format_rate(self.rate)}: a row may move by {MOST_NATS:g} nats in an update "
            f"(by {BOUND * self.length:.2g} where the rate is above the usual one); {tried}"
        )


def probe_rates(
    usual: float,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    measure: Callable[[], Sequence[NDArray[np.float32]]],
) -> Probe:
    """Choose a rate. Gradients lie in `parameters`, whose optimiser has no state yet; `measure` computes the logprobs
    of rows' sampled tokens. Weights and optimiser are as they were afterwards, bit for bit."""
    import torch

    before = [parameter.detach().clone() for parameter in parameters]
    rows = measure()
    old, length = np.concatenate(rows).astype(np.float64), sum(map(len, rows)) / len(rows)
    moves: dict[float, float] = {}

    def is_within(factor: float) -> bool:
        for group in optimizer.param_groups:
            group["lr"] = usual * factor
        optimizer.step()
        try:
            moves[factor] = float(np.square(np.concatenate(measure()) - old).mean() / 2)
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()
        return moves[factor] <= (BOUND if factor > 1.0 else MOST_NATS / length)  # False where it is not a number

    middle, chosen = FACTORS.index(1.0), FACTORS[0]
    if is_within(1.0):
        chosen = 1.0
        for factor in FACTORS[middle + 1 :]:
            if not is_within(factor):
                break
            chosen = factor
    else:
        for factor in reversed(FACTORS[:middle]):
            if is_within(factor):
                chosen = factor
                break
    trials = tuple(Trial(rate=usual * factor, kl=kl) for factor, kl in sorted(moves.items()))
    return Probe(rate=usual * chosen, trials=trials, length=length)
