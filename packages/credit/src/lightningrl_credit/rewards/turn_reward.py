"""An intermediate reward of a run: named, weighted, as it is or as a potential.

trajectory ─► function(trajectory): one value per call ─► checked ─► form ─► weight ─► transition.rewards[name]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightningrl.errors import ConfigError, RewardError
from lightningrl.types import Trajectory
from lightningrl_credit.rewards.lineages import Joins, shape
from lightningrl_credit.rewards.value import Range, check_range, check_weight, read_value

__all__ = ["Form", "TurnReward"]

Form = Literal["plain", "potential"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReward:
    """Pay of calls under one name. Itself a `protocols.IntermediateReward`."""

    name: str
    function: Callable[[Trajectory], Sequence[float | None]]
    weight: float = 1.0
    """0.0 = switched off: it adds nothing."""
    form: Form = "plain"
    """`potential`: its change from call to call, which no policy gains by (`lightningrl_credit.rewards.lineages`)."""
    gamma: float = 1.0
    """Discount of the potential, that of the credit's returns."""
    joins: Joins = "sum"
    """Way that the credit's returns join branches, for the potential."""
    range: Range | None = None
    """Least and most, before form and weight."""

    def __post_init__(self) -> None:
        check_range(f"intermediate reward {self.name!r}", self.range)
        check_weight(f"intermediate reward {self.name!r}", self.weight)
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(
                f"intermediate reward {self.name!r}: gamma {self.gamma!r} is not between 0 and 1; "
                "leave it to the credit"
            )
        if self.joins not in get_args(Joins):
            raise ConfigError(
                f"intermediate reward {self.name!r}: joins {self.joins!r} is none of 'sum', 'mean', 'first'; "
                "mend the credit's"
            )
        if not callable(self.function):
            raise ConfigError(
                f"intermediate reward {self.name!r} is a {type(self.function).__name__}, not callable; name a class"
            )

    @property
    def is_potential(self) -> bool:
        """True if it pays its change."""
        return self.form == "potential"

    def __call__(self, trajectory: Trajectory, /) -> list[float | None]:
        """One value per call. Raises RewardError for a defect of the function (another type, or not one value per
        call), BadValue for a value that is not finite or out of range, and whatever the function raises."""
        values = list(self.function(trajectory))
        if len(values) != len(trajectory.transitions):
            raise RewardError(
                f"intermediate reward {self.name!r} returned {len(values)} values for rollout "
                f"{trajectory.rollout_id!r} with {len(trajectory.transitions)} calls; return one per call, "
                "None for no opinion"
            )
        checked = [self._check(value, trajectory) for value in values]
        if self.is_potential:
            return [
                self.weight * value
                for value in shape(trajectory.transitions, checked, gamma=self.gamma, joins=self.joins)
            ]
        return [None if value is None else self.weight * value for value in checked]

    def _check(self, value: Any, trajectory: Trajectory) -> float | None:
        return read_value(value, what=f"intermediate reward {self.name!r}", trajectory=trajectory, range=self.range)
