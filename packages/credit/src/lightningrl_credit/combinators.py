"""Assigners made of assigners: Sum, Clip, and for the parts of a sum ByRole and Whiten.

    Sum((Clip(StateGroups(), at=5.0), 0.5), …)      parts = [{ use = "clip", …, weight = 0.5 }, …]
    Sum((Whiten(ByRole(TurnReturns())), 1.0))       parts = [{ use = "turns", compare = "role", whiten = true }]

The whole needs, asks, reports and remembers what its parts do: evidence and state are kept for each part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from lightningrl.errors import ConfigError
from lightningrl.protocols import (
    Brancher,
    CreditAssigner,
    CreditMemory,
    CreditMonitor,
    CriticTeacher,
    GroupWitness,
    Services,
    Witness,
)
from lightningrl.types import Advantages, Array, BranchPoint, Evidence, Trajectory, TrajectoryGroup
from lightningrl_credit.comparison import Compare, ComparesRoles, assign_by_role, check_comparison, of_members, whiten
from lightningrl_credit.rewards.lineages import Joins, discount_of, lambda_of
from lightningrl_credit.spread import Counted, ReturnBased, change_credit

__all__ = ["ByRole", "Clip", "Combination", "Sum", "Whiten", "clip", "sum_of"]

Build = Callable[[Any], CreditAssigner]
"""Builds a part as the recipe has it: `"grpo"`, or `{ use = …, options = … }`."""

_Assign = Callable[[CreditAssigner, TrajectoryGroup], Advantages]


class Combination:
    """The base of all of them; a whole has the optional methods (`score`, `branch_points`, `state`, …) of its parts."""

    score: Callable[..., Awaitable[Evidence]]
    score_group: Callable[..., Awaitable[Sequence[Evidence]]]
    branch_points: Callable[[Sequence[Trajectory]], Mapping[BranchPoint, int]]
    value_targets: Callable[[TrajectoryGroup], Advantages]
    finish_step: Callable[[Sequence[TrajectoryGroup], Sequence[Advantages]], Mapping[str, float]]
    state: Callable[[], Any]
    load: Callable[[Any], None]
    assign_by_role: Callable[[TrajectoryGroup], Advantages]
    gamma: float | None
    joins: Joins
    lam: float

    def __init__(self, *parts: CreditAssigner) -> None:
        self.parts = parts
        self.requires: frozenset[str] = frozenset[str]().union(*(part.requires for part in parts))
        if any(isinstance(part, GroupWitness) for part in parts):
            self.score_group = self._score_group
        elif any(isinstance(part, Witness) for part in parts):
            self.score = self._score
        if any(isinstance(part, Brancher) for part in parts):
            self.branch_points = self._branch_points
        teachers = [number for number, part in enumerate(parts) if isinstance(part, CriticTeacher)]
        if len(teachers) > 1:
            raise ConfigError("two parts of a credit assigner teach the critic; leave one of them")
        if teachers:
            self.value_targets = lambda group: self._value_targets(teachers[0], group)
        if any(isinstance(part, CreditMonitor) for part in parts):
            self.finish_step = self._finish_step
        if any(isinstance(part, CreditMemory) for part in parts):
            self.state, self.load = self._state, self._load
        self.discounts = {discount for part in parts for discount in _discounts(part)}
        """Discounts of all parts that add up the pay of calls; None stands for a part without a `gamma` per call."""
        self.gamma, self.joins = (next(iter(self.discounts)) if len(self.discounts) == 1 else None) or (None, "sum")
        self.lam = max((lambda_of(part) for part in parts if _discounts(part)), default=1.0)
        """The largest of the parts that add up the pay of calls."""
        if all(isinstance(part, ComparesRoles | ReturnBased) for part in parts):
            self.assign_by_role = lambda group: self._combine(group, self._by_role)

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return self._combine(group, lambda part, seen: of_members(seen, part.assign(seen)))

    def _combine(self, group: TrajectoryGroup, assign: _Assign) -> Advantages:
        raise NotImplementedError

    def _by_role(self, part: CreditAssigner, group: TrajectoryGroup) -> Advantages:
        return of_members(group, assign_by_role(part, group))

    def _branch_points(self, trajectories: Sequence[Trajectory], /) -> dict[BranchPoint, int]:
        """Points that any part wants, each with the most samples that a part wants there."""
        points: dict[BranchPoint, int] = {}
        for part in self.parts:
            wanted = part.branch_points(trajectories) if isinstance(part, Brancher) else {}
            points |= {point: max(samples, points.get(point, 0)) for point, samples in wanted.items()}
        return points

    def _value_targets(self, number: int, group: TrajectoryGroup) -> Advantages:
        teacher = self.parts[number]
        assert isinstance(teacher, CriticTeacher)
        return teacher.value_targets(self._seen_by(number, group))

    async def _score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        witnesses = [(number, part) for number, part in enumerate(self.parts) if isinstance(part, Witness)]
        return _join({number: await part.score(trajectory, ask) for number, part in witnesses})

    async def _score_group(self, group: TrajectoryGroup, ask: Services) -> list[Evidence]:
        evidence: dict[int, Sequence[Evidence]] = {}
        for number, part in enumerate(self.parts):
            if isinstance(part, GroupWitness):
                evidence[number] = await part.score_group(group, ask)
            elif isinstance(part, Witness):
                evidence[number] = [await part.score(trajectory, ask) for trajectory in group.trajectories]
        return [_join({number: part[i] for number, part in evidence.items()}) for i in range(len(group.trajectories))]

    def _seen_by(self, number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with the evidence that a part asked for, by the names that it gave."""
        if not isinstance(self.parts[number], Witness | GroupWitness):
            return group
        return replace(group, trajectories=tuple(_with_own(rollout, f"{number}.") for rollout in group.trajectories))

    def _finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        """Metrics of all parts; of two with one name the later has its part's number."""
        metrics: dict[str, float] = {}
        for number, part in enumerate(self.parts):
            if isinstance(part, CreditMonitor):
                seen = [self._seen_by(number, group) for group in groups]
                own = advantages if len(self.parts) == 1 else [part.assign(group) for group in seen]
                metrics |= {
                    f"{name}_{number}" if name in metrics else name: value
                    for name, value in part.finish_step(seen, own).items()
                }
        return metrics

    def _state(self) -> list[Any]:
        return [part.state() if isinstance(part, CreditMemory) else None for part in self.parts]

    def _load(self, state: Sequence[Any], /) -> None:
        for part, own in zip(self.parts, state, strict=True):
            if isinstance(part, CreditMemory):
                part.load(own)


