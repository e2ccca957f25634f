"""Metrics of a step: rewards, calls and tokens of its rollouts, its branches, its rows; and reward hacking, noticed.

A policy farms its intermediate rewards where they grow and the outcome does not:

    now      the last steps          then   the steps in which the outcome was at its best
    farming  P_now > P_then, beyond noise, and within groups the rollouts that are paid more do no better:
             corr(P_i, R_i) ≤ 0

P_i sums rollout i's plain intermediate rewards over its calls; R_i is its outcome. Potentials pay nothing in sum.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightningrl.advantages import center, teaching_rows
from lightningrl.types import OtherCallKind, Outcome, Sample, Trajectory, TrajectoryGroup

__all__ = ["FAILURES", "FarmingWatch", "describe_branches", "describe_rollouts", "describe_rows"]

logger = logging.getLogger(__name__)

FAILURES: Final = (Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.CONTEXT_OVERFLOW, Outcome.INFRASTRUCTURE_ERROR)
"""Outcomes whose share of the rollouts is a metric each."""
_WINDOW = 5
"""Steps that are taken together: `now` is so many, `then` too."""
_ERRORS = 4.0
"""Least growth that is beyond noise, in standard errors."""


def describe_rollouts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over trajectories: `reward`, each named reward (a failure that the policy caused counts as the lowest),
    calls; shares of the failures by kind; sums: tokens, breaks, refused calls, threads left; of answers that were
    offered tools, the share with a malformed tool call. Keys without a value are left out, so that none is NaN."""
    metrics: dict[str, float] = {}
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if rewards:
        metrics["reward"] = float(np.mean(rewards))
    for name in sorted({name for trajectory in trajectories for name in trajectory.rewards}):
        values = [value for trajectory in trajectories if (value := trajectory.rewards.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = float(np.mean(values))
    calls = [call for trajectory in trajectories for call in trajectory.transitions]
    metrics["rollouts"] = len(trajectories)
    metrics["rollouts_unrewarded"] = len(trajectories) - len(rewards)
    outcomes = [trajectory.outcome for trajectory in trajectories]
    metrics |= {f"failures/{kind.value}": outcomes.count(kind) / max(1, len(outcomes)) for kind in FAILURES}
    metrics["rewards_failed"] = float(sum(trajectory.unrewarded is not None for trajectory in trajectories))
    metrics["calls_per_rollout"] = len(calls) / max(1, len(trajectories))
    metrics["completion_tokens"] = float(sum(len(call.completion_ids) for call in calls))
    metrics["prompt_tokens"] = float(sum(len(call.prompt_ids) for call in calls))
    metrics["breaks"] = float(sum(call.is_break for call in calls))
    offered = [call for call in calls if call.offered or call.malformed]
    if offered:
        metrics["malformed_tool_calls"] = sum(bool(call.malformed) for call in offered) / len(offered)
    others = [call.kind for trajectory in trajectories for call in trajectory.other_calls]
    rare = {
        "calls_judge": others.count(OtherCallKind.JUDGE),
        "tries_repeated": sum(trajectory.attempt - 1 for trajectory in trajectories),
        "tools_contradicted": sum(tool.contradicted for rollout in trajectories for tool in rollout.tool_calls),
        "results_refused": sum(trajectory.results_refused for trajectory in trajectories),
        "threads_left": sum(len(trajectory.left_threads) for trajectory in trajectories),
    }
    metrics |= {name: float(count) for name, count in rare.items() if count}
    metrics["calls_refused"] = float(others.count(OtherCallKind.REFUSED))
    return metrics


def describe_branches(branches: Sequence[Trajectory]) -> dict[str, float]:
    """Counts of branches, of diverged ones and of the tokens that they sampled; empty where there is no branch."""
    if not branches:
        return {}
    tokens = sum(
        len(call.completion_ids) for branch in branches for call in branch.transitions if call.replayed_from is None
    )
    diverged = sum(branch.outcome is Outcome.DIVERGED for branch in branches)
    return {"branches": float(len(branches)), "branches_diverged": float(diverged), "branch_tokens": float(tokens)}


def describe_rows(signals: Sequence[bool], samples: Sequence[Sample]) -> dict[str, float]:
    """Counts of groups, and of rows with an advantage; a learner whose loss has other terms learns from more."""
    teaching = teaching_rows(samples)
    return {
        "groups": float(len(signals)),
        "groups_without_signal": float(signals.count(False)),
        "rows": float(len(teaching)),
        "trained_tokens": float(sum(int(sample.mask.sum()) for sample in teaching)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _PaidStep:
    """Means over the rewarded rollouts of a step, and sums of squares and products about the means of their groups."""

    number: int
    paid: float
    outcome: float
    by_name: Mapping[str, float]
    products: float
    paid_squares: float
    outcome_squares: float


class FarmingWatch:
    """Looks at whole steps, and warns once. Its memory ends with the process."""

    def __init__(self, plain: Collection[str]) -> None:
        """`plain`: names of the intermediate rewards that are no potential."""
        self._plain = frozenset(plain)
        self._latest: deque[_PaidStep] = deque(maxlen=2 * _WINDOW)
        self._best: list[_PaidStep] = []
        """Steps in which the outcome was at its best, of those that are no part of `now`; of equal ones the first."""
        self._has_warned = False

    def finish_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Metrics `air/NAME`, a rollout's mean of each plain intermediate reward, and `air/correlation` with the
        outcome, within groups; left out where one of the two is the same throughout."""
        rewarded = [[rollout for rollout in group.trajectories if rollout.reward is not None] for group in groups]
        if not self._plain or not any(rewarded):
            return {}
        step = _look_at_pay(rewarded, self._plain)
        self._latest.append(step)
        if len(self._latest) == 2 * _WINDOW:
            before = list(self._latest)[:_WINDOW]
            self._best = max(self._best or before, before, key=lambda window: _mean([step.outcome for step in window]))
        if not self._has_warned and (sentence := self.explain()):
            self._has_warned = True
            logger.warning("step %d: %s", step.number, sentence)
        correlation = _correlation([step])
        metrics = {f"air/{name}": value for name, value in step.by_name.items()}
        return metrics if correlation is None else {**metrics, "air/correlation": correlation}

    def explain(self) -> str | None:
        """Say in a sentence that the policy farms; None where nothing shows it now."""
        if not self._best:
            return None
        now, then = list(self._latest)[-_WINDOW:], self._best
        outcome, best = (_mean([step.outcome for step in window]) for window in (now, then))
        if outcome > best or not _is_beyond_noise([step.paid for step in now], [step.paid for step in then]):
            return None
        correlation = _correlation(now)
        if correlation is not None and correlation > 0:
            return None
        growth = {
            name: _mean([step.by_name[name] for step in now]) - _mean([step.by_name[name] for step in then])
            for name in self._plain
        }
        name = max(sorted(growth), key=lambda name: growth[name])
        before, after = (_mean([step.paid for step in window]) for window in (then, now))
        same = "all do equally well" if correlation is None else f"correlation {correlation:.2f}"
        return (
            f"intermediate rewards grew from {before:.3g} to {after:.3g} a rollout since step {then[-1].number}, and "
            f"the reward did not ({best:.3g}, now {outcome:.3g}); rollouts that are paid more do no better ({same}): "
            f"the policy may farm {name!r}; lower intermediate_rewards.{name}.weight, or charge for what fails and pay "
            "nothing for what works"
        )


def _look_at_pay(groups: Sequence[Sequence[Trajectory]], names: Collection[str]) -> _PaidStep:
    rollouts = [rollout for group in groups for rollout in group]
    products = paid_squares = outcome_squares = 0.0
    for group in groups:
        paid = center([_paid(rollout, names) for rollout in group])
        outcome = center([rollout.reward or 0.0 for rollout in group])
        products += float(paid @ outcome)
        paid_squares += float(paid @ paid)
        outcome_squares += float(outcome @ outcome)
    return _PaidStep(
        number=1 + max(rollout.step for rollout in rollouts),
        paid=_mean([_paid(rollout, names) for rollout in rollouts]),
        outcome=_mean([rollout.reward or 0.0 for rollout in rollouts]),
        by_name={name: _mean([_paid(rollout, {name}) for rollout in rollouts]) for name in sorted(names)},
        products=products,
        paid_squares=paid_squares,
        outcome_squares=outcome_squares,
    )


def _paid(trajectory: Trajectory, names: Collection[str]) -> float:
    return sum(
        value
        for call in trajectory.transitions
        for name, value in call.rewards.items()
        if name in names and value is not None
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _correlation(steps: Sequence[_PaidStep]) -> float | None:
    squares = sum(step.paid_squares for step in steps) * sum(step.outcome_squares for step in steps)
    return sum(step.products for step in steps) / math.sqrt(squares) if squares else None


def _is_beyond_noise(now: Sequence[float], then: Sequence[float]) -> bool:
    """True if the mean has grown by more than some standard errors of the difference."""
    growth = _mean(now) - _mean(then)
    error = math.sqrt(float(np.var(now, ddof=1)) / len(now) + float(np.var(then, ddof=1)) / len(then))
    return growth > max(_ERRORS * error, 1e-9 * (abs(_mean(now)) + abs(_mean(then))))
