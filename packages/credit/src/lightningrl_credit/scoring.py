"""From rewarded trajectories to rows, with everything that was left out counted: pure numpy that asks nobody.

Evaluator ─► trajectories with rewards and evidence ─► groups ─► credit ─► advantages ─► samples ─► learner
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from lightningrl.call_origin import is_role_among
from lightningrl.errors import LightningError, PluginError, describe_raised
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import SamplesConfig
from lightningrl.records import Score
from lightningrl.types import Advantages, Array, BranchPoint, Evidence, Sample, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit.baselines import change_credit, change_members
from lightningrl_credit.comparison import Compare, assign_credit, check_comparison, whiten
from lightningrl_credit.metrics import FarmingWatch, describe_branches, describe_rollouts, describe_rows
from lightningrl_credit.rewards.value import RewardWeights
from lightningrl_credit.samples import build_samples, check_advantages
from lightningrl_credit.trained_calls import LeftOut, TrainedCalls, calls_left_out, leave_out, only_trained, side_calls

__all__ = ["CreditedGroup", "ScoredStep", "Scorer", "has_signal", "score_of", "unread_rewards"]

_ROUNDING = 1e-9
"""Advantages below this share of the group's largest reward are what rounding left of equal ones."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CreditedGroup:
    """A group and the advantages of its calls, before any whitening."""

    group: TrajectoryGroup
    advantages: Advantages
    has_signal: bool
    """True if some trained call has an advantage other than 0."""
    value_targets: Advantages | None = None
    """Values that a critic learns from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredStep:
    """A step's groups with their advantages, rows and metrics."""

    groups: tuple[TrajectoryGroup, ...]
    advantages: tuple[Advantages, ...]
    samples: tuple[Sample, ...]
    metrics: Mapping[str, float]
    outcomes: Mapping[str, int]

    @property
    def has_signal(self) -> bool:
        """True if some group teaches anything."""
        return self.metrics["groups_without_signal"] < self.metrics["groups"]

    @property
    def scores(self) -> list[Score]:
        """Rewards and advantages as the store keeps them for showing."""
        return [
            replace(
                score_of(trajectory),
                advantages=dict(zip((call.id for call in trajectory.transitions), calls, strict=True)),
            )
            for group, group_advantages in zip(self.groups, self.advantages, strict=True)
            for trajectory, calls in zip(group.members, group_advantages, strict=True)
        ]

    @property
    def rollout_ids(self) -> list[str]:
        """Ids of the step's rollouts, and of those of their branches that are trained."""
        return [
            trajectory.rollout_id
            for group, credit in zip(self.groups, self.advantages, strict=True)
            for trajectory, calls in zip(group.members, credit, strict=True)
            if trajectory.branch is None or any(advantages is not None for advantages in calls)
        ]


def score_of(trajectory: Trajectory) -> Score:
    """Rewards of a trajectory as the store keeps them."""
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        rewards=trajectory.rewards,
        reward=trajectory.reward,
        unrewarded=trajectory.unrewarded,
        digests=trajectory.digests,
        transition_rewards={call.id: call.rewards for call in trajectory.transitions if call.rewards},
    )


