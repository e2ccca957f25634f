"""The baseline stage as a recipe sets it: with whom a call is compared, and which rewards it is paid.

compare = "role"   A_{i,t} = (G_{i,t} - μ_k) / (σ_k + ε)    over the calls t in which role k acted
                                                            (Dr. MAS, arXiv 2602.08847)
paid               R_{i,k} = Σ_{j pays k} w_j r_{i,j}       then as ever, on R_{·,k} for the calls of role k
weights            A_{i,t} = Σ_j w_j · A_{i,t}(r_j)         each reward compared by itself, then added
                                                            (GDPO, arXiv 2601.05242, eq. 4, 5)
whiten             A_t ← (A_t - mean) / (std + ε)           over the trained tokens of a whole step
                                                            (REINFORCE++, arXiv 2501.03262, eq. 8)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Literal

import numpy as np

from lightningrl.advantages import mean
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Array, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.baselines import Counted, ReturnBased, change_credit, change_members
from lightningrl_credit.rewards.value import RewardWeights

__all__ = ["Compare", "assign_credit", "check_comparison", "whiten"]

Compare = Literal["group", "role"]


def check_comparison(assigner: CreditAssigner, compare: Compare) -> None:
    """Raise ConfigError where an assigner's calls cannot be compared so."""
    if compare == "role" and not assigner.has("assign_by_role"):
        raise ConfigError(
            f"credit assigner {type(assigner).__name__!r} cannot compare by role: it has no `returns(trajectory)`; "
            "make it a `lightningrl.ReturnBased`, or set credit.compare = 'group'"
        )


def _of_members(group: TrajectoryGroup, advantages: Advantages) -> Advantages:
    """Add None for the branches, where an assigner gave them nothing."""
    unsaid = () if len(advantages) > len(group.trajectories) else group.branches
    return (*advantages, *((None,) * len(branch.transitions) for branch in unsaid))


def assign_credit(
    assigner: CreditAssigner,
    group: TrajectoryGroup,
    *,
    compare: Compare = "group",
    counted: Counted = "rollouts",
    paid: RewardWeights | None = None,
    weights: Mapping[str, float] | None = None,
) -> Advantages:
    """Advantages of the group.

    `compare="role"`: returns are compared within each role's calls; calls without a role are a role of their own. By
    `counted` each of the rollouts weighs the same in a role's mean, or each of the calls (of a `ReturnBased` alone).
    With `paid`, each call is credited with the rewards that its role is paid and with no other. With `weights` of the
    terminal rewards, by name, each of them is compared by itself; turn rewards and evidence count once beside them.
    """
    check_comparison(assigner, compare)

    def assign_sum(seen: TrajectoryGroup) -> Advantages:
        if compare == "group":
            return _of_members(seen, assigner.assign(seen))
        if counted == "calls" and isinstance(assigner, ReturnBased):
            return _of_members(seen, assigner.assign_by_role(seen, counted="calls"))
        return _of_members(seen, assigner.assign_by_role(seen))

    def assign(seen: TrajectoryGroup, names: Collection[str] | None = None) -> Advantages:
        if weights is None:
            return assign_sum(seen)
        rest = assign_sum(_with_rewards(seen, lambda _: 0.0))
        total = rest
        for name, weight in weights.items():
            if names is None or name in names:
                alone = _with_rewards(seen, methodcaller("get", name))
                total = _add(total, assign_sum(alone), rest, weight)
        return total

    if paid is None:
        return assign(group)
    names_of = [[paid.paid_to(call.agent) for call in trajectory.transitions] for trajectory in group.members]
    credit_of = {
        names: assign(_with_rewards(group, partial(paid.total, names=names)), names)
        for names in {names for calls in names_of for names in calls}
    }
    return tuple(tuple(credit_of[names][i][t] for t, names in enumerate(calls)) for i, calls in enumerate(names_of))


def _with_rewards(
    group: TrajectoryGroup, reward_of: Callable[[Mapping[str, float | None]], float | None]
) -> TrajectoryGroup:
    """Return the group with other returns, of the named rewards; a trajectory that had none stays out of training."""

    def change(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.reward is None else replace(trajectory, reward=reward_of(trajectory.rewards))

    return change_members(group, change)


def _add(total: Advantages, alone: Advantages, rest: Advantages, weight: float) -> Advantages:
    """Total + weight · (alone - rest), for calls that are scored in all of them."""
    return tuple(
        tuple(
            mine if mine is None or its is None or both is None else (mine + weight * (its - both)).astype(np.float32)
            for mine, its, both in zip(*calls, strict=True)
        )
        for calls in zip(total, alone, rest, strict=True)
    )


def whiten(
    groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages], *, epsilon: float = 1e-8
) -> tuple[Advantages, ...]:
    """Scale advantages to mean 0 and deviation 1 over each policy's trained tokens of all groups; None stays None.
    Tokens that a grammar forced are not trained (`Transition.chosen`): they count in neither.

    A_t ← (A_t - mean) / (std + ε), over the global batch  (REINFORCE++, arXiv 2501.03262, eq. 8)
    """
    trained: dict[str, list[Array]] = {}
    for group, by_trajectory in zip(groups, advantages, strict=True):
        for trajectory, by_call in zip(group.members, by_trajectory, strict=True):
            for transition, credit in zip(trajectory.transitions, by_call, strict=True):
                if credit is not None and transition.trainable:
                    trained.setdefault(transition.policy, []).append(credit[transition.chosen])
    tokens = {policy: np.concatenate(arrays).astype(np.float64) for policy, arrays in trained.items()}
    scales = {policy: (mean(values), float(values.std()) + epsilon) for policy, values in tokens.items() if values.size}

    def scale(transition: Transition, credit: Array) -> Array:
        if transition.policy not in scales:
            return credit
        middle, deviation = scales[transition.policy]
        return ((credit - middle) / deviation).astype(np.float32)

    return tuple(change_credit(group, credit, scale) for group, credit in zip(groups, advantages, strict=True))
