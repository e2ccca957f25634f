"""How imperfect demonstrators go about a step, and when they stop. Every one of them knows the right call, too.

Probabilities above one half are what the cold-started policy prefers: greedy decoding makes these mistakes always.
"""

from __future__ import annotations

import random
from dataclasses import replace

from problems import Step

__all__ = ["GIVE_UP", "NO_TOOL", "STOP_EARLY", "arguments_of", "mistaken"]

SWAPPED = {"missing": 0.60}
"""Kind of step -> how often its operands are in the wrong order: the running number first, since it comes first in the
text."""
WRONG_SIGN = {"fewer than": 0.60, "more than": 0.15, "gain": 0.05, "lose": 0.05, "grow": 0.05, "share": 0.05}
"""Kind of step -> how often it is done the other way round, as its words suggest at first sight."""
INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}
LETTER_X = 0.40
"""How often a product is written with the letter x, which the calculator refuses."""
BROKEN_JSON = 0.04
"""How often the arguments lack a quotation mark, which makes the call mere text."""
GIVE_UP = 0.40
"""How often somebody whose call was refused answers with what they have, instead of calling again."""
NO_TOOL = 0.08
"""How often somebody answers at once, with a number of the text."""
STOP_EARLY = {1: 0.0, 2: 0.15, 3: 0.20}
"""Steps of the problem -> how often the last one is left out."""


def mistaken(step: Step, rng: random.Random) -> Step:
    """The step as an imperfect demonstrator sees it."""
    if rng.random() < SWAPPED.get(step.kind, 0.0):
        return replace(step, left=step.right, right=step.left)
    if rng.random() < WRONG_SIGN.get(step.kind, 0.0):
        return replace(step, sign=INVERSE[step.sign])
    return step


def arguments_of(expression: str, rng: random.Random) -> str:
    """The tool call's arguments as an imperfect demonstrator writes them."""
    if rng.random() < LETTER_X:
        expression = expression.replace("*", "x")
    return f'{{"expression": {expression}"}}' if rng.random() < BROKEN_JSON else f'{{"expression": "{expression}"}}'
