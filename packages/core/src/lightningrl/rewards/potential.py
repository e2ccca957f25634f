"""Potential-based shaping: any intermediate reward in a form that no policy gains by.

    Φ(s_t)   the reward's value at the last call before t that it had an opinion on; 0 at the start and at the end
    F_t      what makes the discounted rewards to go of each call the same whatever it does: Σ_{k ≥ t} γ^{k-t} F_k = -Φ(s_t)

Where nothing branches this is F_t = γ·Φ(s_{t+1}) - Φ(s_t) with Φ(terminal) = 0 (Ng, Harada & Russell, ICML 1999, theorem 1). Where one call
has several successors, sub-agents that grow from one history or the choices of one call, it is paid γ^k·Φ for each of them, since each
gives back its own at its end:

    main ─┬► left       F(left) = -Φ      F(main) = γ·Φ(left) + γ²·Φ(right) - Φ(main)
          └► right      F(right) = -Φ
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightningrl.lineages import following
from lightningrl.types import Transition

__all__ = ["shape"]

_GRID = 2.0**40
"""Potentials are multiples of 1/_GRID, so that sums of them are exact and with γ = 1 cancel to exactly nothing."""


def shape(transitions: Sequence[Transition], values: Sequence[float | None], *, gamma: float) -> list[float]:
    """The shaping reward of each call. `values`: the plain reward's, None = no opinion: the potential stays."""
    later_calls = following(transitions)
    potentials = np.zeros(len(transitions))
    for t, value in enumerate(values):
        if value is not None:
            potentials[later_calls[t][1:]] = round(value * _GRID) / _GRID
    shaping = np.zeros(len(transitions))
    for t in reversed(range(len(transitions))):
        later = later_calls[t][1:]
        to_come = gamma ** np.arange(1, len(later) + 1) @ shaping[later]
        shaping[t] = -potentials[t] - to_come
    return [float(value) + 0.0 for value in shaping]
