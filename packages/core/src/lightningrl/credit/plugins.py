"""The credit assigners that come with LightningRL, as plugin records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightningrl.plugins import Plugin

if TYPE_CHECKING:
    from lightningrl.credit import Baseline, DiscountedReturns, IdenticalAssignment
    from lightningrl.credit.turn_gae import TurnGae

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


def _turn_gae(
    *, gamma: float = 0.99, lam: float = 0.9, bi_level: bool = False, token_lam: float = 1.0, weights: Mapping[str, float] | None = None
) -> TurnGae:
    from lightningrl.credit.turn_gae import TurnGae

    return TurnGae(gamma=gamma, lam=lam, level="both" if bi_level else "turn", token_lam=token_lam, weights=weights)


def _gae(*, gamma: float = 1.0, lam: float = 1.0, weights: Mapping[str, float] | None = None) -> TurnGae:
    from lightningrl.credit.turn_gae import TurnGae

    return TurnGae(gamma=gamma, lam=lam, level="token", weights=weights)


PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="identical", summary="each call gets the episode's return; choose the baseline", factory=_identical),
    Plugin(name="grpo", summary="each call gets (R - mean) / std of its group", factory=_grpo),
    Plugin(name="dr_grpo", summary="each call gets R - mean of its group", factory=_dr_grpo),
    Plugin(name="rloo", summary="each call gets R - mean of the others", factory=_rloo),
    Plugin(name="reinforce", summary="each call gets R, with no baseline", factory=_reinforce),
    Plugin(name="discounted", summary="discounted turn rewards to go", factory=_discounted),
    Plugin(name="turn_gae", summary="advantages over turns, with a critic (Turn-PPO; bi-level as in VAGEN)", factory=_turn_gae),
    Plugin(name="gae", summary="advantages over tokens, with a critic (PPO)", factory=_gae),
)
