"""Potential-based shaping: any intermediate reward in a form that no policy gains by.

    Φ(s_t)   the reward's value at the last call before t that it had an opinion on; 0 at the start and at the end
    F_t      what makes the return of each call the same whatever it does: Σ_{k ≥ t} γ^{k-t} F_k = -Φ(s_t)

Where nothing branches this is F_t = γ·Φ(s_{t+1}) - Φ(s_t) with Φ(terminal) = 0 (Ng, Harada & Russell, ICML 1999,
theorem 1). Where one call has several successors, sub-agents that grow from one history or the choices of one call,
each gives back its own at its end, and the call is paid for them as its return joins theirs:

    main ─┬► left       F(left) = -Φ      F(main) + Φ(main) = γ·Φ(left) + γ²·Φ(right)      sum, in order of arrival
          └► right      F(right) = -Φ                         γ·(Φ(left) + Φ(right)) / 2     mean
                                                              γ·Φ(left)                      first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from lightningrl.protocols import CreditAssigner
from lightningrl.types import Transition
from lightningrl_credit.rewards.lineages import following, successors

__all__ = ["Joins", "discount_of", "shape"]

Joins = Literal["sum", "mean", "first"]
"""Way that credit joins the returns of several branches of one call."""

_GRID = 2.0**40
"""Potentials are multiples of 1/_GRID, so that sums of them are exact and with γ = 1 cancel to exactly nothing."""


def discount_of(assigner: CreditAssigner) -> tuple[float, Joins] | None:
    """Discount by which an assigner adds up the pay of calls: its `gamma`, per call, and `joins`, "sum" by default.

    None = it has no gamma.
    """
    gamma = getattr(assigner, "gamma", None)
    return (gamma, getattr(assigner, "joins", "sum")) if isinstance(gamma, int | float) else None


def shape(
    transitions: Sequence[Transition], values: Sequence[float | None], *, gamma: float, joins: Joins = "sum"
) -> list[float]:
    """Shaping reward of each call. `values`: the plain reward's; None = no opinion, the potential stays."""
    later_calls = following(transitions)
    potentials = np.zeros(len(transitions))
    for t, value in enumerate(values):
        if value is not None:
            potentials[later_calls[t][1:]] = round(value * _GRID) / _GRID
    shaping = -potentials
    if joins == "sum":
        for t in reversed(range(len(transitions))):
            later = later_calls[t][1:]
            shaping[t] -= gamma ** np.arange(1, len(later) + 1) @ shaping[later]
    else:
        for t, joined in enumerate(successors(transitions)):
            if joined:
                shaping[t] += gamma * potentials[joined if joins == "mean" else joined[:1]].mean()
    return [float(value) + 0.0 for value in shaping]
