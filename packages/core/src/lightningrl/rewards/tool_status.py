"""Automatic intermediate reward (AIR) from what became of a call's tool invocations (Agent Lightning, arXiv 2508.03680).

ToolStatusReward    r_t = mean over the call's tools of (+ok | error)            pays for tools that work
ToolStatusShaping   r_t = γ·Φ(s_{t+1}) - Φ(s_t), Φ = scale · status seen last    keeps the optimal policy
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightningrl.types import ToolStatus, Trajectory

__all__ = ["ToolStatusReward", "ToolStatusShaping"]


class ToolStatusReward:
    """Each call gets the mean of its tools' values. A call without tools, or whose tools' status nobody knows, gets None."""

    def __init__(self, *, ok: float = 0.1, error: float = -0.1) -> None:
        """`ok` above 0 pays for calling tools, needed or not; where that is exploited, set it to 0 or use ToolStatusShaping.
        `error` is for error, unknown_tool, invalid_arguments and timeout."""
        self.ok = ok
        self.error = error

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        return [
            float(np.mean([self.ok if is_ok else self.error for is_ok in seen])) if seen else None for seen in _known_statuses(trajectory)
        ]


class ToolStatusShaping:
    """Potential-based shaping (Ng, Harada & Russell, ICML 1999): the state's potential is `scale` times the share of
    successes (+1) and failures (-1) in the last call that used tools, and 0 at the start and the end.

    With the same γ in the return the shaping terms telescope, so no policy gains by calling tools for their own sake.
    Use it with `discounted` credit of the same `gamma`.
    """

    def __init__(self, *, scale: float = 0.1, gamma: float = 1.0) -> None:
        self.scale = scale
        self.gamma = gamma

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        potentials = [0.0]  # Φ(s_0), then Φ after each call
        for seen in _known_statuses(trajectory):
            potentials.append(self.scale * float(np.mean([1.0 if is_ok else -1.0 for is_ok in seen])) if seen else potentials[-1])
        potentials[-1] = 0.0  # terminal
        # F(s_t, s_{t+1}) = γ·Φ(s_{t+1}) - Φ(s_t)  (Ng et al., theorem 1)
        return [self.gamma * after - before for before, after in pairwise(potentials)]


def _known_statuses(trajectory: Trajectory) -> Sequence[Sequence[bool]]:
    """For each transition whether each of its tool invocations of known status went well."""
    by_transition: dict[str, list[bool]] = {transition.id: [] for transition in trajectory.transitions}
    asked_by = {call_id: transition.id for transition in trajectory.transitions for call_id in transition.tool_call_ids}
    for call in trajectory.tool_calls:
        asker = call.transition_id or asked_by.get(call.id)
        if call.status is not ToolStatus.UNKNOWN and asker in by_transition:
            by_transition[asker].append(call.status is ToolStatus.OK)
    return [by_transition[transition.id] for transition in trajectory.transitions]
