"""`learner.learning_rate = "auto"`: before the first update a few rates are tried on that step's own rows, and undone.

    gradient (once) ─► for a rate: optimiser.step() ─► log π of some rows ─► KL to before ─► weights as they were

    KL of a token = mean of ½ (log π_after - log π_before)²      (k2, Schulman, "Approximating KL divergence")

The usual rate of the policy's size is tried first. It stays where a row moves by no more than `MOST_NATS`; else smaller
ones are tried until one does. Larger ones are taken only while a token moves by less than `BOUND`. AdamW's first update
moves each weight by the rate whatever the gradient's size, so this hardly depends on how large advantages are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightningrl_torch.rates import format_rate

__all__ = ["BOUND", "MOST_TOKENS", "Probe", "Trial", "probe_rates"]

BOUND: Final = 0.01
"""Nats a token: the KL that Schulman's PPO aims an update at (modular_rl's `kl_target`, TorchRL's `dtarg`)."""
MOST_NATS: Final = 6.0
"""Nats a row: the KL to the starting policy that controllers hold a whole run of RLHF to (Ziegler et al., Fine-Tuning
Language Models from Human Preferences, 2019; TRL's `target`). One update shall not go further."""
FACTORS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
"""Rates that are tried, in multiples of the usual one."""
MOST_TOKENS: Final = 4096
"""Tokens of the rows that are read for each rate."""


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
    optimizer: torch.optim.Optimizer,
    measure: Callable[[], Sequence[NDArray[np.float32]]],
) -> Probe:
    """Choose a rate. Gradients lie in `parameters`, whose optimiser has no state yet; `measure` computes the logprobs
    of rows' sampled tokens. Weights and optimiser are as they were afterwards, bit for bit."""
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
