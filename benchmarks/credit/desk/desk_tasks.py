"""Conversations of six questions, each of another form; none is in both sets."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

__all__ = ["FORMS", "train", "validation"]

QUESTIONS: Final = 6
FORMS: Final = (
    ("Add {b} to {a}.", "{a} + {b}"),
    ("Subtract {b} from {a}.", "{a} - {b}"),
    ("What is {b} less than {a}?", "{a} - {b}"),
    ("Double {a}.", "{a} * 2"),
    ("How many days are {d} weeks?", "{d} * 7"),
    ("Tom had {a} pens and lost {b}. How many are left?", "{a} - {b}"),
    ("{d} boxes hold {a} pens each. How many pens?", "{d} * {a}"),
    ("Triple {d} and add {b}.", "{d} * 3 + {b}"),
)
"""A question and the expression that answers it."""


def train() -> list[dict[str, str]]:
    """400 tasks."""
    return _draw(400, seed=1, taken={task["id"] for task in validation()})


def validation() -> list[dict[str, str]]:
    """32 tasks."""
    return _draw(32, seed=2, taken=())


def _draw(count: int, *, seed: int, taken: Collection[str]) -> list[dict[str, str]]:
    rng = random.Random(seed)
    drawn: dict[str, dict[str, str]] = {}
    while len(drawn) < count:
        questions, values = [], []
        for text, expression in rng.sample(FORMS, QUESTIONS):
            numbers = {"a": rng.randint(30, 99), "b": rng.randint(2, 29), "d": rng.randint(3, 19)}
            questions.append(text.format(**numbers))
            values.append(str(eval(expression.format(**numbers))))
        name = "|".join(questions)
        if name not in taken:
            drawn[name] = {"id": name, "input": name, "answer": ",".join(values)}
    return list(drawn.values())