class Sum(Combination):
    """A = Σ_k w_k A_k. A call that some part scored is scored; one that none did is None."""

    def __init__(self, *parts: tuple[CreditAssigner, float]) -> None:
        if not parts:
            raise ConfigError(
                "a sum of credit assigners has no parts; set options.parts = [{ use = 'grpo' }, { use = 'turns' }]"
            )
        if odd := [weight for _, weight in parts if not isinstance(weight, int | float) or not np.isfinite(weight)]:
            raise ConfigError(f"the weight of a credit assigner's part is {odd[0]!r}; give a number")
        super().__init__(*(part for part, _ in parts))
        self.weights = tuple(weight for _, weight in parts)

    def _combine(self, group: TrajectoryGroup, assign: _Assign) -> Advantages:
        advantages = [assign(part, self._seen_by(number, group)) for number, part in enumerate(self.parts)]
        return tuple(
            tuple(
                _add([by_trajectory[t] for by_trajectory in by_part], self.weights)
                for t in range(len(trajectory.transitions))
            )
            for trajectory, *by_part in zip(group.members, *advantages, strict=True)
        )


class _Wrapper(Combination):
    def __init__(self, of: CreditAssigner) -> None:
        super().__init__(of)

    def _combine(self, group: TrajectoryGroup, assign: _Assign) -> Advantages:
        return self._finish(group, assign(self.parts[0], self._seen_by(0, group)))

    def _finish(self, group: TrajectoryGroup, advantages: Advantages) -> Advantages:
        raise NotImplementedError


