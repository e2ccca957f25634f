"""The baseline stage as a recipe sets it: with whom a call is compared, and which rewards it is paid.

compare = "role"   A_{i,t} = (G_{i,t} - μ_k) / (σ_k + ε)     over the calls t in which role k acted  (Dr. MAS, arXiv 2602.08847)
paid               R_{i,k} = Σ_{rewards j that pay role k} w_j r_{i,j}     then as ever, on R_{·,k} for the calls of role k
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, Protocol

from lightningrl.credit.spread import ReturnBased, spread
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Trajectory, TrajectoryGroup

__all__ = ["Compare", "PaidRoles", "assign_credit", "check_comparison"]

Compare = Literal["group", "role"]


class PaidRoles(Protocol):
    """Who is paid what; `lightningrl.rewards.RewardSet` is one."""

    def paid_to(self, agent: str | None) -> frozenset[str]:
        """Names of the rewards that a role's calls are paid."""
        ...

    def total(self, values: Mapping[str, float | None], names: Collection[str]) -> float | None:
        """The weighted sum of some rewards; None where it is not known."""
        ...


def check_comparison(assigner: CreditAssigner, compare: Compare) -> None:
    """Raise ConfigError where an assigner's calls cannot be compared so."""
    if compare == "role" and not isinstance(assigner, ReturnBased):
        raise ConfigError(
            f"credit assigner {type(assigner).__name__!r} cannot compare by role: it has no `returns(trajectory)`; "
            "add `returns`, `baseline` and `epsilon` to it, or set credit.compare = 'group'"
        )


def assign_credit(
    assigner: CreditAssigner, group: TrajectoryGroup, *, compare: Compare = "group", paid: PaidRoles | None = None
) -> Advantages:
    """Advantages of the group. `compare="role"`: returns are compared within each role's calls; those that name none are a role of their
    own. With `paid`, each call is credited with the rewards that its role is paid and with no other."""

    def assign(seen: TrajectoryGroup) -> Advantages:
        if compare == "role" and isinstance(assigner, ReturnBased):
            return spread(seen, assigner, set_of=lambda call: call.agent)
        return assigner.assign(seen)

    if paid is None:
        return assign(group)
    names_of = [[paid.paid_to(call.agent) for call in trajectory.transitions] for trajectory in group.members]
    found = {
        names: assign(
            replace(
                group,
                trajectories=tuple(_paid_only(trajectory, paid, names) for trajectory in group.trajectories),
                branches=tuple(_paid_only(trajectory, paid, names) for trajectory in group.branches),
            )
        )
        for names in {names for calls in names_of for names in calls}
    }
    credited = max(map(len, found.values()), default=len(group.trajectories))
    return tuple(tuple(found[names][i][t] for t, names in enumerate(calls)) for i, calls in enumerate(names_of[:credited]))


def _paid_only(trajectory: Trajectory, paid: PaidRoles, names: frozenset[str]) -> Trajectory:
    """The trajectory as those see it who are paid `names`: its return is theirs."""
    if trajectory.reward is None:  # left out of training, whatever it earned
        return trajectory
    return replace(trajectory, reward=paid.total(trajectory.rewards, names))
