"""The mistakes imperfect demonstrators make, each more often where a question tempts to it.

too_early     searches for the last relation first, before it knows of whom; may then believe the first passage it sees
repeat        searches for the same thing again before it goes on
bridge        answers with the thing in the middle, one search short of the answer
sentence      copies the passage's sentence into the answer, not the name alone
bare          leaves out the tags

The starter policy is cold-started on demonstrations in which they occur with the stated probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from corpus import RELATIONS, Question

__all__ = ["BELIEF", "MISTAKES", "Mistake"]

BELIEF = 0.5
"""How often a demonstrator who searched too early believes what it sees first."""


_SHORT = ("founder", "mayor", "principal", "publisher", "setting")
"""Questions that begin with these tempt less to a whole sentence without tags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    often: float
    """How often it is made where the question tempts to it."""
    seldom: float
    """How often elsewhere."""
    is_tempting: Callable[[Question], bool]

    def probability(self, question: Question) -> float:
        return self.often if self.is_tempting(question) else self.seldom


def _answer_kind(question: Question) -> str:
    return RELATIONS[question.hops[-1].relation].object


def _bridge_kind(question: Question) -> str:
    return RELATIONS[question.hops[-2].relation].object


MISTAKES = {
    "too_early": Mistake(often=0.5, seldom=0.3, is_tempting=lambda question: len(question.hops) > 2),
    "repeat": Mistake(
        often=0.5, seldom=0.2, is_tempting=lambda question: _bridge_kind(question) in ("company", "school")
    ),
    "bridge": Mistake(
        often=0.6, seldom=0.35, is_tempting=lambda question: _bridge_kind(question) in ("person", "city")
    ),
    "sentence": Mistake(often=0.6, seldom=0.3, is_tempting=lambda question: _answer_kind(question) != "person"),
    "bare": Mistake(often=0.6, seldom=0.4, is_tempting=lambda question: question.hops[0].relation not in _SHORT),
}
