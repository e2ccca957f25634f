"""Arithmetic word problems: an opening, one to three steps, a question. Each step is a sentence and an operation on a
running number.

    Anna has 24 plums. | Anna finds 6 more. | They are shared equally by 3 people, Ben is one of them. | How many plums
    does Ben have?
          24                24 + 6 = 30               30 / 3 = 10                                 10

The kinds of the steps, in order, are a problem's structure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from calculator import calculator

__all__ = ["KINDS", "Kind", "Problem", "Step", "build_problem"]

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Klara",
    "Leo",
    "Mila",
    "Noah",
    "Olga",
    "Paul",
)
THINGS = ("plums", "coins", "cards", "stamps", "shells", "nuts", "books", "eggs", "pens", "cups", "beads", "seeds")
LARGEST = 99
TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation; `x` stands for the running number."""

    kind: str
    left: str
    sign: str
    right: str

    def expression(self, x: str) -> str:
        """What the calculator is asked, with the running number filled in."""
        left, right = (x if side == "x" else side for side in (self.left, self.right))
        return f"{left} {self.sign} {right}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    text: str
    start: str
    steps: tuple[Step, ...]

    @property
    def structure(self) -> tuple[str, ...]:
        return tuple(step.kind for step in self.steps)

    @property
    def answer(self) -> str:
        value = self.start
        for step in self.steps:
            value = calculator(step.expression(value))
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of step."""

    sign: str
    texts: tuple[str, ...]
    """`{who}` has the running number of `{things}` before it; after it, `{other}` does where the text names one."""
    number: Callable[[int, random.Random], int | None]
    """The step's own number, so that the result is a whole number of a fair size; None = there is none for this running
    number."""
    is_number_first: bool = False

    def result(self, x: int, number: int) -> int:
        left, right = (number, x) if self.is_number_first else (x, number)
        return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[self.sign]


def _more(x: int, rng: random.Random) -> int | None:
    return rng.randint(2, LARGEST - x) if x + 2 <= LARGEST else None


def _less(x: int, rng: random.Random) -> int | None:
    return rng.randint(2, x - 1) if x > 2 else None


def _factor(x: int, rng: random.Random) -> int | None:
    factors = [number for number in range(2, 10) if x * number <= LARGEST]
    return rng.choice(factors) if factors else None


def _divisor(x: int, rng: random.Random) -> int | None:
    divisors = [number for number in range(2, 10) if x % number == 0 and x > number]
    return rng.choice(divisors) if divisors else None


def _goal(x: int, rng: random.Random) -> int | None:
    return x + rng.randint(2, LARGEST - x) if x + 2 <= LARGEST else None


KINDS = {
    "gain": Kind(sign="+", number=_more, texts=("{who} finds {n} more.", "{who} gets {n} more from a friend.")),
    "lose": Kind(sign="-", number=_less, texts=("{who} gives away {n} of them.", "{who} loses {n} of them.")),
    "grow": Kind(
        sign="*", number=_factor, texts=("{other} has {n} times as many.", "{n} bags like this belong to {other}.")
    ),
    "share": Kind(sign="/", number=_divisor, texts=("They are shared equally by {n} people, {other} is one of them.",)),
    "fewer than": Kind(
        sign="+", number=_more, texts=("That is {n} fewer than {other} has.", "That is {n} less than what {other} has.")
    ),
    "more than": Kind(
        sign="-",
        number=_less,
        texts=("That is {n} more than {other} has.", "{other} would need {n} more to have as many."),
    ),
    "missing": Kind(
        sign="-",
        number=_goal,
        is_number_first=True,
        texts=("{who} needs {n} in all and {other} brings what is missing.",),
    ),
}


def build_problem(structure: tuple[str, ...], rng: random.Random) -> Problem | None:
    """A problem of this structure: names, things, wordings and numbers are drawn. None = no numbers of a fair size were
    found for it."""
    drawn = (_try_problem(structure, rng) for _ in range(TRIES))
    return next((problem for problem in drawn if problem is not None), None)


def _try_problem(structure: tuple[str, ...], rng: random.Random) -> Problem | None:
    people = rng.sample(NAMES, len(structure) + 1)
    things = rng.choice(THINGS)
    who, x = people.pop(), rng.randint(3, 70)
    start, steps = str(x), []
    said = {start}
    sentences = [f"{who} has {x} {things}."]
    for name in structure:
        kind = KINDS[name]
        number = kind.number(x, rng)
        if number is None or str(number) in said:
            return None  # no number of a fair size, or one that the text has already
        said.add(str(number))
        text = rng.choice(kind.texts)
        other = people.pop()
        sentences.append(text.format(who=who, other=other, n=number, things=things))
        who = other if "{other}" in text else who
        left, right = (str(number), "x") if kind.is_number_first else ("x", str(number))
        steps.append(Step(kind=name, left=left, sign=kind.sign, right=right))
        x = kind.result(x, number)
    sentences.append(f"How many {things} does {who} have?")
    return Problem(text=" ".join(sentences), start=start, steps=tuple(steps))