class ByRole(_Wrapper):
    """A part whose calls are compared within each role (Dr. MAS, arXiv 2602.08847), as by `credit.compare = "role"`."""

    def __init__(self, of: CreditAssigner, *, counted: Counted = "rollouts") -> None:
        """`counted`: each of the `rollouts` weighs the same in a role's mean, or each `calls`, as in the paper."""
        check_comparison(of, "role")
        super().__init__(of)
        self.counted: Counted = counted
        if counted not in ("rollouts", "calls"):
            raise ConfigError(f"compare = 'role' counts 'rollouts' or 'calls'; counted is {counted!r}")
        if counted == "calls" and isinstance(of, ComparesRoles):
            name = type(of).__name__
            raise ConfigError(
                f"compare = 'role' cannot count calls for {name!r}, which compares roles itself; count 'rollouts'"
            )
        self.requires |= {"agents"}

    def _combine(self, group: TrajectoryGroup, assign: _Assign) -> Advantages:
        return self._by_role(self.parts[0], self._seen_by(0, group))

    def _by_role(self, part: CreditAssigner, group: TrajectoryGroup) -> Advantages:
        return of_members(group, assign_by_role(part, group, counted=self.counted))


class Whiten(_Wrapper):
    """Mean 0 and deviation 1 over the group's trained tokens, so that the parts of a sum are of one size. Over the
    tokens of a step it is `credit.whiten`."""

    def _finish(self, group: TrajectoryGroup, advantages: Advantages) -> Advantages:
        return whiten([group], [advantages])[0]


class Clip(_Wrapper):
    """A ← min(max(A, -c), c)."""

    def __init__(self, of: CreditAssigner, *, at: float) -> None:
        """`at` is c; 0.2 in the GiGPO recipe of ROLL."""
        if not at > 0.0:
            raise ConfigError(f"advantages are clipped at {at!r}, which is not above 0; try 5.0")
        super().__init__(of)
        self.at = at

    def _finish(self, group: TrajectoryGroup, advantages: Advantages) -> Advantages:
        return change_credit(group, advantages, lambda _, credit: np.clip(credit, -self.at, self.at))


def sum_of(*, parts: Sequence[Any], build: Build) -> Sum:
    """Build the assigner that a recipe calls `sum`. A part may have a `weight`, and `compare`, `counted` and `whiten`
    of its own."""
    return Sum(*(_weighed_part(part, build) for part in parts))


def clip(*, of: Any, at: float, build: Build) -> Clip:
    """Build the assigner that a recipe calls `clip`."""
    return Clip(build(of), at=at)


def _weighed_part(part: Any, build: Build) -> tuple[CreditAssigner, float]:
    if not isinstance(part, Mapping):
        return build(part), 1.0
    own = {key: part[key] for key in ("weight", "compare", "counted", "whiten") if key in part}
    assigner = build({key: value for key, value in part.items() if key not in own})
    compare, whitened = own.get("compare", "group"), own.get("whiten", False)
    if compare not in get_args(Compare):
        raise ConfigError(f"a part of 'sum' compares within the 'group' or each 'role'; compare is {compare!r}")
    if "counted" in own and compare != "role":
        raise ConfigError("counted weighs the calls of a role; set compare = 'role' beside it, or leave it out")
    if not isinstance(whitened, bool):
        raise ConfigError(f"a part of 'sum' is whitened or not; whiten is {whitened!r}, set it to true or false")
    if compare == "role":
        assigner = ByRole(assigner, counted=own.get("counted", "rollouts"))
    return Whiten(assigner) if whitened else assigner, own.get("weight", 1.0)


def _discounts(part: CreditAssigner) -> set[tuple[float, Joins] | None]:
    if isinstance(part, Combination):
        return part.discounts
    return {discount_of(part)} if hasattr(part, "gamma") else set()


def _add(parts: Sequence[Array | None], weights: Sequence[float]) -> Array | None:
    scored = [weight * part.astype(np.float64) for part, weight in zip(parts, weights, strict=True) if part is not None]
    return sum(scored[1:], scored[0]).astype(np.float32) if scored else None


def _join(by_part: Mapping[int, Evidence]) -> Evidence:
    """Join the evidence of parts; a part's number stands before each name."""
    return Evidence(
        calls={f"{number}.{name}": values for number, part in by_part.items() for name, values in part.calls.items()},
        tokens={f"{number}.{name}": values for number, part in by_part.items() for name, values in part.tokens.items()},
    )


def _with_own(trajectory: Trajectory, prefix: str) -> Trajectory:
    if trajectory.evidence is None:
        return trajectory
    calls, tokens = (
        {name.removeprefix(prefix): values for name, values in kind.items() if name.startswith(prefix)}
        for kind in (trajectory.evidence.calls, trajectory.evidence.tokens)
    )
    return replace(trajectory, evidence=Evidence(calls=calls, tokens=tokens))  # type: ignore[arg-type]
