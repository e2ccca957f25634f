"""Values that a reward may return (None, or a finite number, within its range where it declares one), and the weights
of rewards and whom they pay: from values to the return of a rollout, or of one role's calls."""

from __future__ import annotations

import decimal
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lightningrl.call_origin import is_role_among
from lightningrl.errors import ConfigError, RewardError
from lightningrl.types import Trajectory

__all__ = [
    "BadValue",
    "Range",
    "RewardWeights",
    "WeightedReward",
    "check_range",
    "check_weight",
    "is_allowed",
    "read_value",
]

Range = tuple[float, float]
"""Least and most, both allowed."""
GREATEST: Final = 1e9
"""Bound of rewards, weights and ranges, up or down: sums, squares and deviations of greater ones are no numbers."""


class BadValue(Exception):
    """A number that no reward may be; its text follows the reward's name."""


def check_range(what: str, range: Range | None) -> None:  # noqa: A002
    """Raise ConfigError for what is no range."""
    if range is None:
        return
    if not range[0] < range[1]:  # NaN is not, either
        raise ConfigError(
            f"{what}: range {list(range)!r} is none; write the least value, then a greater one: range = [0, 1]"
        )
    if not -GREATEST <= range[0] < range[1] <= GREATEST:
        raise ConfigError(
            f"{what}: range {list(range)!r} goes beyond {GREATEST:g}, which no reward may; write a smaller one"
        )


def check_weight(what: str, weight: float) -> None:
    """Raise ConfigError for what is no weight."""
    if not math.isfinite(weight):
        raise ConfigError(f"{what}: weight {weight!r} is not a finite number; set one, such as 1.0")
    if abs(weight) > GREATEST:
        raise ConfigError(f"{what}: weight {weight!r} is beyond {GREATEST:g}; set a smaller one, such as 1.0")


def is_allowed(number: float, range: Range | None) -> bool:  # noqa: A002
    """True if a reward may be this number."""
    least, most = range or (-GREATEST, GREATEST)
    return least <= number <= most


def read_value(
    value: Any,
    *,
    what: str,
    trajectory: Trajectory,
    range: Range | None = None,  # noqa: A002
) -> float | None:
    """Read a float. Raises RewardError for another type, BadValue if not finite, beyond `GREATEST`, out of range."""
    if value is None:
        return None
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()  # an array or a tensor that is one number
    if not isinstance(value, (numbers.Real, np.bool_, decimal.Decimal)):
        raise RewardError(
            f"{what} returned {_short(value)} of type {type(value).__name__} on rollout {trajectory.rollout_id!r} "
            f"(task {trajectory.task.id!r}); return a float, or None"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadValue(f"returned {number!r}; return a finite float, or None where it has nothing to say")
    if not is_allowed(number, range):
        if range is not None:
            raise BadValue(
                f"returned {number!r}, outside of its range [{range[0]:g}, {range[1]:g}]; mend the reward, or the range"
            )
        raise BadValue(f"returned {number!r}, beyond {GREATEST:g}, which no reward may; scale it")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedReward:
    """A terminal reward's part in the return."""

    name: str
    weight: float = 1.0
    """0.0 = computed and shown, but no part of the return."""
    agents: frozenset[str] | None = None
    """Roles that it pays; None = all."""

    def __post_init__(self) -> None:
        check_weight(f"reward {self.name!r}", self.weight)


class RewardWeights:
    """Weights of a run's terminal rewards. Raises ConfigError where there are none, or two of one name."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        if not rewards:
            raise ConfigError("no reward is configured; add one under [rewards]")
        self.names = tuple(reward.name for reward in rewards)
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ConfigError(f"two rewards are named {twice[0]!r}; rename one")
        self._counted = [reward for reward in rewards if reward.weight != 0.0]

    @property
    def by_name(self) -> Mapping[str, float]:
        """Weights of the rewards that are part of the return."""
        return {reward.name: reward.weight for reward in self._counted}

    @property
    def roles(self) -> frozenset[str]:
        """Roles that have rewards of their own."""
        return frozenset().union(*(reward.agents for reward in self._counted if reward.agents is not None))

    def paid_to(self, agent: str | None) -> frozenset[str]:
        """Names of the rewards that a role's calls are paid."""
        return frozenset(
            reward.name
            for reward in self._counted
            if reward.agents is None or (agent is not None and is_role_among(agent, reward.agents))
        )

    def total(self, values: Mapping[str, float | None], names: Collection[str]) -> float | None:
        """Weighted sum of some rewards; None when one of them is None, or none is named."""
        paid = [reward for reward in self._counted if reward.name in names]
        return _weighted_sum(paid, values) if paid else None

    def of_rollout(self, values: Mapping[str, float | None]) -> float | None:
        """Return of a rollout. A reward that pays some roles alone may be None beside others: then it adds nothing."""
        present = [reward for reward in self._counted if reward.agents is None or values[reward.name] is not None]
        return None if self._counted and not present else _weighted_sum(present, values)


def _weighted_sum(rewards: Sequence[WeightedReward], values: Mapping[str, float | None]) -> float | None:
    total = 0.0
    for reward in rewards:
        value = values.get(reward.name)
        if value is None:
            return None
        total += reward.weight * value
    return total
