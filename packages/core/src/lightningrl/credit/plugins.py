"""The credit assigners that come with LightningRL, as plugin records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import Plugin

if TYPE_CHECKING:
    from lightningrl.credit import Baseline, DiscountedReturns, IdenticalAssignment
    from lightningrl.credit.judge_assigner import Aggregate, GroupJudge, OutcomeUse, Prompt, Scale, TurnJudge

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


def _judge(
    *,
    per: Literal["turn", "group"] = "turn",
    rubric: str | None = None,
    prompt: Prompt | str | None = None,
    scale: Scale = "number",
    tries: int = 3,
    longest_text: int = 2000,
    longest: int = 20_000,
    shows_answer: bool = False,
    settings: Mapping[str, Any] | None = None,
    aggregate: Aggregate | None = None,
    gamma: float | None = None,
    outcome: OutcomeUse | None = None,
    weight: float = 1.0,
    baseline: Baseline = "grpo",
    epsilon: float = 1e-6,
) -> TurnJudge | GroupJudge:
    from lightningrl.credit.judge_assigner import Bench, GroupJudge, TurnJudge

    bench = Bench(
        rubric=rubric,
        prompt=load_callable(prompt) if isinstance(prompt, str) else prompt,
        scale=scale,
        tries=tries,
        longest_text=longest_text,
        longest=longest,
        shows_answer=shows_answer,
        settings=dict(settings or {}),
    )
    of_others = {"turn": {"outcome": outcome}, "group": {"aggregate": aggregate, "gamma": gamma}}
    if per not in of_others:
        raise ConfigError(f"credit assigner 'judge': per {per!r} is none of {', '.join(map(repr, of_others))}")
    if unread := [name for name, value in of_others[per].items() if value is not None]:
        raise ConfigError(f"credit assigner 'judge' with per = {per!r} does not read {', '.join(unread)}; leave it out")
    if per == "group":
        return GroupJudge(bench, outcome=outcome or "replace", weight=weight, baseline=baseline, epsilon=epsilon)
    turns = 1.0 if gamma is None else gamma
    return TurnJudge(bench, aggregate=aggregate or "min", gamma=turns, weight=weight, baseline=baseline, epsilon=epsilon)


PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="identical", summary="each call gets the episode's return; choose the baseline", factory=_identical),
    Plugin(name="grpo", summary="each call gets (R - mean) / std of its group", factory=_grpo),
    Plugin(name="dr_grpo", summary="each call gets R - mean of its group", factory=_dr_grpo),
    Plugin(name="rloo", summary="each call gets R - mean of the others", factory=_rloo),
    Plugin(name="reinforce", summary="each call gets R, with no baseline", factory=_reinforce),
    Plugin(name="discounted", summary="discounted turn rewards to go", factory=_discounted),
    Plugin(name="judge", summary="a judge grades each turn, or the rollouts of a group beside each other", factory=_judge),
)
