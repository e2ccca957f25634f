"""Credit by returns of calls: a return less its baseline is the call's advantage, and so that of each of its tokens.

    ReturnBased.returns(trajectory) ─► Channel ─► sets of calls that are compared ─► baseline_advantages ─► to_tokens

Its simplest assigner gives every call of an episode the episode's return (Agent Lightning, arXiv 2508.03680); the token
level is left to the baseline of the single-turn method below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lightningrl.advantages import FloatArray, are_equal, mean
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup, Transition

__all__ = [
    "DIVIDING",
    "Baseline",
    "Channel",
    "Counted",
    "IdenticalAssignment",
    "ReturnBased",
    "baseline_advantages",
    "call_advantages",
    "change_credit",
    "change_members",
    "check_baseline",
    "check_gamma",
    "spread",
    "to_tokens",
    "undivided",
    "with_epsilon",
    "without_epsilon",
]

Baseline = Literal["grpo", "dr_grpo", "rloo", "maxrl", "opo", "none"]
DIVIDING: Final[frozenset[Baseline]] = frozenset({"grpo", "maxrl"})
"""Baselines that divide by the returns' own deviation or mean: a tenth of the returns has the same advantages."""
Counted = Literal["rollouts", "calls"]
_Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Channel:
    """Returns of one kind, one per call of a trajectory, compared with a baseline of their own."""

    returns: FloatArray
    factors: FloatArray
    """Multipliers of the calls' advantages once these are taken (the outcome's discount)."""
    turns: NDArray[np.intp] | None
    """Number of the turn that each call is, from 0. A turn is compared with the same turn of the others, and a
    trajectory that ended before has 0.0 to come there. None = compared with all calls."""
    baseline: Baseline | None = None
    """None = the assigner's."""
    is_pooled: bool = False
    """Compared with all turns, unless the same turns of all are equal: then only their positions differ."""


class ReturnBased(CreditAssigner):
    """Gives each call a return and compares returns with a baseline. A subclass writes `returns`; one with several
    kinds of returns writes `channels` in its place, whose advantages are added."""

    baseline: Baseline = "grpo"
    epsilon: float = 1e-6

    def returns(self, trajectory: Trajectory) -> FloatArray:
        """One return per transition of a trajectory that has a reward."""
        raise NotImplementedError

    def channels(self, trajectory: Trajectory) -> Sequence[Channel]:
        """Channels of the returns."""
        returns = self.returns(trajectory)
        return (Channel(returns=returns, factors=np.ones(len(returns)), turns=None),)

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return spread(group, self)

    def assign_by_role(self, group: TrajectoryGroup, *, counted: Counted = "rollouts") -> Advantages:
        """Compare within each role's calls. `counted`: each of the `rollouts` weighs the same in a role's mean, or each
        of its `calls`, as in the paper."""
        return spread(group, self, set_of=lambda call: call.agent, counted=counted)


class IdenticalAssignment(ReturnBased):
    """A_{i,t} = baseline(R_i) for each call t of episode i."""

    requires = frozenset({"group"})

    def __init__(self, *, baseline: Baseline = "grpo", epsilon: float = 1e-6) -> None:
        """`baseline`: `grpo` (R - μ)/(σ + ε), `dr_grpo` R - μ, `rloo` R - mean of the others, `none` R."""
        check_baseline(baseline)
        self.baseline: Baseline = baseline
        self.epsilon = epsilon
        if baseline == "none":
            self.requires = frozenset()

    def returns(self, trajectory: Trajectory) -> FloatArray:
        """The episode's reward, once for each call."""
        return np.full(len(trajectory.transitions), trajectory.reward, dtype=np.float64)


def with_epsilon(baseline: Baseline, *, epsilon: float = 1e-6) -> IdenticalAssignment:
    """Build an assigner whose baseline divides by something, as a recipe names it."""
    return IdenticalAssignment(baseline=baseline, epsilon=epsilon)


def without_epsilon(baseline: Baseline) -> IdenticalAssignment:
    """Build an assigner whose baseline divides by nothing."""
    return IdenticalAssignment(baseline=baseline)


def check_baseline(baseline: str) -> None:
    """Raise ConfigError when there is no such baseline."""
    if baseline not in get_args(Baseline):
        raise ConfigError(f"no baseline named {baseline!r}; there are: {', '.join(get_args(Baseline))}")


def undivided(baseline: Baseline) -> Baseline:
    """The same baseline without its division, for what stands beside another part in a sum and keeps its size."""
    return "dr_grpo" if baseline in DIVIDING else baseline


