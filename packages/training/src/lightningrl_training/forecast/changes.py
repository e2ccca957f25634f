"""Changes of a recipe that would change its forecast, each as evidence of its own, forecast by the same coefficients.

warm start, easier or harder tasks: sentences, since nobody knows the evidence that they would give
larger groups, learning rate, steps: evidence as expected ─► predict ─► from … to …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightningrl_training.forecast.evidence import Evidence
from lightningrl_training.forecast.prediction import GainForecast, predict

__all__ = ["Change", "possible_changes"]

RARE: Final = 0.05
"""Best reward of a group below which a policy does not know how to earn."""
BROKEN: Final = 0.3
"""Share of malformed, cut-off or failed answers from which on the form is what is missing."""
SOLVED: Final = 0.9
"""Mean reward above which tasks have little left to teach."""
FEW: Final = 0.5
"""Share of groups with a signal below which most rollouts teach nothing."""
FASTER: Final = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a recipe, and what would be forecast then."""

    what: str
    why: str
    forecast: GainForecast | None = None
    """None = it cannot be said before it is tried."""


def possible_changes(evidence: Evidence) -> list[Change]:
    """Changes that may raise the forecast: those that nobody can put a number on first, then by what they bring."""
    counted = [change for change in _counted(evidence) if change.forecast is not None]
    now = predict(evidence).gain
    better = [change for change in counted if change.forecast is not None and change.forecast.gain > now + 0.005]
    return [*_named(evidence), *sorted(better, key=lambda change: -change.forecast.gain if change.forecast else 0.0)]


def _named(evidence: Evidence) -> Iterator[Change]:
    broken = max(evidence.malformed, evidence.cut_off, evidence.failed)
    if evidence.best < RARE or (broken > BROKEN and evidence.reward < FEW):
        why = (
            f"{100 * broken:.0f} % of its answers have no proper form"
            if broken > BROKEN
            else f"the best rollout of a group earns {evidence.best:.2f}: there is nothing to learn from"
        )
        yield Change(what="a warm start on good traces", why=why)
    if evidence.signal < FEW and evidence.reward < SOLVED:
        yield Change(
            what="easier tasks",
            why=f"rewards differ within {100 * evidence.signal:.0f} % of the groups; take tasks that it solves now and "
            "then",
        )
    if evidence.reward >= SOLVED:
        yield Change(what="harder tasks", why=f"it earns {evidence.reward:.2f} before any step")


def _counted(evidence: Evidence) -> Iterator[Change]:
    if evidence.signal_doubled > evidence.signal:
        size = 2 * evidence.group_size
        larger = {"group_size": size, "step_rollouts": 2 * evidence.step_rollouts}
        yield Change(
            what=f"loop.group_size = {size}",
            why=f"signal in {100 * evidence.signal_doubled:.0f} % of the groups, not {100 * evidence.signal:.0f} %",
            forecast=predict(evidence.model_copy(update=larger)),
        )
    if evidence.moved is not None:
        yield Change(
            what=f"learner.learning_rate × {FASTER:g}",
            why=f"a step moves a rollout by {evidence.moved:.2g} nats",
            forecast=predict(evidence.model_copy(update={"moved": evidence.moved * FASTER})),
        )
    yield Change(
        what=f"loop.steps = {2 * evidence.steps}",
        why="twice as many",
        forecast=predict(evidence.model_copy(update={"steps": 2 * evidence.steps})),
    )
