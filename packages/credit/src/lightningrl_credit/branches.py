"""Credit by replay branching: the worth of each state is measured, by sampling on from it.

    rollout   s_0 ─a_0─► s_1 ─a_1─► s_2 ─a_2─► R          V̂(s_t) = mean return of the branches that leave at s_t
                          ├─► G  G  G  G   └─► G  G  G  G
    A_t = Q̂(s_t, a_t) - V̂(s_t)                            (VinePPO, arXiv 2410.01679, eq. 8)

s_t is the situation of the agent and its tools before call t. Q̂(s_t, a_t) is the mean of the branches at s_{t+1} and
of the rollout itself, which is one more sample from there; V̂(s_t) leaves the rollout out, as it knows a_t already.
V̂(s_0) is the mean of the group's other rollouts. Where a state was not branched at, or every branch from it diverged,
the calls on both sides of it share one difference.

With `train`, calls that the branches sampled are trained as well, each against the others that left there
(tree-structured groups, Tree-GRPO, arXiv 2509.21240); the repeated calls never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lightningrl.advantages import FloatArray, mean
from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner
from lightningrl.types import Advantages, Array, BranchPoint, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.baselines import to_tokens

__all__ = ["Branches", "states"]


@dataclass(kw_only=True, eq=False)
class Branches(CreditAssigner):
    """Measured advantages, for agents and tools that repeat when run again; `branches_diverged` counts where not."""

    requires: frozenset[str] = field(init=False, default=frozenset({"branches"}))
    samples: int = 4
    """Branches from each state, K (VinePPO: 9)."""
    points: int = 0
    """Most states of a rollout, where the call before was least likely (entropy-guided, AT²PO, 2601.04767); 0 = all."""
    rollouts: int = 0
    """The first so many rollouts of a group; 0 = all. The others have their return's difference to the mean."""
    equal: bool = False
    """Branch, too, where all rollouts of a group earned the same."""
    train: bool = False
    """Train the branches, too."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("samples", self.samples, 1),
            ("points", self.points, 0),
            ("rollouts", self.rollouts, 0),
        ):
            if value < least:
                raise ConfigError(f"credit assigner 'branches': {name} is {value!r}; set it to {least} or more")

    def branch_points(self, trajectories: Sequence[Trajectory], /) -> Mapping[BranchPoint, int]:
        rewarded = [trajectory for trajectory in trajectories if trajectory.reward is not None]
        if not self.equal and len({trajectory.reward for trajectory in rewarded}) < 2:
            return {}
        chosen = rewarded[: self.rollouts] if self.rollouts else rewarded
        return {
            BranchPoint(rollout_id=rollout.rollout_id, attempt=rollout.attempt, calls=calls): self.samples
            for rollout in chosen
            for calls in self._chosen(rollout.transitions)
        }

    def assign(self, group: TrajectoryGroup) -> Advantages:
        sampled = _returns(group)
        rewarded = [rollout for rollout in group.trajectories if rollout.reward is not None]
        first = {rollout.rollout_id: rollout.reward for rollout in rewarded if rollout.reward is not None}
        scores = (_scores(rollout, _values(rollout, sampled, first)) for rollout in rewarded)
        credit = to_tokens(group, np.concatenate([np.zeros(0), *scores]))
        return (*credit, *(_of_branch(branch, sampled, first) for branch in group.branches)) if self.train else credit

    def _chosen(self, calls: Sequence[Transition]) -> list[int]:
        places = states(calls)
        if not self.points or len(places) <= self.points:
            return places
        return sorted(sorted(places, key=lambda t: float(calls[t - 1].logprobs.mean()))[: self.points])


def states(calls: Sequence[Transition]) -> list[int]:
    """Numbers of calls before which a rollout can branch: not between one call's choices, and beside trained calls."""
    return [
        t
        for t in range(1, len(calls))
        if not _is_same_request(calls[t - 1], calls[t]) and (calls[t - 1].trainable or calls[t].trainable)
    ]


_Returns = Mapping[tuple[str, int], Sequence[tuple[str, float]]]
"""Ids and returns of the branches, by rollout and calls before."""


def _returns(group: TrajectoryGroup) -> _Returns:
    returns: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for trajectory in group.branches:
        if (left := trajectory.branch) is not None and trajectory.reward is not None:
            returns.setdefault((left.rollout_id, left.calls), []).append((trajectory.rollout_id, trajectory.reward))
    return returns


def _values(rollout: Trajectory, sampled: _Returns, first: Mapping[str, float]) -> dict[int, tuple[float, float]]:
    """V̂ and Q̂ of the measured states, by the calls before them. Q̂ is that of the call that led there."""
    count, reward = len(rollout.transitions), rollout.reward
    assert reward is not None
    others = [value for name, value in first.items() if name != rollout.rollout_id]
    others += [value for _, value in sampled.get((rollout.rollout_id, 0), ())]
    values = {0: (mean(others) if others else reward,) * 2, count: (reward, reward)}
    for (name, calls), returns in sampled.items():
        if name == rollout.rollout_id and 0 < calls < count:
            branches = [value for _, value in returns]
            values[calls] = mean(branches), mean([*branches, reward])
    return dict(sorted(values.items()))


def _scores(rollout: Trajectory, values: Mapping[int, tuple[float, float]]) -> FloatArray:
    """Advantage of each call."""
    advantages = np.zeros(len(rollout.transitions))
    for before, after in pairwise(values):
        advantages[before:after] = values[after][1] - values[before][0]
    return advantages


def _of_branch(branch: Trajectory, sampled: _Returns, first: Mapping[str, float]) -> tuple[Array | None, ...]:
    """Return of a branch against the others that left there, the rollout among them."""
    if branch.reward is None or branch.branch is None:
        return (None,) * len(branch.transitions)
    source = branch.branch.rollout_id
    others = [value for name, value in sampled[source, branch.branch.calls] if name != branch.rollout_id]
    others += [first[source]] if source in first else []
    advantage = branch.reward - mean(others) if others else 0.0
    return tuple(None if call.replayed_from is not None else _tokens(call, advantage) for call in branch.transitions)


def _tokens(call: Transition, advantage: float) -> Array | None:
    return np.full(len(call.completion_ids), advantage, dtype=np.float32) if call.trainable else None


def _is_same_request(first: Transition, second: Transition) -> bool:
    """True for two choices of one call (`n` > 1)."""
    return (
        first.started_at == second.started_at
        and first.agent == second.agent
        and np.array_equal(first.prompt_ids, second.prompt_ids)
    )