def baseline_advantages(
    returns: FloatArray,
    owners: NDArray[np.intp],
    *,
    baseline: Baseline,
    epsilon: float = 1e-6,
    lengths: FloatArray | None = None,
) -> FloatArray:
    """Advantages of `returns[n]`, where `owners[n]` is the trajectory (0…N-1, none empty) that return n belongs to.

    Mean and standard deviation weigh each trajectory once, split evenly over its returns, so long episodes count no
    more than short ones; with one return per trajectory these are the ordinary ones. The standard deviation is the
    sample's (ddof = 1), as in verl and TRL; ε is verl's. `lengths`: sampled tokens of each return's call, which `opo`
    weighs by; None = equal. One trajectory, or returns equal but for rounding, give exact zeros, except with `none`.

    Raises ConfigError where `maxrl` has a return below 0.
    """
    if baseline == "none":
        return returns.copy()
    counts = np.bincount(owners).astype(np.float64)
    n = len(counts)
    if n < 2 or are_equal(returns):
        return np.zeros_like(returns)
    means: FloatArray = np.bincount(owners, weights=returns) / counts
    if baseline == "rloo":
        others: FloatArray = (means.sum() - means[owners]) / (n - 1)
        return returns - others  # A_i = R_i - 1/(N-1) Σ_{j≠i} R_j  (RLOO)
    if baseline == "opo":
        tokens = np.ones(n) if lengths is None or not lengths.any() else np.bincount(owners, weights=lengths)
        # A_i = R_i - Σ_j ℓ_j R_j / Σ_j ℓ_j  (OPO, arXiv 2505.23585)
        # measured from a return of the set, so that near returns round to nothing
        least = means.min()
        middle = float(tokens @ (means - least)) / float(tokens.sum())
        weighed: FloatArray = returns - least - middle
        return weighed
    middle = mean(means)
    centred: FloatArray = returns - middle
    if baseline == "dr_grpo":
        return centred  # A_i = R_i - μ  (Dr. GRPO)
    if baseline == "maxrl":
        if (least := float(returns.min())) < 0.0:
            raise ConfigError(
                f"baseline 'maxrl' divides by the mean return, and one is {least:g}; "
                "reward with 0 or more, or take 'grpo'"
            )
        return centred / (middle + epsilon)  # A_i = (R_i - μ) / (μ + ε)  (MaxRL, arXiv 2602.02710, algorithm 1)
    variance = float((centred**2 / counts[owners]).sum()) / (n - 1)
    return centred / (math.sqrt(variance) + epsilon)  # A_i = (R_i - μ) / (σ + ε)  (GRPO, outcome supervision)


def check_gamma(name: str, gamma: float) -> None:
    """Raise ConfigError for what is no discount."""
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"{name} {gamma!r} is not between 0 and 1; try 0.95")


def spread(
    group: TrajectoryGroup,
    assigner: ReturnBased,
    *,
    set_of: Callable[[Transition], Hashable] | None = None,
    counted: Counted = "rollouts",
) -> Advantages:
    """Advantages of the group, its returns compared within all of it or, with `set_of`, within calls of equal `set_of`.

    A trajectory without a reward stays out of every mean and gets None throughout; so do calls that are not trainable,
    though their returns enter the mean. `counted`: `rollouts` weigh the same in a mean, or `calls`.
    """
    return to_tokens(group, call_advantages(group, assigner, set_of=set_of, counted=counted))


def call_advantages(
    group: TrajectoryGroup,
    assigner: ReturnBased,
    *,
    set_of: Callable[[Transition], Hashable] | None = None,
    counted: Counted = "rollouts",
) -> FloatArray:
    """One advantage for each call of the trajectories that have a reward, in their order."""
    rewarded = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
    calls = [call for trajectory in rewarded for call in trajectory.transitions]
    owners = np.repeat(np.arange(len(rewarded)), [len(trajectory.transitions) for trajectory in rewarded])
    lengths = np.array([len(call.completion_ids) * call.trainable for call in calls], dtype=np.float64)
    labels: dict[Hashable, int] = {}
    numbers = np.array(
        [0 if set_of is None else labels.setdefault(set_of(call), len(labels)) for call in calls], dtype=np.intp
    )
    rewards = np.array([trajectory.reward for trajectory in rewarded], dtype=np.float64)
    scores = np.zeros(len(calls))
    for channels in zip(*map(assigner.channels, rewarded), strict=True):
        values = np.concatenate([channel.returns for channel in channels])
        factors = np.concatenate([channel.factors for channel in channels])
        for here, absent, idle in _sets(channels, owners, numbers, rewards, is_whole=set_of is None):
            if counted == "calls":
                returns, members, tokens = values[here], np.arange(len(here)), lengths[here]
            else:
                returns = np.concatenate((values[here], idle))
                members = _ranks(np.concatenate((owners[here], absent)))
                tokens = np.concatenate((lengths[here], np.zeros(len(absent))))
            advantages = baseline_advantages(
                returns,
                members,
                baseline=channels[0].baseline or assigner.baseline,
                epsilon=assigner.epsilon,
                lengths=tokens,
            )
            scores[here] += advantages[: len(here)] * factors[here]
    return scores