class Scorer:
    """Assigns credit and builds rows; knows no algorithm of its own."""

    def __init__(
        self,
        *,
        credit: CreditAssigner,
        rewards: RewardWeights,
        compare: Compare = "group",
        per_reward: bool = False,
        whitened: bool = False,
        dynamic_sampling: bool = False,
        samples: SamplesConfig,
        trained: Mapping[str, TrainedCalls],
        farmed: Sequence[str] = (),
    ) -> None:
        """`trained`: by policy; a policy that is not in it stays as it is. `dynamic_sampling`: groups without signal
        are left out of the step and its means (DAPO); others stand in for them. `farmed`: turn rewards one could farm.
        """
        self._credit = credit
        self._rewards = rewards
        self._compare: Compare = compare
        self._weights = rewards.by_name if per_reward else None
        self._whitened = whitened
        self._dynamic_sampling = dynamic_sampling
        self._samples = samples
        self._trained = dict(trained)
        self._farming = FarmingWatch(farmed)

    @property
    def requires(self) -> frozenset[str]:
        """Needs of the credit assigner."""
        return self._credit.requires

    @property
    def needs_whole_steps(self) -> bool:
        """True if a group's credit depends on the step's others."""
        return self._whitened

    @property
    def remembers(self) -> bool:
        """True if a step's credit depends on those before it."""
        return self._credit.has("state")

    def with_credit(self, credit: CreditAssigner) -> Scorer:
        """Copy it with another credit assigner. Raises ConfigError where that cannot compare by role as this does."""
        check_comparison(credit, self._compare)
        other = copy(self)
        other._credit = credit
        return other

    def branch_points(self, rewarded: Sequence[Trajectory]) -> Mapping[BranchPoint, int]:
        """Points where credit wants a group's rollouts to branch, and how often."""
        with _named(self._credit, "in branch_points()"):
            return self._credit.branch_points(rewarded)

    def credit(self, trajectories: Sequence[Trajectory], branches: Sequence[Trajectory] = ()) -> list[CreditedGroup]:
        """Group and assign credit, once for each group. Run it in a thread."""
        return [self.credit_group(group) for group in self.group(trajectories, branches)]

    def credit_group(self, group: TrajectoryGroup) -> CreditedGroup:
        """Assign credit to a group. Calls that are not trained have None, whatever the assigner gives them. Raises
        PluginError for an assigner that raises, or whose advantages do not fit."""
        paid = self._rewards if self._rewards.roles else None
        # branches count all calls of the rollout that they left
        judged = group if group.branches else self._without_side_calls(group)
        with _named(self._credit, f"for group {group.id!r}"):
            advantages = assign_credit(self._credit, judged, compare=self._compare, paid=paid, weights=self._weights)
            targets = self._credit.value_targets(judged)
        check_advantages(judged, advantages)
        if judged is not group:
            advantages = _for_all_calls(group, judged, advantages)
            targets = None if targets is None else _for_all_calls(group, judged, targets)
        advantages = change_credit(group, advantages, lambda call, credit: credit if call.trainable else None)
        return CreditedGroup(
            group=group, advantages=advantages, has_signal=has_signal(group, advantages), value_targets=targets
        )

    def _without_side_calls(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Leave out side calls that are not trained: no credit is spread over them. The group itself if it has none."""
        trajectories = tuple(self._main_calls(trajectory) for trajectory in group.trajectories)
        is_same = all(map(operator.is_, trajectories, group.trajectories))
        return group if is_same else replace(group, trajectories=trajectories)

    def _main_calls(self, trajectory: Trajectory) -> Trajectory:
        side = side_calls(trajectory.transitions)
        left_out = calls_left_out(trajectory.transitions, self._trained, side) if side else {}
        places = [i for i, call in enumerate(trajectory.transitions) if call.id not in side or call.id not in left_out]
        if len(places) == len(trajectory.transitions):
            return trajectory
        evidence = trajectory.evidence
        if evidence is not None:
            evidence = Evidence(
                calls={name: values[places] for name, values in evidence.calls.items()},
                tokens={name: tuple(values[place] for place in places) for name, values in evidence.tokens.items()},
            )
        return replace(trajectory, transitions=tuple(trajectory.transitions[i] for i in places), evidence=evidence)

    def finish(self, credited: Sequence[CreditedGroup]) -> tuple[tuple[Advantages, ...], Mapping[str, float]]:
        """Finish a step's advantages, once for each step; also credit's own metrics. Groups without signal are silent,
        and all is whitened where the recipe says so."""
        groups, advantages = tuple(one.group for one in credited), tuple(one.advantages for one in credited)
        with _named(self._credit, "in finish_step()"):
            monitored = self._credit.finish_step(groups, advantages)

        def silence(_: Transition, credit: Array) -> Array | None:
            """Exact zeros: whitening makes no rounding large, and learners leave the rows out."""
            return None if self._dynamic_sampling else np.zeros_like(credit)

        advantages = tuple(
            each.advantages if each.has_signal else change_credit(each.group, each.advantages, silence)
            for each in credited
        )
        return whiten(groups, advantages) if self._whitened else advantages, monitored

    def build(self, credited: Sequence[CreditedGroup]) -> ScoredStep:
        """Build the rows of a step's groups, once for each step."""
        groups, signals = tuple(one.group for one in credited), [one.has_signal for one in credited]
        advantages, monitored = self.finish(credited)
        targets = [one.value_targets for one in credited]
        samples = [row for policy in self._trained for row in self._rows(policy, groups, advantages, targets)]
        members = [trajectory for group in groups for trajectory in group.trajectories]
        return ScoredStep(
            groups=groups,
            advantages=advantages,
            samples=tuple(samples),
            metrics=describe_rows(signals, samples)
            | describe_rollouts(members)
            | self._count_left_out(members)
            | describe_branches([branch for group in groups for branch in group.branches])
            | self._farming.finish_step(groups)
            | {f"credit/{name}": float(value) for name, value in monitored.items()},
            outcomes=Counter(trajectory.outcome.value for trajectory in members),
        )

    def _count_left_out(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Counts of calls that are no training data, by a rule or as side calls; without those that are 0."""
        reasons = Counter(
            reason
            for trajectory in trajectories
            for reason in calls_left_out(trajectory.transitions, self._trained).values()
        )
        names = {"calls_left_out": LeftOut.RULE, "side_calls": LeftOut.SIDE}
        return {name: float(reasons[reason]) for name, reason in names.items() if reasons[reason]}

    def state(self) -> Any:
        """Memory of credit, for a checkpoint; None where it remembers nothing. Raises PluginError if it is no JSON."""
        state = self._credit.state() if self.remembers else None
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            name = type(self._credit).__name__
            raise PluginError(
                f"state() of credit assigner {name!r} gave no JSON ({error}); return numbers, texts, lists, dicts"
            ) from None
        return state

    def load(self, state: Any) -> None:
        if state is not None and self.remembers:
            self._credit.load(state)

    def missing_roles(self, trajectories: Sequence[Trajectory]) -> str | None:
        """Name the roles that the recipe trains or pays and that none of these calls has: misspelt, or not reached."""
        named = self._rewards.roles.union(*(trained.agents or () for trained in self._trained.values()))
        calling = {call.agent for rollout in trajectories for call in rollout.transitions if call.agent is not None}
        missing = [role for role in sorted(named) if not any(is_role_among(agent, {role}) for agent in calling)]
        if not missing:
            return None
        names, seen = (", ".join(map(repr, sorted(roles))) or "none" for roles in (missing, calling))
        return (
            f"no call has the role {names}, which `trained_agents` or `rewards.NAME.agents` names; "
            f"roles of the calls: {seen}"
        )

    def group(
        self, trajectories: Sequence[Trajectory], branches: Sequence[Trajectory] = ()
    ) -> tuple[TrajectoryGroup, ...]:
        """Group by task, attach branches, mark calls that are not trained."""
        by_group: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            by_group.setdefault(trajectory.group_id, []).append(only_trained(trajectory, self._trained))
        group_of = {trajectory.rollout_id: trajectory.group_id for trajectory in trajectories}
        left: dict[str, list[Trajectory]] = {}
        for branch in branches:
            if branch.branch is not None:
                left.setdefault(group_of[branch.branch.rollout_id], []).append(only_trained(branch, self._trained))
        return tuple(
            TrajectoryGroup(id=group_id, trajectories=tuple(members), branches=tuple(left.get(group_id, ())))
            for group_id, members in by_group.items()
        )

    def _rows(
        self,
        policy: str,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[Advantages],
        value_targets: Sequence[Advantages | None],
    ) -> list[Sample]:
        """Build a policy's rows: their weights are shares of its own rollouts and tokens."""
        return build_samples(
            groups if len(self._trained) == 1 else [_only(policy, group) for group in groups],
            advantages,
            rows=self._samples.rows,
            aggregation=self._samples.aggregation,
            constant_length=self._samples.constant_length,
            value_targets=value_targets,
        )


def has_signal(group: TrajectoryGroup, advantages: Advantages) -> bool:
    """True if some trained call has an advantage that is neither 0 nor a rounding of 0 beside the group's rewards."""
    calls_of_all = [call for trajectory in group.members for call in trajectory.transitions]
    rewards = [trajectory.reward for trajectory in group.members]
    rewards += [value for call in calls_of_all for value in call.rewards.values()]
    least = _ROUNDING * max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    return any(
        credit is not None and call.trainable and bool((abs(credit) > least).any())
        for trajectory, calls in zip(group.members, advantages, strict=True)
        for call, credit in zip(trajectory.transitions, calls, strict=True)
    )


def unread_rewards(recipe: Recipe, scorer: Scorer, credited: Sequence[CreditedGroup]) -> str | None:
    """Say in a sentence that intermediate rewards change no advantage, even if half a group earns more by its calls.
    None where they do, there are none, or no group can tell. Credit is assigned anew: not for a method with memory."""
    names = [name for name, reward in recipe.intermediate_rewards.items() if reward.weight != 0.0]
    group = next((each.group for each in credited if _can_tell(each.group)), None)
    if not names or group is None:
        return None
    paid = [
        replace(rollout, transitions=_paid(rollout.transitions, names)) if number % 2 else rollout
        for number, rollout in enumerate(group.trajectories)
    ]
    plain, other = (scorer.credit(rollouts, group.branches)[0].advantages for rollouts in (group.trajectories, paid))
    pairs = zip(chain.from_iterable(plain), chain.from_iterable(other), strict=True)
    if any(before is not None and after is not None and not np.array_equal(before, after) for before, after in pairs):
        return None
    keys = ", ".join(f"intermediate_rewards.{name}" for name in names)
    return (
        f"{keys}: credit.use = {recipe.credit.use!r} reads no rewards of calls (these do: 'turns', 'turn_gae'); "
        "they change nothing"
    )


@contextmanager
def _named(assigner: CreditAssigner, when: str) -> Iterator[None]:
    """Turn an assigner's error into a PluginError: which assigner, when, and the line of its file."""
    try:
        yield
    except LightningError:
        raise
    except Exception as error:  # the boundary to a user's own code
        raise PluginError(
            f"credit assigner {type(assigner).__name__!r} failed {when}: {describe_raised(error)}; mend it"
        ) from error


def _for_all_calls(group: TrajectoryGroup, judged: TrajectoryGroup, advantages: Advantages) -> Advantages:
    """Advantages of all of a group's calls; None for those that were not judged."""
    given = {
        call.id: credit
        for member, calls in zip(judged.trajectories, advantages, strict=False)
        for call, credit in zip(member.transitions, calls, strict=True)
    }
    return tuple(tuple(given.get(call.id) for call in member.transitions) for member in group.trajectories)


def _only(policy: str, group: TrajectoryGroup) -> TrajectoryGroup:
    """Mark the calls of all other policies as not trained."""
    return change_members(group, lambda trajectory: leave_out(trajectory, lambda call: call.policy != policy))


def _can_tell(group: TrajectoryGroup) -> bool:
    rewarded = [rollout for rollout in group.trajectories if rollout.reward is not None]
    return sum(any(call.trainable for call in rollout.transitions) for rollout in rewarded) > 1


def _paid(calls: Sequence[Transition], names: Sequence[str]) -> tuple[Transition, ...]:
    """Reward the calls with 1, 1/2, 1/3 … more. All of them, as some are of roles that are not trained, and a call may
    be credited with what comes after it alone: a reward of one call might reach no trained call."""
    return tuple(
        replace(call, rewards={**call.rewards, **{name: (call.rewards.get(name) or 0.0) + 1.0 / n for name in names}})
        for n, call in enumerate(calls, start=1)
    )
