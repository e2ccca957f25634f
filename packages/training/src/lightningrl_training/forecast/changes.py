"""Changes of a recipe that may raise its forecast: sentences, and more steps with the forecast of them.

warm start, tasks, groups, learning rate: sentences, since nobody knows the evidence that they would give
steps: evidence as expected ─► predict ─► from … to …
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
MUCH: Final = 0.2
"""Share of groups that larger ones would give a signal."""
LITTLE: Final = 0.005
"""Gain that is not worth a word."""
FEW: Final = 0.5
"""Share of groups with a signal below which most rollouts teach nothing."""
FAR: Final = 1.0
"""Nats that all steps move a rollout by below which they lead nowhere."""
HARM: Final = -0.1
"""Nats that a step moves what earned by below which it does harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a recipe, and what would be forecast then."""

    what: str
    why: str
    forecast: GainForecast | None = None
    """None = it cannot be said before it is tried."""


def possible_changes(evidence: Evidence) -> list[Change]:
    """Changes that may raise the forecast: those that nobody can put a number on first."""
    steps = 2 * evidence.steps
    longer = predict(evidence.model_copy(update={"steps": steps}))
    changes = [*_named(evidence)]
    if longer.gain > predict(evidence).gain + LITTLE:
        changes.append(Change(what=f"loop.steps = {steps}", why="twice as many", forecast=longer))
    return changes


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
    if evidence.signal_doubled > evidence.signal + MUCH:
        yield Change(
            what=f"loop.group_size = {2 * evidence.group_size}",
            why=f"rewards differ within {100 * evidence.signal_doubled:.0f} % of the groups then, now within "
            f"{100 * evidence.signal:.0f} %",
        )
    if evidence.moved is not None and abs(evidence.moved) * evidence.steps < FAR:
        yield Change(
            what="a higher learning rate",
            why=f"all steps move a rollout by {abs(evidence.moved) * evidence.steps:.2g} nats",
        )
    if evidence.raised < HARM:
        yield Change(
            what="a lower learning rate",
            why=f"a step makes less likely what earned, by {-evidence.raised:.2g} nats",
        )
