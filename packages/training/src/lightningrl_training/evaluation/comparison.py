"""Two policies on the same tasks: each task is its own control.

first[task] - second[task] ─► difference ─┬► t interval
                                          └► a bet, looked at after every task ─► better, worse, not enough tasks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightningrl.errors import ConfigError
from lightningrl_training.evaluation.result import Evaluation
from lightningrl_training.evaluation.statistics import (
    LEVEL,
    Bet,
    Interval,
    Verdict,
    bet,
    holm,
    mean_interval,
    sign_flip_p,
)

__all__ = ["Comparison", "SliceDifference", "compare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceDifference:
    """The policies on the tasks of one slice."""

    key: str
    value: str
    tasks: int
    difference: Interval
    p: float
    """Holm's p-value, corrected for all slices that are shown together."""

    @property
    def verdict(self) -> Verdict:
        if self.p >= 1.0 - LEVEL:
            return Verdict.NOT_ENOUGH
        return Verdict.BETTER if self.difference.mean > 0.0 else Verdict.WORSE


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of two policies: a difference above 0 is in favour of the first."""

    tasks: int
    """Tasks that both have results of."""
    difference: Interval
    """Difference of the mean reward, with Student's t interval over tasks; valid for one look, after all tasks."""
    sequential: Bet | None
    """Test that is valid for any number of looks; None = rewards lie outside the bounds that the recipe gives them."""
    slices: tuple[SliceDifference, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Verdict of the sequential test."""
        return Verdict.NOT_ENOUGH if self.sequential is None else self.sequential.verdict


def compare(first: Evaluation, second: Evaluation, slices: Sequence[str] = ()) -> Comparison:
    """Compare two evaluations on the tasks of both. Raises ConfigError where no task is in both."""
    lowest = min(first.lowest, second.lowest)  # a policy that breaks is no better than one that is wrong
    ours, theirs = first.means(lowest), second.means(lowest)
    both = [task.id for task in first.tasks if task.id in ours and task.id in theirs]
    if not both:
        raise ConfigError(
            f"{first.policy!r} and {second.policy!r} have results of no task in common; evaluate both on the same tasks"
        )
    differences = {task: ours[task] - theirs[task] for task in both}
    low, high = min(first.bounds[0], second.bounds[0]), max(first.bounds[1], second.bounds[1])
    bounds = (low - high, high - low) if first.fits_bounds and second.fits_bounds else None
    values = list(differences.values())
    parts = {
        (key, name): values_of_slice
        for key in slices
        for name, tasks in first.by_slice(key).items()
        if (values_of_slice := [differences[task] for task in tasks if task in differences])
    }
    p_values = holm({part: sign_flip_p(values_of_slice) for part, values_of_slice in parts.items()})
    horizon = max(len(both), first.asked)
    return Comparison(
        tasks=len(both),
        difference=mean_interval(values, bounds=bounds),
        sequential=None if bounds is None else bet(values, bounds=bounds, horizon=horizon),
        slices=tuple(
            SliceDifference(
                key=key,
                value=name,
                tasks=len(values_of_slice),
                difference=mean_interval(values_of_slice, bounds=bounds),
                p=p_values[key, name],
            )
            for (key, name), values_of_slice in parts.items()
        ),
    )
