"""The credit assigners that come with LightningRL, as plugin records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightningrl.advantages.spread import Counted
from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import Plugin
from lightningrl.protocols import CreditAssigner
from lightningrl_credit import (
    Baseline,
    Branches,
    Clip,
    IdenticalAssignment,
    PerAgent,
    StateGroups,
    Sum,
    TurnReturns,
    Whiten,
)
from lightningrl_credit.judge_assigner import Aggregate, Bench, GroupJudge, OutcomeUse, Prompt, Scale, TurnJudge
from lightningrl_credit.likelihood import Answer, Compared, Follows, Hindsight, InformationGain
from lightningrl_credit.turn_gae import TurnGae

__all__ = ["PLUGINS"]

Build = Callable[[Any], CreditAssigner]
"""Of a part as the recipe has it: `{ use = …, options = … }`."""


def _with_epsilon(baseline: Baseline, *, epsilon: float = 1e-6) -> IdenticalAssignment:
    return IdenticalAssignment(baseline=baseline, epsilon=epsilon)


def _without_options(baseline: Baseline) -> IdenticalAssignment:
    return IdenticalAssignment(baseline=baseline)


def _discounted(
    *, gamma: float = 1.0, weights: Mapping[str, float] | None = None, baseline: Baseline = "grpo", epsilon: float = 1e-6
) -> TurnReturns:
    return TurnReturns(gamma=gamma, weights=weights, baseline=baseline, epsilon=epsilon)


def _sum(*, parts: Sequence[Any], build: Build) -> Sum:
    def weigh(part: Any) -> tuple[CreditAssigner, float]:
        if not isinstance(part, Mapping):
            return build(part), 1.0
        return build({key: value for key, value in part.items() if key != "weight"}), part.get("weight", 1.0)

    return Sum(*map(weigh, parts))


def _per_agent(*, of: Any, build: Build, counted: Counted = "rollouts") -> PerAgent:
    return PerAgent(build(of), counted=counted)


def _whiten(*, of: Any, build: Build) -> Whiten:
    return Whiten(build(of))


def _clip(*, of: Any, at: float, build: Build) -> Clip:
    return Clip(build(of), at=at)


def _turn_gae(
    *, gamma: float = 0.99, lam: float = 0.9, bi_level: bool = False, token_lam: float = 1.0, weights: Mapping[str, float] | None = None
) -> TurnGae:
    return TurnGae(gamma=gamma, lam=lam, level="both" if bi_level else "turn", token_lam=token_lam, weights=weights)


def _gae(*, gamma: float = 1.0, lam: float = 1.0, weights: Mapping[str, float] | None = None) -> TurnGae:
    return TurnGae(gamma=gamma, lam=lam, level="token", weights=weights)


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
    follows: Follows | None = None,
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
    if isinstance(answer, str) and answer.partition(":")[0].endswith(".py"):
        answer = load_callable(answer, folder)
    of_gain = {"answer": answer, "follows": follows, "turn_weight": turn_weight}
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


PLUGINS: tuple[Plugin, ...] = (
    Plugin(name="identical", summary="each call gets the episode's return; choose the baseline", factory=IdenticalAssignment),
    Plugin(name="grpo", summary="each call gets (R - mean) / std of its group", factory=partial(_with_epsilon, "grpo")),
    Plugin(name="dr_grpo", summary="each call gets R - mean of its group", factory=partial(_without_options, "dr_grpo")),
    Plugin(name="rloo", summary="each call gets R - mean of the others", factory=partial(_without_options, "rloo")),
    Plugin(name="maxrl", summary="each call gets (R - mean) / mean of its group", factory=partial(_with_epsilon, "maxrl")),
    Plugin(name="opo", summary="each call gets R - mean of its group by tokens", factory=partial(_without_options, "opo")),
    Plugin(name="reinforce", summary="each call gets R, with no baseline", factory=partial(_without_options, "none")),
    Plugin(name="turns", summary="turn rewards to go and the outcome, each with its baseline", factory=TurnReturns),
    Plugin(name="discounted", summary="`turns`, by the name that it had", factory=_discounted),
    Plugin(name="states", summary="calls in the same state are compared (GiGPO, HGPO, ECPO)", factory=StateGroups),
    Plugin(
        name="branches",
        summary="the value of each state by branching there (VinePPO); it cost more rollouts than it saved in our study",
        factory=Branches,
    ),
    Plugin(name="sum", summary="weighted sum of other assigners", factory=_sum),
    Plugin(name="per_agent", summary="another assigner, compared within each role's calls", factory=_per_agent),
    Plugin(name="whiten", summary="another assigner, its group's tokens with mean 0 and deviation 1", factory=_whiten),
    Plugin(name="clip", summary="another assigner, cut at a bound", factory=_clip),
    Plugin(name="turn_gae", summary="advantages over turns, with a critic (Turn-PPO; bi-level as in VAGEN)", factory=_turn_gae),
    Plugin(name="gae", summary="advantages over tokens, with a critic (PPO)", factory=_gae),
    Plugin(name="judge", summary="a judge grades each turn, or the rollouts of a group beside each other", factory=_judge),
    Plugin(
        name="likelihood",
        summary="how much likelier a call made the gold answer (IGPO), or success makes the call (HCAPO)",
        factory=_likelihood,
    ),
)
