"""Credit by replay branching: what each state was worth is measured, by sampling on from it.

    rollout   s_0 ─a_0─► s_1 ─a_1─► s_2 ─a_2─► R          V̂(s_t) = mean return of the branches that leave at s_t
                          ├─► G  G  G  G   └─► G  G  G  G
    A_t = Q̂(s_t, a_t) - V̂(s_t)                            (VinePPO, arXiv 2410.01679, eq. 8)

s_t is what the agent and its tools came to before call t. Q̂(s_t, a_t) is the mean of the branches at s_{t+1} and of the rollout itself,
which is one more sample from there; V̂(s_t) leaves the rollout out, as it knows a_t already. V̂(s_0) is the mean of the group's other
rollouts. Where a state was not branched at, or every branch from it diverged, the calls on both sides of it share one difference.

With `train`, what the branches sampled is trained as well, each against the others that left there (tree-structured groups, Tree-GRPO,
arXiv 2509.21240); the repeated calls never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from lightningrl.advantages.baselines import FloatArray, mean
from lightningrl.advantages.spread import to_tokens
from lightningrl.errors import ConfigError
from lightningrl.types import Advantages, Array, BranchPoint, Trajectory, TrajectoryGroup, Transition

__all__ = ["Branches", "states"]


class Branches:
    """Needs agents and tools that do the same when they are run again; `branches_diverged` counts where they do not."""

    requires: frozenset[str] = frozenset({"branches"})

    def __init__(self, *, samples: int = 4, points: int = 0, rollouts: int = 0, equal: bool = False, train: bool = False) -> None:
        """
        samples    branches from each state, K (VinePPO: 9)
        points     at most so many states of a rollout, where the call before was least likely (entropy-guided, AT²PO, arXiv 2601.04767);
                   0 = all
        rollouts   of so many rollouts of a group, the first; 0 = all. The others have the difference of their return to the mean
        equal      also branch where all rollouts of a group earned the same
        train      train the branches, too
        """
        for name, value, least in (("samples", samples, 1), ("points", points, 0), ("rollouts", rollouts, 0)):
            if value < least:
                raise ConfigError(f"credit assigner 'branches': {name} is {value!r}; set it to {least} or more")
        self.samples = samples
        self.points = points
        self.rollouts = rollouts
        self.equal = equal
        self.train = train

    def branch_points(self, trajectories: Sequence[Trajectory], /) -> Mapping[BranchPoint, int]:
        rewarded = [one for one in trajectories if one.reward is not None]
        if not self.equal and len({one.reward for one in rewarded}) < 2:
            return {}
        chosen = rewarded[: self.rollouts] if self.rollouts else rewarded
        return {
            BranchPoint(rollout_id=one.rollout_id, attempt=one.attempt, calls=calls): self.samples
            for one in chosen
            for calls in self._chosen(one.transitions)
        }

    def assign(self, group: TrajectoryGroup) -> Advantages:
        found = _returns(group)
        first = {one.rollout_id: one.reward for one in group.trajectories if one.reward is not None}
        scores = (_scores(one, _values(one, found, first)) for one in group.trajectories if one.reward is not None)
        credit = to_tokens(group, np.concatenate([np.zeros(0), *scores]))
        return (*credit, *(_of_branch(one, found, first) for one in group.branches)) if self.train else credit

    def _chosen(self, calls: Sequence[Transition]) -> list[int]:
        found = states(calls)
        if not self.points or len(found) <= self.points:
            return found
        return sorted(sorted(found, key=lambda t: float(calls[t - 1].logprobs.mean()))[: self.points])


def states(calls: Sequence[Transition]) -> list[int]:
    """Where a rollout can branch, between its calls: after how many. Not between the choices of one call, and only beside calls that are
    trained."""
    return [
        t for t in range(1, len(calls)) if not _is_same_request(calls[t - 1], calls[t]) and (calls[t - 1].trainable or calls[t].trainable)
    ]


_Returns = Mapping[tuple[str, int], Sequence[tuple[str, float]]]
"""Of the branches, by rollout and calls before: which, and its return."""


def _returns(group: TrajectoryGroup) -> _Returns:
    found: dict[tuple[str, int], list[tuple[str, float]]] = {}
    for one in group.branches:
        if one.branch is not None and one.reward is not None:
            found.setdefault((one.branch.rollout_id, one.branch.calls), []).append((one.rollout_id, one.reward))
    return found


def _values(one: Trajectory, found: _Returns, first: Mapping[str, float]) -> dict[int, tuple[float, float]]:
    """V̂ and Q̂ of the states that are known, by the calls before them. Q̂ is that of the call that led there."""
    assert one.reward is not None
    others = [reward for name, reward in first.items() if name != one.rollout_id]
    others += [value for _, value in found.get((one.rollout_id, 0), ())]
    values = {0: (mean(others) if others else one.reward,) * 2, len(one.transitions): (one.reward, one.reward)}
    for (name, calls), returns in found.items():
        if name == one.rollout_id and 0 < calls < len(one.transitions):
            sampled = [value for _, value in returns]
            values[calls] = mean(sampled), mean([*sampled, one.reward])
    return dict(sorted(values.items()))


def _scores(one: Trajectory, values: Mapping[int, tuple[float, float]]) -> FloatArray:
    """Of each call."""
    advantages = np.zeros(len(one.transitions))
    for before, after in pairwise(values):
        advantages[before:after] = values[after][1] - values[before][0]
    return advantages


def _of_branch(one: Trajectory, found: _Returns, first: Mapping[str, float]) -> tuple[Array | None, ...]:
    """Its return against those of the others that left there; where it is alone, against the rollout that it left."""
    if one.reward is None or one.branch is None:
        return (None,) * len(one.transitions)
    source = one.branch.rollout_id
    others = [value for name, value in found[source, one.branch.calls] if name != one.rollout_id]
    others += [first[source]] if source in first else []
    advantage = one.reward - mean(others) if others else 0.0
    return tuple(None if call.replayed_from is not None else _tokens(call, advantage) for call in one.transitions)


def _tokens(call: Transition, advantage: float) -> Array | None:
    return np.full(len(call.completion_ids), advantage, dtype=np.float32) if call.trainable else None


def _is_same_request(one: Transition, other: Transition) -> bool:
    """Whether they are choices of one call (`n` > 1)."""
    return one.started_at == other.started_at and one.agent == other.agent and np.array_equal(one.prompt_ids, other.prompt_ids)