def to_tokens(group: TrajectoryGroup, scores: FloatArray) -> Advantages:
    """Repeat each call's advantage (`call_advantages`) for all of its tokens."""
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


def change_credit(
    group: TrajectoryGroup, advantages: Advantages, change: Callable[[Transition, Array], Array | None]
) -> Advantages:
    """Return `change(call, credit)` for each call that is scored; None stays None."""
    return tuple(
        tuple(
            None if credit is None else change(call, credit)
            for call, credit in zip(trajectory.transitions, calls, strict=True)
        )
        for trajectory, calls in zip(group.members, advantages, strict=True)
    )


def change_members(group: TrajectoryGroup, change: Callable[[Trajectory], Trajectory]) -> TrajectoryGroup:
    """Return the group with each of its trajectories and branches changed."""
    return replace(
        group, trajectories=tuple(map(change, group.trajectories)), branches=tuple(map(change, group.branches))
    )


def _sets(
    channels: Sequence[Channel], owners: _Indices, numbers: _Indices, rewards: FloatArray, *, is_whole: bool
) -> Iterator[tuple[_Indices, _Indices, FloatArray]]:
    """Sets of calls that are compared, the trajectories that have no call in the set, and the returns of these."""
    # Three rewarded rollouts of two, one and no calls, calls numbered through: owners = [0, 0, 1].
    #     no turns         [0 1 2], absent [2] with its reward              all calls, and the rollout without any
    #     turns [0 1 0]    [0 2], absent [2]; [1], absent [1 2]: 0.0 each   first calls, then second calls
    #     pooled           [0 1 2], absent [2]: 0.0                         if the first or the second calls differ
    turns = (
        None
        if any(channel.turns is None for channel in channels)
        else np.concatenate([channel.turns for channel in channels])
    )
    for number in range(1 if is_whole else int(numbers.max(initial=-1)) + 1):
        here = np.flatnonzero(numbers == number)
        is_member = np.ones(len(rewards), dtype=bool) if is_whole else _among(owners[here], len(rewards))
        if turns is None:  # an episode without a call to credit is still one to compare with
            absent = np.flatnonzero(is_member & ~_among(owners[here], len(rewards)))
            yield here, absent, rewards[absent]
            continue
        by_turn = [
            (calls, np.flatnonzero(is_member & ~_among(owners[calls], len(rewards))))
            for calls in _by_turn(here, owners, turns)
        ]
        if not channels[0].is_pooled:
            yield from ((calls, absent, np.zeros(len(absent))) for calls, absent in by_turn)
            continue
        values = np.concatenate([channel.returns for channel in channels])
        if not all(are_equal(np.concatenate((values[calls], np.zeros(len(absent))))) for calls, absent in by_turn):
            absent = np.flatnonzero(is_member & ~_among(owners[here], len(rewards)))
            yield here, absent, np.zeros(len(absent))


def _by_turn(here: _Indices, owners: _Indices, turns: _Indices) -> list[_Indices]:
    """Calls of each turn, counted within the set: a role's second call is compared with its second calls."""
    # Of trajectories 0 and 1 a role made turns 1, 3 and turn 2:  owners [0 0 1], turns [1 3 2]
    #     pairs  [1 3 6]     trajectory · 4 + turn: one number for both, in order
    #     ranks  [0 1 2]     less the first of each trajectory, [0 0 2]  ─►  [0 1 0]
    #     so its first calls are call 0 and call 2, its second is call 1
    pairs = owners[here] * (int(turns.max(initial=0)) + 1) + turns[here]
    ranks = _ranks(pairs)
    firsts = np.full(int(owners.max(initial=0)) + 1, len(here))
    np.minimum.at(firsts, owners[here], ranks)
    ranks -= firsts[owners[here]]
    return [here[ranks == rank] for rank in range(int(ranks.max(initial=-1)) + 1)]


def _ranks(values: _Indices) -> _Indices:
    """Place of each value among the different ones, from 0: [4, 9, 4] gives [0, 1, 0]."""
    is_there = _among(values, int(values.max(initial=-1)) + 1)
    ranks: _Indices = (np.cumsum(is_there) - 1)[values]
    return ranks


def _among(values: _Indices, count: int) -> NDArray[np.bool_]:
    """For each of 0 … count - 1: is it among the values?"""
    is_there = np.zeros(count, dtype=np.bool_)
    is_there[values] = True
    return is_there
