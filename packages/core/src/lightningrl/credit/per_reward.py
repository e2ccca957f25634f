"""Rewards that pay some roles alone: each call is credited with the rewards that its role is paid, and with no other.

R_{i,k} = Σ_{rewards j that pay role k} w_j r_{i,j}      then the assigner as ever, on R_{·,k} for the calls of role k
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup

__all__ = ["PaidRoles", "PerReward"]


class PaidRoles(Protocol):
    """Who is paid what; `lightningrl.rewards.RewardSet` is one."""

    def paid_to(self, agent: str | None) -> frozenset[str]:
        """Names of the rewards that a role's calls are paid."""
        ...

    def total(self, values: Mapping[str, float | None], names: Collection[str]) -> float | None:
        """The weighted sum of some rewards; None where it is not known."""
        ...


class PerReward:
    """Another assigner, asked once for each set of rewards that some role is paid."""

    def __init__(self, inner: CreditAssigner, rewards: PaidRoles) -> None:
        self._inner = inner
        self._rewards = rewards

    @property
    def requires(self) -> frozenset[str]:
        return self._inner.requires | {"agents"}

    def assign(self, group: TrajectoryGroup) -> Advantages:
        paid = [[self._rewards.paid_to(call.agent) for call in trajectory.transitions] for trajectory in group.trajectories]
        found = {
            names: self._inner.assign(replace(group, trajectories=tuple(self._paid_only(one, names) for one in group.trajectories)))
            for names in {names for calls in paid for names in calls}
        }
        return tuple(tuple(found[names][i][t] for t, names in enumerate(calls)) for i, calls in enumerate(paid))

    def _paid_only(self, trajectory: Trajectory, names: frozenset[str]) -> Trajectory:
        """The trajectory as those see it who are paid `names`: its return is theirs."""
        if trajectory.reward is None:  # left out of training, whatever it earned
            return trajectory
        return replace(trajectory, reward=self._rewards.total(trajectory.rewards, names))
