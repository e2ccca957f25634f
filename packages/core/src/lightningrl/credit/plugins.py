"""The credit assigners that come with LightningRL, as plugin records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightningrl.plugins import Plugin

if TYPE_CHECKING:
    from lightningrl.credit import Baseline, Branches, DiscountedReturns, IdenticalAssignment

__all__ = ["PLUGINS"]


def _identical(*, baseline: Baseline = "grpo", epsilon: float = 1e-6) -> IdenticalAssignment:
    from lightningrl.credit import IdenticalAssignment

    return IdenticalAssignment(baseline=baseline, epsilon=epsilon)


def _grpo(*, epsilon: float = 1e-6) -> IdenticalAssignment:
    return _identical(baseline="grpo", epsilon=epsilon)


def _dr_grpo() -> IdenticalAssignment:
    return _identical(baseline="dr_grpo")


def _rloo() -> IdenticalAssignment:
    return _identical(baseline="rloo")


def _reinforce() -> IdenticalAssignment:
    return _identical(baseline="none")


def _discounted(
    *, gamma: float = 1.0, weights: Mapping[str, float] | None = None, baseline: Baseline = "grpo", epsilon: float = 1e-6
) -> DiscountedReturns:
    from lightningrl.credit import DiscountedReturns

    return DiscountedReturns(gamma=gamma, weights=weights, baseline=baseline, epsilon=epsilon)


def _branches(*, samples: int = 4, points: int = 0, rollouts: int = 0, equal: bool = False, train: bool = False) -> Branches:
    from lightningrl.credit import Branches

    return Branches(samples=samples, points=points, rollouts=rollouts, equal=equal, train=train)


PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="identical", summary="each call gets the episode's return; choose the baseline", factory=_identical),
    Plugin(name="grpo", summary="each call gets (R - mean) / std of its group", factory=_grpo),
    Plugin(name="dr_grpo", summary="each call gets R - mean of its group", factory=_dr_grpo),
    Plugin(name="rloo", summary="each call gets R - mean of the others", factory=_rloo),
    Plugin(name="reinforce", summary="each call gets R, with no baseline", factory=_reinforce),
    Plugin(name="branches", summary="the value of each state by branching the rollout there (VinePPO)", factory=_branches),
    Plugin(name="discounted", summary="discounted turn rewards to go", factory=_discounted),
)
