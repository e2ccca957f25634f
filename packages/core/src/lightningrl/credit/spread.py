"""From returns of calls to advantages of tokens: the part that all return-based assigners share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightningrl.credit.baselines import Baseline, FloatArray, baseline_advantages
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup, Transition

__all__ = ["Channel", "ReturnBased", "spread"]

_Key = tuple[int, int]
"""Trajectory, call; a call of -1 is none that anybody made, there to be compared with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Channel:
    """Returns of one kind, one per call of a trajectory, compared with a baseline of their own."""

    returns: FloatArray
    factors: FloatArray
    """What a call's advantage is multiplied by once it is taken (the outcome's discount)."""
    turns: NDArray[np.intp] | None
    """Which turn of its trajectory a call is, from 0: it is compared with the same turn of the others, and a trajectory that
    ended before has 0.0 to come there. None = compared with all calls."""


@runtime_checkable
class ReturnBased(Protocol):
    """An assigner that gives each call a return and compares returns with a baseline.

    One with several kinds of returns has `channels(trajectory) -> Sequence[Channel]` too, whose advantages are added.
    """

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
) -> Advantages:
    """Advantages of `group`, its returns compared within the whole group or, with `set_of`, within calls of equal `set_of`.

    A trajectory without a reward stays out of every mean and gets None throughout; so do calls that are not trainable,
    though their returns enter the mean.
    """
    rewarded = {i: trajectory for i, trajectory in enumerate(group.trajectories) if trajectory.reward is not None}
    channels = {i: _channels(assigner, trajectory) for i, trajectory in rewarded.items()}
    scores: dict[_Key, float] = {}
    for number in range(max(map(len, channels.values()), default=0)):
        chosen = {i: channels[i][number] for i in rewarded}
        for returns in _sets(rewarded, chosen, set_of):
            owners = np.unique([i for i, _ in returns], return_inverse=True)[1]
            values = np.array(list(returns.values()), dtype=np.float64)
            found = baseline_advantages(values, owners, baseline=assigner.baseline, epsilon=assigner.epsilon)
            for (i, t), advantage in zip(returns, found, strict=True):
                if t >= 0:
                    scores[i, t] = scores.get((i, t), 0.0) + float(advantage * chosen[i].factors[t])
    return tuple(
        tuple(_tokens(transition, scores.get((i, t))) for t, transition in enumerate(trajectory.transitions))
        for i, trajectory in enumerate(group.trajectories)
    )


def _channels(assigner: ReturnBased, trajectory: Trajectory) -> Sequence[Channel]:
    several = getattr(assigner, "channels", None)
    if several is not None:
        found: Sequence[Channel] = several(trajectory)
        return found
    returns = assigner.returns(trajectory)
    return (Channel(returns=returns, factors=np.ones(len(returns)), turns=None),)


def _sets(
    trajectories: Mapping[int, Trajectory], channels: Mapping[int, Channel], set_of: Callable[[Transition], Hashable] | None
) -> list[dict[_Key, float]]:
    """The returns that are compared with each other."""
    members: dict[Hashable, dict[int, list[int]]] = {}
    """Of each set its trajectories with their calls."""
    for i, trajectory in trajectories.items():
        if set_of is None:
            members.setdefault(None, {})[i] = list(range(len(trajectory.transitions)))
            continue
        for t, transition in enumerate(trajectory.transitions):
            members.setdefault(set_of(transition), {}).setdefault(i, []).append(t)
    sets: list[dict[_Key, float]] = []
    for calls_of in members.values():
        if any(channels[i].turns is None for i in calls_of):
            sets.append(_whole(trajectories, channels, calls_of))
        else:
            sets += _by_turn(channels, calls_of)
    return sets


def _whole(
    trajectories: Mapping[int, Trajectory], channels: Mapping[int, Channel], calls_of: Mapping[int, Sequence[int]]
) -> dict[_Key, float]:
    """All calls of a set; an episode without a call to credit is still one to compare with."""
    returns = {(i, t): float(channels[i].returns[t]) for i, calls in calls_of.items() for t in calls}
    return returns | {(i, -1): float(trajectories[i].reward or 0.0) for i, calls in calls_of.items() if not calls}


def _by_turn(channels: Mapping[int, Channel], calls_of: Mapping[int, Sequence[int]]) -> list[dict[_Key, float]]:
    """One set for each turn, counted within the set: a role's second call is compared with its second calls."""
    by_turn: list[dict[_Key, float]] = []
    for i, calls in calls_of.items():
        turns = channels[i].turns
        assert turns is not None
        for turn, t in zip(np.unique(turns[list(calls)], return_inverse=True)[1], calls, strict=True):
            while len(by_turn) <= turn:
                by_turn.append({})
            by_turn[int(turn)][i, t] = float(channels[i].returns[t])
    for returns in by_turn:
        for missing in calls_of.keys() - {i for i, _ in returns}:
            returns[missing, -1] = 0.0
    return by_turn


def _tokens(transition: Transition, advantage: float | None) -> Array | None:
    if advantage is None or not transition.trainable:
        return None
    return np.full(len(transition.completion_ids), advantage, dtype=np.float32)
