"""From returns of calls to advantages of tokens: the part that all return-based assigners share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages.baselines import Baseline, FloatArray, are_equal, baseline_advantages
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup, Transition

__all__ = ["Channel", "Counted", "ReturnBased", "call_advantages", "spread", "to_tokens"]

Counted = Literal["rollouts", "calls"]
_Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Channel:
    """Returns of one kind, one per call of a trajectory, compared with a baseline of their own."""

    returns: FloatArray
    factors: FloatArray
    """What a call's advantage is multiplied by once it is taken (the outcome's discount)."""
    turns: NDArray[np.intp] | None
    """Which turn of its trajectory a call is, from 0: it is compared with the same turn of the others, and a trajectory that
    ended before has 0.0 to come there. None = compared with all calls."""
    baseline: Baseline | None = None
    """None = the assigner's."""
    is_pooled: bool = False
    """Compared with all turns, unless the same turns of all are equal: then only their positions differ."""


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
    group: TrajectoryGroup, assigner: ReturnBased, *, set_of: Callable[[Transition], Hashable] | None = None, counted: Counted = "rollouts"
) -> Advantages:
    """Advantages of `group`, its returns compared within the whole group or, with `set_of`, within calls of equal `set_of`.

    A trajectory without a reward stays out of every mean and gets None throughout; so do calls that are not trainable,
    though their returns enter the mean. `counted`: whether each rollout weighs the same in a mean, or each call.
    """
    return to_tokens(group, call_advantages(group, assigner, set_of=set_of, counted=counted))


def call_advantages(
    group: TrajectoryGroup, assigner: ReturnBased, *, set_of: Callable[[Transition], Hashable] | None = None, counted: Counted = "rollouts"
) -> FloatArray:
    """One advantage for each call of the trajectories that have a reward, in their order."""
    rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
    calls = [call for trajectory in rewarded for call in trajectory.transitions]
    owners = np.repeat(np.arange(len(rewarded)), [len(trajectory.transitions) for trajectory in rewarded])
    lengths = np.array([len(call.completion_ids) * call.trainable for call in calls], dtype=np.float64)
    labels: dict[Hashable, int] = {}
    numbers = np.array([0 if set_of is None else labels.setdefault(set_of(call), len(labels)) for call in calls], dtype=np.intp)
    rewards = np.array([trajectory.reward for trajectory in rewarded], dtype=np.float64)
    scores = np.zeros(len(calls))
    for channels in zip(*(_channels(assigner, trajectory) for trajectory in rewarded), strict=True):
        values = np.concatenate([channel.returns for channel in channels])
        factors = np.concatenate([channel.factors for channel in channels])
        for here, absent, idle in _sets(channels, owners, numbers, rewards, is_whole=set_of is None):
            if counted == "calls":
                returns, members, tokens = values[here], np.arange(len(here)), lengths[here]
            else:
                returns = np.concatenate((values[here], idle))
                members = _ranks(np.concatenate((owners[here], absent)))
                tokens = np.concatenate((lengths[here], np.zeros(len(absent))))
            found = baseline_advantages(
                returns, members, baseline=channels[0].baseline or assigner.baseline, epsilon=assigner.epsilon, lengths=tokens
            )
            scores[here] += found[: len(here)] * factors[here]
    return scores


def to_tokens(group: TrajectoryGroup, scores: FloatArray) -> Advantages:
    """`call_advantages`, once for each token of their calls."""
    numbers = iter(scores.astype(np.float32))
    return tuple(
        (None,) * len(trajectory.transitions)
        if trajectory.reward is None
        else tuple(
            np.full(len(call.completion_ids), score) if call.trainable else None
            for call, score in zip(trajectory.transitions, numbers, strict=False)
        )
        for trajectory in group.trajectories
    )


def _channels(assigner: ReturnBased, trajectory: Trajectory) -> Sequence[Channel]:
    several = getattr(assigner, "channels", None)
    if several is not None:
        found: Sequence[Channel] = several(trajectory)
        return found
    returns = assigner.returns(trajectory)
    return (Channel(returns=returns, factors=np.ones(len(returns)), turns=None),)


def _sets(
    channels: Sequence[Channel], owners: _Indices, numbers: _Indices, rewards: FloatArray, *, is_whole: bool
) -> Iterator[tuple[_Indices, _Indices, FloatArray]]:
    """The calls that are compared with each other, the trajectories that have none among them, and what these are compared by."""
    turns = None if any(channel.turns is None for channel in channels) else np.concatenate([channel.turns for channel in channels])
    for number in range(1 if is_whole else int(numbers.max(initial=-1)) + 1):
        here = np.flatnonzero(numbers == number)
        is_member = np.ones(len(rewards), dtype=bool) if is_whole else _among(owners[here], len(rewards))
        if turns is None:  # an episode without a call to credit is still one to compare with
            absent = np.flatnonzero(is_member & ~_among(owners[here], len(rewards)))
            yield here, absent, rewards[absent]
            continue
        by_turn = [(calls, np.flatnonzero(is_member & ~_among(owners[calls], len(rewards)))) for calls in _by_turn(here, owners, turns)]
        if not channels[0].is_pooled:
            yield from ((calls, absent, np.zeros(len(absent))) for calls, absent in by_turn)
            continue
        values = np.concatenate([channel.returns for channel in channels])
        if not all(are_equal(np.concatenate((values[calls], np.zeros(len(absent))))) for calls, absent in by_turn):
            absent = np.flatnonzero(is_member & ~_among(owners[here], len(rewards)))
            yield here, absent, np.zeros(len(absent))


def _by_turn(here: _Indices, owners: _Indices, turns: _Indices) -> list[_Indices]:
    """The calls of each turn, counted within the set: a role's second call is compared with its second calls."""
    pairs = owners[here] * (int(turns.max(initial=0)) + 1) + turns[here]
    ranks = _ranks(pairs)  # of trajectory and turn together; less those of the trajectories before it
    firsts = np.full(int(owners.max(initial=0)) + 1, len(here))
    np.minimum.at(firsts, owners[here], ranks)
    ranks -= firsts[owners[here]]
    return [here[ranks == rank] for rank in range(int(ranks.max(initial=-1)) + 1)]


def _ranks(values: _Indices) -> _Indices:
    """Each value's place among the different ones, from 0."""
    is_there = _among(values, int(values.max(initial=-1)) + 1)
    ranks: _Indices = (np.cumsum(is_there) - 1)[values]
    return ranks


def _among(values: _Indices, count: int) -> NDArray[np.bool_]:
    """Which of 0 … count - 1 are among the values."""
    is_there = np.zeros(count, dtype=np.bool_)
    is_there[values] = True
    return is_there
