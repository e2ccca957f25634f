"""Reward hacking, noticed: a policy farms its intermediate rewards where they grow and the outcome does not.

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

import numpy as np

from lightningrl.advantages import center
from lightningrl.types import Trajectory, TrajectoryGroup

__all__ = ["FarmingWatch"]

logger = logging.getLogger(__name__)

STEPS = 5
"""Steps that are taken together: `now` is so many, `then` too."""
ERRORS = 4.0
"""Least growth that is beyond noise, in standard errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
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
        self._latest: deque[_Step] = deque(maxlen=2 * STEPS)
        self._best: list[_Step] = []
        """Steps in which the outcome was at its best, of those that are no part of `now`; of equal ones the first."""
        self._has_warned = False

    def finish_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Metrics `air/NAME`, a rollout's mean of each plain intermediate reward, and `air/correlation` with the
        outcome, within groups; left out where one of the two is the same throughout."""
        rewarded = [[rollout for rollout in group.trajectories if rollout.reward is not None] for group in groups]
        if not self._plain or not any(rewarded):
            return {}
        step = _look(rewarded, self._plain)
        self._latest.append(step)
        if len(self._latest) == 2 * STEPS:
            before = list(self._latest)[:STEPS]
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
        now, then = list(self._latest)[-STEPS:], self._best
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


def _look(groups: Sequence[Sequence[Trajectory]], names: Collection[str]) -> _Step:
    rollouts = [rollout for group in groups for rollout in group]
    products = paid_squares = outcome_squares = 0.0
    for group in groups:
        paid = center([_paid(rollout, names) for rollout in group])
        outcome = center([rollout.reward or 0.0 for rollout in group])
        products += float(paid @ outcome)
        paid_squares += float(paid @ paid)
        outcome_squares += float(outcome @ outcome)
    return _Step(
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


def _correlation(steps: Sequence[_Step]) -> float | None:
    squares = sum(step.paid_squares for step in steps) * sum(step.outcome_squares for step in steps)
    return sum(step.products for step in steps) / math.sqrt(squares) if squares else None


def _is_beyond_noise(now: Sequence[float], then: Sequence[float]) -> bool:
    """True if the mean has grown by more than some standard errors of the difference."""
    growth = _mean(now) - _mean(then)
    error = math.sqrt(float(np.var(now, ddof=1)) / len(now) + float(np.var(then, ddof=1)) / len(then))
    return growth > max(ERRORS * error, 1e-9 * (abs(_mean(now)) + abs(_mean(then))))
