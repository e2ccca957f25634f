"""Assigners made of assigners: Sum and Clip.

    Sum((Clip(StateGroups(), at=5.0), 0.5), …)              parts = [{ use = "clip", …, weight = 0.5 }, …]
    Sum(Part(TurnReturns(), compare="role", whiten=True))   parts = [{ use = "turns", compare = "role", whiten = true }]

The whole needs, asks, reports and remembers what its parts do: evidence and state are kept for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import numpy as np

from lightningrl.errors import ConfigError
from lightningrl.protocols import CreditAssigner, Services
from lightningrl.types import Advantages, Array, BranchPoint, Evidence, Trajectory, TrajectoryGroup
from lightningrl_credit.baselines import Counted, ReturnBased, change_credit
from lightningrl_credit.comparison import Compare, assign_credit, check_comparison, whiten
from lightningrl_credit.rewards.lineages import Joins, discount_of, lambda_of

__all__ = ["Clip", "Combination", "Part", "Sum", "clip", "sum_of"]

Build = Callable[[Any], CreditAssigner]
"""Builds a part as the recipe has it: `"grpo"`, or `{ use = …, options = … }`."""


class Combination(CreditAssigner):
    """The base of all of them; a whole has the methods (`score`, `branch_points`, `state`, …) that one of its parts
    has, and compares roles where all of them do."""

    def __init__(self, *parts: CreditAssigner) -> None:
        self.parts = parts
        self.requires = frozenset[str]().union(*(part.requires for part in parts))
        if sum(part.has("value_targets") for part in parts) > 1:
            raise ConfigError("two parts of a credit assigner teach the critic; leave one of them")
        self.discounts = {discount for part in parts for discount in _discounts(part)}
        """Discounts of all parts that add up the pay of calls; None stands for a part without a `gamma` per call."""
        single = next(iter(self.discounts)) if len(self.discounts) == 1 else None
        self.gamma: float | None
        self.joins: Joins
        self.gamma, self.joins = single or (None, "sum")
        self.lam = max((lambda_of(part) for part in parts if _discounts(part)), default=1.0)
        """The largest of the parts that add up the pay of calls."""

    def has(self, *methods: str) -> bool:
        return any(
            (all if name == "assign_by_role" else any)(part.has(name) for part in self.parts) for name in methods
        )

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return self._combine(group, "group")

    def assign_by_role(self, group: TrajectoryGroup) -> Advantages:
        return self._combine(group, "role")

    def _combine(self, group: TrajectoryGroup, compare: Compare) -> Advantages:
        raise NotImplementedError

    async def score(self, trajectory: Trajectory, ask: Services) -> Evidence:
        alone = TrajectoryGroup(id=trajectory.group_id, trajectories=(trajectory,))
        return (await self.score_group(alone, ask))[0]

    async def score_group(self, group: TrajectoryGroup, ask: Services) -> list[Evidence]:
        by_part = [await part.score_group(group, ask) for part in self.parts]
        return [_join(pieces) for pieces in zip(*by_part, strict=True)]

    def branch_points(self, trajectories: Sequence[Trajectory]) -> dict[BranchPoint, int]:
        """Points that any part wants, each with the most samples that a part wants there."""
        points: dict[BranchPoint, int] = {}
        for part in self.parts:
            wanted = part.branch_points(trajectories)
            points |= {point: max(samples, points.get(point, 0)) for point, samples in wanted.items()}
        return points

    def value_targets(self, group: TrajectoryGroup) -> Advantages | None:
        for number, part in enumerate(self.parts):
            if part.has("value_targets"):
                return part.value_targets(self._seen_by(number, group))
        return None

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        """Metrics of all parts; of two with one name the later has its part's number."""
        metrics: dict[str, float] = {}
        for number, part in enumerate(self.parts):
            if part.has("finish_step"):
                seen = [self._seen_by(number, group) for group in groups]
                own = advantages if len(self.parts) == 1 else [part.assign(group) for group in seen]
                metrics |= {
                    f"{name}_{number}" if name in metrics else name: value
                    for name, value in part.finish_step(seen, own).items()
                }
        return metrics

    def state(self) -> list[Any]:
        return [part.state() for part in self.parts]

    def load(self, state: Sequence[Any]) -> None:
        for part, own in zip(self.parts, state, strict=True):
            if part.has("state"):
                part.load(own)

    def _seen_by(self, number: int, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with the evidence that a part asked for, by the names that it gave."""
        if not self.parts[number].has("score", "score_group"):
            return group
        return replace(group, trajectories=tuple(_with_own(rollout, f"{number}.") for rollout in group.trajectories))


class Part(NamedTuple):
    """A part of a sum, compared and scaled by itself."""

    assigner: CreditAssigner
    weight: float = 1.0
    compare: Compare = "group"
    """Calls of a `role` are compared with each other, or all of the `group`, as by `credit.compare`."""
    counted: Counted | None = None
    """In a role's mean each of the `rollouts` weighs the same, as with None, or each of the `calls`, as in the paper
    (Dr. MAS, arXiv 2602.08847)."""
    whiten: bool = False
    """Mean 0 and deviation 1 over the group's trained tokens, so that the parts of a sum are of one size. Over the
    tokens of a step it is `credit.whiten`."""

    def check(self) -> None:
        """Raise ConfigError for what no part may have."""
        if not isinstance(self.weight, int | float) or not np.isfinite(self.weight):
            raise ConfigError(f"the weight of a credit assigner's part is {self.weight!r}; give a number")
        if self.compare not in get_args(Compare):
            raise ConfigError(
                f"a part of 'sum' compares within the 'group' or each 'role'; compare is {self.compare!r}"
            )
        if self.counted is not None and self.compare != "role":
            raise ConfigError("counted weighs the calls of a role; set compare = 'role' beside it, or leave it out")
        if self.counted not in (None, *get_args(Counted)):
            raise ConfigError(f"compare = 'role' counts 'rollouts' or 'calls'; counted is {self.counted!r}")
        if not isinstance(self.whiten, bool):
            raise ConfigError(f"a part of 'sum' is whitened or not; whiten is {self.whiten!r}, set it to true or false")
        check_comparison(self.assigner, self.compare)
        if self.counted == "calls" and not isinstance(self.assigner, ReturnBased):
            name = type(self.assigner).__name__
            raise ConfigError(
                f"compare = 'role' cannot count calls for {name!r}, which compares roles itself; count 'rollouts'"
            )


class Sum(Combination):
    """A = Σ_k w_k A_k. A call that some part scored is scored; one that none did is None."""

    def __init__(self, *parts: tuple[CreditAssigner, float] | Part) -> None:
        if not parts:
            raise ConfigError(
                "a sum of credit assigners has no parts; set options.parts = [{ use = 'grpo' }, { use = 'turns' }]"
            )
        self._settings = [Part(*part) for part in parts]
        for settings in self._settings:
            settings.check()
        super().__init__(*(settings.assigner for settings in self._settings))
        self.weights = tuple(settings.weight for settings in self._settings)
        if any(settings.compare == "role" for settings in self._settings):
            self.requires |= {"agents"}

    def _combine(self, group: TrajectoryGroup, compare: Compare) -> Advantages:
        advantages = [self._of_part(number, group, compare) for number in range(len(self.parts))]
        return tuple(
            tuple(
                _add([by_trajectory[t] for by_trajectory in by_part], self.weights)
                for t in range(len(trajectory.transitions))
            )
            for trajectory, *by_part in zip(group.members, *advantages, strict=True)
        )

    def _of_part(self, number: int, group: TrajectoryGroup, compare: Compare) -> Advantages:
        part = self._settings[number]
        credit = assign_credit(
            part.assigner,
            self._seen_by(number, group),
            compare="role" if part.compare == "role" else compare,
            counted=part.counted or "rollouts",
        )
        return whiten([group], [credit])[0] if part.whiten else credit


class Clip(Combination):
    """A ← min(max(A, -c), c)."""

    def __init__(self, of: CreditAssigner, *, at: float) -> None:
        """`at` is c; 0.2 in the GiGPO recipe of ROLL."""
        if not at > 0.0:
            raise ConfigError(f"advantages are clipped at {at!r}, which is not above 0; try 5.0")
        super().__init__(of)
        self.at = at

    def _combine(self, group: TrajectoryGroup, compare: Compare) -> Advantages:
        advantages = assign_credit(self.parts[0], self._seen_by(0, group), compare=compare)
        return change_credit(group, advantages, lambda _, credit: np.clip(credit, -self.at, self.at))


def sum_of(*, parts: Sequence[Any], build: Build) -> Sum:
    """Build the assigner that a recipe calls `sum`. A part may have a `weight`, and `compare`, `counted` and `whiten`
    of its own."""
    return Sum(*(_part(part, build) for part in parts))


def clip(*, of: Any, at: float, build: Build) -> Clip:
    """Build the assigner that a recipe calls `clip`."""
    return Clip(build(of), at=at)


def _part(part: Any, build: Build) -> Part:
    if not isinstance(part, Mapping):
        return Part(build(part))
    own = {key: part[key] for key in Part._fields[1:] if key in part}
    return Part(build({key: value for key, value in part.items() if key not in own}), **own)


def _discounts(part: CreditAssigner) -> set[tuple[float, Joins] | None]:
    if isinstance(part, Combination):
        return part.discounts
    return {discount_of(part)} if hasattr(part, "gamma") else set()


def _add(parts: Sequence[Array | None], weights: Sequence[float]) -> Array | None:
    scored = [weight * part.astype(np.float64) for part, weight in zip(parts, weights, strict=True) if part is not None]
    return sum(scored[1:], scored[0]).astype(np.float32) if scored else None


def _join(pieces: Sequence[Evidence]) -> Evidence:
    """Join the evidence of parts; a part's number stands before each name."""
    return Evidence(
        calls={f"{number}.{name}": values for number, part in enumerate(pieces) for name, values in part.calls.items()},
        tokens={
            f"{number}.{name}": values for number, part in enumerate(pieces) for name, values in part.tokens.items()
        },
    )


def _with_own(trajectory: Trajectory, prefix: str) -> Trajectory:
    if trajectory.evidence is None:
        return trajectory
    calls, tokens = (
        {name.removeprefix(prefix): values for name, values in kind.items() if name.startswith(prefix)}
        for kind in (trajectory.evidence.calls, trajectory.evidence.tokens)
    )
    return replace(trajectory, evidence=Evidence(calls=calls, tokens=tokens))  # type: ignore[arg-type]
