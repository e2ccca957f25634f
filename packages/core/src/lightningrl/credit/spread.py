"""From returns of calls to advantages of tokens: the part that all return-based assigners share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, runtime_checkable

import numpy as np

from lightningrl.credit.baselines import Baseline, FloatArray, baseline_advantages
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup, Transition

__all__ = ["ReturnBased", "spread"]


@runtime_checkable
class ReturnBased(Protocol):
    """An assigner that gives each call a return and compares returns with a baseline."""

    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def baseline(self) -> Baseline: ...
    @property
    def epsilon(self) -> float: ...
    def returns(self, trajectory: Trajectory) -> FloatArray:
        """One return per transition of a trajectory that has a reward."""
        ...

    def assign(self, group: TrajectoryGroup) -> Advantages: ...


def spread(
    group: TrajectoryGroup,
    assigner: ReturnBased,
    *,
    set_of: Callable[[Transition], Hashable] | None = None,
    by_step: bool = False,
) -> Advantages:
    """Advantages of `group`, its returns compared within the whole group or, with `set_of`, within calls of equal `set_of`.

    A trajectory without a reward stays out of every mean and gets None throughout; so do calls that are not trainable,
    though their returns enter the mean. `by_step` lets every call count once, instead of every trajectory.
    """
    sets: dict[Hashable, list[tuple[int, int, float]]] = {}
    for i, trajectory in enumerate(group.trajectories):
        if trajectory.reward is None:
            continue
        if not trajectory.transitions and set_of is None:
            sets.setdefault(None, []).append((i, -1, trajectory.reward))  # no call to credit, but an episode to compare with
        for t, (transition, value) in enumerate(zip(trajectory.transitions, assigner.returns(trajectory), strict=True)):
            sets.setdefault(set_of(transition) if set_of else None, []).append((i, t, float(value)))
    scores: dict[tuple[int, int], float] = {}
    for rows in sets.values():
        owners = np.arange(len(rows)) if by_step else np.unique([i for i, _, _ in rows], return_inverse=True)[1]
        values = np.array([value for _, _, value in rows], dtype=np.float64)
        found = baseline_advantages(values, owners, baseline=assigner.baseline, epsilon=assigner.epsilon)
        scores.update({(i, t): float(advantage) for (i, t, _), advantage in zip(rows, found, strict=True)})
    return tuple(
        tuple(_tokens(transition, scores.get((i, t))) for t, transition in enumerate(trajectory.transitions))
        for i, trajectory in enumerate(group.trajectories)
    )


def _tokens(transition: Transition, advantage: float | None) -> Array | None:
    if advantage is None or not transition.trainable:
        return None
    return np.full(len(transition.completion_ids), advantage, dtype=np.float32)
