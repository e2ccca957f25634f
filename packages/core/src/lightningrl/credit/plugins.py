"""The credit assigners that come with LightningRL, as plugin records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import Plugin

if TYPE_CHECKING:
    from lightningrl.credit import Baseline, DiscountedReturns, IdenticalAssignment
    from lightningrl.credit.judge_assigner import Aggregate, GroupJudge, OutcomeUse, Prompt, Scale, TurnJudge
    from lightningrl.credit.likelihood import Answer, Compared, Hindsight, InformationGain
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
    folder: Path | str = ".",
) -> TurnJudge | GroupJudge:
    from lightningrl.credit.judge_assigner import Bench, GroupJudge, TurnJudge

    bench = Bench(
        rubric=rubric,
        prompt=load_callable(prompt, folder) if isinstance(prompt, str) else prompt,
        scale=scale,
        tries=tries,
        longest_text=longest_text,
        longest=longest,
        shows_answer=shows_answer,
        settings=dict(settings or {}),
    )
    shared: dict[str, Any] = {"weight": weight, "baseline": baseline, "epsilon": epsilon}
    options = _of_one("judge", "per", per, {"turn": {"aggregate": aggregate, "gamma": gamma}, "group": {"outcome": outcome}})
    return TurnJudge(bench, **options, **shared) if per == "turn" else GroupJudge(bench, **options, **shared)


def _likelihood(
    *,
    method: Literal["gain", "hindsight"] = "gain",
    answer: Answer | str | None = None,
    turn_weight: float | None = None,
    told: str | None = None,
    omega: float | None = None,
    temperature: float | None = None,
    bounds: Sequence[float] | None = None,
    smoothing: float | None = None,
    success: float | None = None,
    gamma: float = 1.0,
    compared: Compared = "turn",
    baseline: Baseline = "grpo",
    epsilon: float = 1e-6,
    folder: Path | str = ".",
) -> InformationGain | Hindsight:
    from lightningrl.credit.likelihood import Hindsight, InformationGain

    if isinstance(answer, str) and answer.partition(":")[0].endswith(".py"):
        answer = load_callable(answer, folder)
    of_gain = {"answer": answer, "turn_weight": turn_weight}
    of_hindsight = {
        "told": told,
        "omega": omega,
        "temperature": temperature,
        "bounds": bounds,
        "smoothing": smoothing,
        "success": success,
    }
    shared: dict[str, Any] = {"gamma": gamma, "compared": compared, "baseline": baseline, "epsilon": epsilon}
    options = _of_one("likelihood", "method", method, {"gain": of_gain, "hindsight": of_hindsight})
    return InformationGain(**options, **shared) if method == "gain" else Hindsight(**options, **shared)


def _of_one(use: str, key: str, chosen: str, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options that were given of the chosen kind. Raises ConfigError for one of another kind."""
    if chosen not in options:
        raise ConfigError(f"credit assigner {use!r}: {key} {chosen!r} is none of {', '.join(map(repr, options))}")
    given = {kind: {name: value for name, value in some.items() if value is not None} for kind, some in options.items()}
    if unread := [name for kind, some in given.items() if kind != chosen for name in some]:
        raise ConfigError(f"credit assigner {use!r} with {key} = {chosen!r} does not read {', '.join(unread)}; leave it out")
    return given[chosen]


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
    Plugin(name="judge", summary="a judge grades each turn, or the rollouts of a group beside each other", factory=_judge),
    Plugin(
        name="likelihood",
        summary="how much likelier a call made the gold answer (IGPO), or success makes the call (HCAPO)",
        factory=_likelihood,
    ),
    Plugin(name="turn_gae", summary="advantages over turns, with a critic (Turn-PPO; bi-level as in VAGEN)", factory=_turn_gae),
    Plugin(name="gae", summary="advantages over tokens, with a critic (PPO)", factory=_gae),
)
